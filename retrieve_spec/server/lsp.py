"""Language server: `textDocument/inlineCompletion` (LSP 3.18) on the same queue as the HTTP surface."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, default_converter
from pygls.uris import to_fs_path
from pygls.workspace import TextDocument

from retrieve_spec._version import __version__
from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.server.completions import opened
from retrieve_spec.server.editors import Remote, parsed, reason_of
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.prompts import Chunk
from retrieve_spec.server.schemas import InfillRequest
from retrieve_spec.server.service import Caller, Service
from retrieve_spec.server.workspace import Workspace

log = logging.getLogger("retrieve_spec.server")

FORGET = "retrieve-spec.forget"
_TOKENS = {lsp.InlineCompletionTriggerKind.Automatic: 64, lsp.InlineCompletionTriggerKind.Invoked: 128}
_LINE_MS = {lsp.InlineCompletionTriggerKind.Automatic: 250.0, lsp.InlineCompletionTriggerKind.Invoked: 1000.0}
_LOADING, _INDEXING = "retrieve-spec/loading", "retrieve-spec/indexing"

_SHOWN = 4
"""Other open documents of which the model is shown a piece."""
_LINES, _CHARS, _STEP = 64, 16_000, 32
"""Lines and characters of such a piece at most, and how far the place has to move before another one is shown."""
_ANSWER_S, _AGAIN_S = 60.0, 0.25
_CHARS_BEFORE, _CHARS_AFTER = 400_000, 100_000
"""Characters before and after a cursor that a server elsewhere is sent: as many as any model is shown."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in an open document, and what is wanted there.

    Attributes
    ----------
    uri
        The document.
    left, right
        Its text before and after the cursor.
    extra
        Pieces of other open documents, what was looked at last at the end.
    tokens, line_ms
        Most tokens of a suggestion; milliseconds after which it ends with its line.
    """

    uri: str
    left: str
    right: str
    extra: tuple[Chunk, ...]
    tokens: int
    line_ms: float

    def request(self) -> dict[str, Any]:
        """The body of `POST /infill` that asks for it."""
        line = self.left.rfind("\n") + 1
        return {
            "input_prefix": self.left[:line],
            "prompt": self.left[line:],
            "input_suffix": self.right,
            "input_extra": [{"filename": chunk.filename, "text": chunk.text} for chunk in self.extra],
            "n_predict": self.tokens,
            "t_max_predict_ms": self.line_ms,
        }


class LocalCompleter:
    """Completions by a model in this process; `workspace` holds the folders that are indexed in it, if any."""

    def __init__(self, service: Service) -> None:
        self.service, self.workspace = service, service.workspace
        service.queue.start()

    async def complete(self, cursor: Cursor) -> str:
        """A suggestion for a place; "" where there is none, or a newer request came."""
        service = self.service
        if service.fim is None:
            return ""
        request = InfillRequest.model_validate(cursor.request())
        caller = Caller("", f"lsp\0{cursor.uri}", explicit=True)
        try:
            stream = await opened(service, lambda: [service.infill(request, caller)])
        except Refusal as refusal:
            log.warning("%s", refusal.detail)
            return ""
        try:
            (done,) = await stream.results()
        finally:
            stream.close()
        if done.outcome != "done":
            return ""
        return request.written(done.text) if done.text.strip() else ""

    def open(self, uri: str, text: str) -> None:
        """Draft from the text of an open document."""
        self.service.memory("").note_buffer(uri, text)

    def forget(self) -> None:
        """Drop what is kept."""
        self.service.forget()

    def close(self) -> None:
        """End the queue and the index."""
        if self.workspace is not None:
            self.workspace.close()
        self.service.close()


class RemoteCompleter:
    """Completions by a server elsewhere, which is sent pieces of open documents and reads what was saved itself."""

    workspace = None

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._client = httpx.AsyncClient(**remote.options, timeout=_ANSWER_S)

    async def complete(self, cursor: Cursor) -> str:
        """A suggestion for a place; the server stops after the pass under way where it is given up."""
        near = replace(cursor, left=cursor.left[-_CHARS_BEFORE:], right=cursor.right[:_CHARS_AFTER])
        body = json.dumps({**near.request(), "response_fields": ["content"]}, ensure_ascii=False)
        document = hashlib.sha256(cursor.uri.encode("utf-8", "replace")).hexdigest()[:16]
        headers = {"X-Client-Id": f"lsp-{os.getpid()}-{document}"}
        try:
            answer = await self._client.post("/infill", content=body.encode("utf-8", "replace"), headers=headers)
        except httpx.HTTPError as error:
            log.warning("%s cannot be asked: %r", self.remote.url, error)
            return ""
        found = parsed(answer)
        if answer.status_code != 200:
            log.warning("%s answered %d: %s", self.remote.url, answer.status_code, reason_of(found))
            return ""
        text = str(found.get("content", "")) if isinstance(found, dict) else ""
        return text if text.strip() else ""

    def forget(self) -> None:
        """Have the server drop what it keeps of this user."""
        self.remote.ask("DELETE", "/v1/workspace", timeout=_ANSWER_S)

    def open(self, uri: str, text: str) -> None:
        """Nothing to remember here."""

    def close(self) -> None:
        """Nothing to end: the server is not this editor's."""


Completer = LocalCompleter | RemoteCompleter
"""What a language server needs of a model."""


def connected(remote: Remote, given_up: threading.Event) -> RemoteCompleter:
    """A completer that asks a server, once its model is loaded.

    Raises
    ------
    ServeError
        Nobody answers, the server refuses, or it was ``given_up`` to wait.
    """
    while True:
        status, found = remote.ask("GET", "/v1/models")
        if status == 200:
            return RemoteCompleter(remote)
        if status != 503:
            got = f"it answered {status}: {reason_of(found)}" if status else "nobody answers"
            raise ServeError(f"to reach {remote.url}", got, "Start retrieve-spec serve; check --connect and the key.")
        if given_up.wait(_AGAIN_S):
            raise ServeError(f"to reach {remote.url}", "the editor has closed it", "Open the editor again.")


MakeCompleter = Callable[[Sequence[Path]], Completer]


def strict_converter() -> Any:
    """pygls' converter, which would read the number in a string, the whole part of another, and kinds there are not."""
    converter = default_converter()  # type: ignore[no-untyped-call]
    for kind in (int, str):
        converter.register_structure_hook(kind, _plain)
    converter.register_structure_hook(lsp.InlineCompletionTriggerKind, lambda value, kind: kind(value))
    return converter


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Document(TextDocument):
    """An open document with the lines of the protocol; pygls also ends one at form feeds and Unicode's separators."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Its lines with their ends, which are CR, LF or both."""
        return tuple(_LINE.findall(self.source))


class AnsweringProtocol(LanguageServerProtocol):
    """pygls' protocol, which leaves a request unanswered whose parameters are not of its kind."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """A message as an object; one that is none and wants an answer gets the error -32602."""
        try:
            return super().structure_message(data)
        except JsonRpcException as error:
            if "id" in data and "method" in data:
                refusal = JsonRpcInvalidParams(f"malformed parameters of {data['method']}")
                self._send_response(data["id"], error=refusal.to_response_error())
            raise error


class CompletionServer(LanguageServer):
    """A language server that only completes.

    Parameters
    ----------
    make_completer
        Loads the model or finds the server, given the client's workspace folders; runs in a thread while the editor
        starts up.
    workspaces
        Folders to draft from besides the client's.

    Attributes
    ----------
    give_up
        Ends the making of a completer that is waited for no longer.
    """

    give_up: Callable[[], None] | None = None

    def __init__(self, make_completer: MakeCompleter, workspaces: Sequence[Path] = ()) -> None:
        super().__init__(
            "retrieve-spec", __version__, protocol_cls=AnsweringProtocol, converter_factory=strict_converter
        )
        self._make_completer = make_completer
        self._workspaces = list(workspaces)
        self.completer: Completer | None = None
        self._places: dict[str, int] = {}
        self._loaded = asyncio.Event()

    async def load(self, folders: Sequence[Path]) -> None:
        """Load the model, then index the folders; requests wait for the model, not for the index."""
        roots = [*self._workspaces, *folders]
        try:
            async with self._bar(_LOADING, "Loading the model"):
                try:
                    completer = await asyncio.to_thread(self._make_completer, roots)
                except asyncio.CancelledError:
                    self.close()  # the interpreter waits for this thread before it ends
                    raise
            self.completer = completer
            for document in list(self.workspace.text_documents.values()):
                self.remember(document.uri, document.source)
        finally:
            self._loaded.set()
        if completer.workspace is not None:
            await self._index(completer.workspace)

    async def ready(self) -> Completer | None:
        """The completer once the model is loaded, None when that failed."""
        await self._loaded.wait()
        return self.completer

    async def _index(self, workspace: Workspace) -> None:
        loop = asyncio.get_running_loop()
        async with self._bar(_INDEXING, "Indexing the workspace") as show:

            def report(seen: int, kept: int) -> None:
                loop.call_soon_threadsafe(show, f"{kept} files")

            workspace.progress = report
            workspace.start()
            await asyncio.to_thread(workspace.indexed.wait)
            show(f"{len(workspace.texts)} files indexed")

    @contextlib.asynccontextmanager
    async def _bar(self, token: str, title: str) -> AsyncIterator[Callable[[str], None]]:
        """A progress bar, where the client has them; what is yielded changes its message, the last one stays."""
        window = self.client_capabilities.window
        shown = bool(window and window.work_done_progress)
        message: str | None = None

        def show(text: str) -> None:
            nonlocal message
            message = text
            if shown:
                self.work_done_progress.report(token, lsp.WorkDoneProgressReport(message=text))

        if shown:
            await self.work_done_progress.create_async(token)
            self.work_done_progress.begin(token, lsp.WorkDoneProgressBegin(title))
        try:
            yield show
        finally:
            if shown:
                self.work_done_progress.end(token, lsp.WorkDoneProgressEnd(message=message))

    def remember(self, uri: str, text: str) -> None:
        """Draft from the text of an open file."""
        if self.completer is not None:
            self.completer.open(uri, text)

    def look(self, uri: str, line: int) -> None:
        """Note where somebody looks."""
        self._places.pop(uri, None)
        self._places[uri] = line

    def opened(self, uri: str) -> TextDocument | None:
        """A document that the client has opened, None for one on disk."""
        document = self.workspace.get_text_document(uri)
        return None if document.version is None else document

    def pieces(self, uri: str) -> tuple[Chunk, ...]:
        """What stands around the places looked at last in other open documents, the last one at the end."""
        documents = {other: document for other in self._places if (document := self.opened(other)) is not None}
        others = [other for other in documents if other != uri][-_SHOWN:]
        found = []
        for other in others:
            lines = documents[other].lines
            first = max(0, min(self._places[other] // _STEP * _STEP - _STEP // 2, len(lines) - _LINES))
            text = "".join(lines[first : first + _LINES])[:_CHARS]
            if text.strip():
                found.append(Chunk(text, other.rpartition("/")[2]))
        return tuple(found)

    def close(self) -> None:
        """End the queue and the index, or let go of the server."""
        if self.completer is not None:
            self.completer.close()
        elif self.give_up is not None:
            self.give_up()


def create_server(make_completer: MakeCompleter, workspaces: Sequence[Path] = ()) -> CompletionServer:
    """A language server with all handlers; arguments as of `CompletionServer`."""
    server = CompletionServer(make_completer, workspaces)
    _add_documents(server)
    _add_completion(server)
    return server


def _add_documents(server: CompletionServer) -> None:
    @server.feature(lsp.INITIALIZED)
    async def initialized(_: lsp.InitializedParams) -> None:
        folders = [Path(path) for uri in server.workspace.folders if (path := to_fs_path(uri)) and os.path.isdir(path)]
        try:
            await server.load(folders)
        except Exception as error:
            log.exception("the model could not be loaded")
            message = lsp.ShowMessageParams(lsp.MessageType.Error, f"retrieve-spec: {error}")
            server.window_show_message(message)

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: lsp.DidOpenTextDocumentParams) -> None:
        document = server.opened(params.text_document.uri)
        if document is not None:
            document.__class__ = Document  # pygls makes them itself, and has no door for others
        server.look(params.text_document.uri, 0)
        server.remember(params.text_document.uri, params.text_document.text)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: lsp.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        if server.opened(uri) is not None:
            changed = [getattr(change, "range", None) for change in params.content_changes]
            server.look(uri, next((where.start.line for where in changed if where is not None), 0))

    @server.feature(lsp.SHUTDOWN)
    def shutdown(_: None) -> None:
        server.close()


def _add_completion(server: CompletionServer) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_INLINE_COMPLETION, lsp.InlineCompletionOptions())
    async def inline_completion(params: lsp.InlineCompletionParams) -> lsp.InlineCompletionList | None:
        completer = await server.ready()
        if completer is None:
            return None
        document = server.opened(params.text_document.uri)
        if document is None:  # nothing is read from disk that the client has not opened
            return None
        offset = document.offset_at_position(params.position)
        source, chosen = document.source, params.context.selected_completion_info
        left, right, given = source[:offset], source[offset:], ""
        if chosen is not None:
            # The popup's entry counts as typed; clients hide what does not begin with it.
            left = source[: document.offset_at_position(chosen.range.start)] + chosen.text
            given = chosen.text
        kind = params.context.trigger_kind
        server.look(document.uri, params.position.line)
        cursor = Cursor(document.uri, left, right, server.pieces(document.uri), _TOKENS[kind], _LINE_MS[kind])
        text = await completer.complete(cursor)
        if not text:
            return None
        where = chosen.range if chosen is not None else None
        return lsp.InlineCompletionList([lsp.InlineCompletionItem(given + text, range=where)])

    @server.command(FORGET)
    def forget() -> None:
        if server.completer is not None:
            server.completer.forget()


def serve_stdio(
    model_name: str,
    config: ServeConfig,
    *,
    workspaces: Sequence[Path] = (),
    stores: Sequence[Path | str] = (),
    session: Path | None = None,
    dtype: str = "auto",
    quantize: str | None = None,
    device: str = "auto",
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Serve on standard input and output until the client ends it; arguments as of `run.build_service`, `run.serve`."""

    def make(roots: Sequence[Path]) -> Completer:
        from retrieve_spec.server.run import build_service

        service = build_service(
            model_name,
            config,
            workspaces=roots,
            stores=stores,
            session=session,
            dtype=dtype,
            quantize=quantize,
            device=device,
        )
        on_loaded()
        return LocalCompleter(service)

    create_server(make, workspaces).start_io()


def connect_stdio(remote: Remote) -> None:
    """Serve a language server on standard input and output by asking a server elsewhere."""
    given_up = threading.Event()
    server = create_server(lambda roots: connected(remote, given_up))
    server.give_up = given_up.set
    server.start_io()
