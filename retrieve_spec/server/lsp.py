"""Language server: `textDocument/inlineCompletion` (LSP 3.18), with a model in this process or on a server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path
from pygls.workspace import TextDocument

from retrieve_spec._version import __version__
from retrieve_spec.config import DraftSources, LoadOptions, ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.server.editors import Remote, parsed, reason_of

if TYPE_CHECKING:  # with `--connect`, the model's libraries are not imported
    from retrieve_spec.server.service import Service

log = logging.getLogger("retrieve_spec.server")

FORGET = "retrieve-spec.forget"
Kind = lsp.InlineCompletionTriggerKind
_TOKENS = {Kind.Automatic: 64, Kind.Invoked: 128}
"""The most tokens of a suggestion."""
_LINE_MS = {Kind.Automatic: 250.0, Kind.Invoked: 1000.0}
"""Milliseconds after which a suggestion ends with its line."""
_LOADING, _INDEXING = "retrieve-spec/loading", "retrieve-spec/indexing"

_SHOWN = 4
"""The most other open documents of which an excerpt is sent."""
_LINES, _CHARS, _STEP = 64, 16_000, 32
"""The most lines and characters of an excerpt, and how far the place must move before another one is sent."""
_ANSWER_S, _AGAIN_S = 60.0, 0.25
_CHARS_BEFORE, _CHARS_AFTER = 400_000, 100_000
"""The most characters before and after the cursor that are sent to a server: as many as any model reads."""


class Completer:
    """Completions of a server, which gets excerpts of open documents; `service` is a model in this process, if any."""

    def __init__(self, client: httpx.AsyncClient, service: Service | None = None) -> None:
        self._client, self._service = client, service
        self.workspace = None if service is None else service.workspace

    async def complete(self, uri: str, left: str, right: str, extra: Sequence[dict[str, str]], kind: Kind) -> str:
        """Return a suggestion at a place in a document, "" for none.

        A cancelled request ends after the current pass.

        Parameters
        ----------
        uri
            The document.
        left, right
            Its text before and after the cursor.
        extra
            Excerpts of other open documents, the last visited one at the end.
        kind
            Whether the user asked for it explicitly.
        """
        left = left[-_CHARS_BEFORE:]
        line = left.rfind("\n") + 1
        fields = {
            "input_prefix": left[:line],
            "prompt": left[line:],
            "input_suffix": right[:_CHARS_AFTER],
            "input_extra": extra,
            "n_predict": _TOKENS[kind],
            "t_max_predict_ms": _LINE_MS[kind],
            "response_fields": ["content"],
        }
        body = json.dumps(fields, ensure_ascii=False)
        document = hashlib.sha256(uri.encode("utf-8", "replace")).hexdigest()[:16]
        headers = {"X-Client-Id": f"lsp-{os.getpid()}-{document}"}
        try:
            answer = await self._client.post("/infill", content=body.encode("utf-8", "replace"), headers=headers)
        except httpx.HTTPError as error:
            log.warning("the server cannot be asked: %r", error)
            return ""
        asking = asyncio.current_task()
        if asking is not None and asking.cancelling():  # a server in this process also answers cancelled requests
            raise asyncio.CancelledError
        found = parsed(answer)
        if answer.status_code != 200:
            log.warning("the server answered %d: %s", answer.status_code, reason_of(found))
            return ""
        text = str(found.get("content", "")) if isinstance(found, dict) else ""
        return text if text.strip() else ""

    async def open(self, text: str) -> None:
        """Draft from the text of an open document, if the model is in this process."""
        if self._service is not None:
            from retrieve_spec.server.text import with_line_feeds

            await asyncio.to_thread(self._service.memory("").note, [with_line_feeds(text)])

    async def forget(self) -> None:
        """Delete what is kept for this user."""
        await self._client.delete("/v1/workspace")

    def close(self) -> None:
        """Unload a model in this process; a server is left as it is."""
        if self._service is not None:
            self._service.close()


async def connected(remote: Remote) -> Completer:
    """Return a completer for a server, once its model is loaded.

    Raises
    ------
    ServeError
        The server does not answer, or refuses.
    """
    client = httpx.AsyncClient(**remote.options, timeout=_ANSWER_S)
    while True:
        try:
            answer = await client.get("/v1/models")
            status, got = answer.status_code, f"it answered {answer.status_code}: {reason_of(parsed(answer))}"
        except httpx.HTTPError:
            status, got = 0, "nobody answers"
        if status == 200:
            return Completer(client)
        if status != 503:
            raise ServeError(f"to reach {remote.url}", got, "Start retrieve-spec serve; check --connect and the key.")
        await asyncio.sleep(_AGAIN_S)


async def loaded(load: Callable[[], Service], config: ServeConfig) -> Completer:
    """Return a completer for a model that is loaded into this process."""
    from retrieve_spec.server.app import create_app
    from retrieve_spec.server.guard import Metrics
    from retrieve_spec.server.models import Model, Models

    model = Model(load)
    models = Models({"": model}, config, Metrics())
    await models.start()
    if models.error is not None:
        raise models.error
    transport = httpx.ASGITransport(create_app(models))
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
    return Completer(client, model.service)


Connect = Callable[[Sequence[Path]], Awaitable[Completer]]


_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class Document(TextDocument):
    """An open document with the protocol's lines; pygls also splits at form feeds and Unicode separators."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines with their ends: CR, LF or both."""
        return tuple(_LINE.findall(self.source))


class CompletionServer(LanguageServer):
    """A language server that only completes.

    Parameters
    ----------
    connect
        Loads the model or finds the server, given the client's workspace folders; called while the editor starts.
    workspaces
        Folders to draft from besides the client's.

    Attributes
    ----------
    completer, loaded
        The completer, None if loading failed, and whether loading is done.
    """

    def __init__(self, connect: Connect, workspaces: Sequence[Path] = ()) -> None:
        super().__init__("retrieve-spec", __version__)
        self._connect, self._workspaces = connect, list(workspaces)
        self.completer: Completer | None = None
        self._places: dict[str, int] = {}
        self.loaded = asyncio.Event()

    async def load(self, folders: Sequence[Path]) -> None:
        """Load the model, then index the folders; requests wait for the model only."""
        try:
            async with self._bar(_LOADING, "Loading the model"):
                completer = await self._connect([*self._workspaces, *folders])
            self.completer = completer
            for document in list(self.workspace.text_documents.values()):
                await completer.open(document.source)
        finally:
            self.loaded.set()
        if completer.workspace is not None:
            async with self._bar(_INDEXING, "Indexing the workspace"):
                while not completer.workspace.indexed.is_set():
                    await asyncio.sleep(_AGAIN_S)

    @contextlib.asynccontextmanager
    async def _bar(self, token: str, title: str) -> AsyncIterator[None]:
        """Show a progress bar during the block, if the client supports them."""
        window = self.client_capabilities.window
        if not (window and window.work_done_progress):
            yield
            return
        await self.work_done_progress.create_async(token)
        self.work_done_progress.begin(token, lsp.WorkDoneProgressBegin(title))
        try:
            yield
        finally:
            self.work_done_progress.end(token, lsp.WorkDoneProgressEnd())

    def note_place(self, uri: str, line: int) -> None:
        """Note the user's current line in a document."""
        self._places.pop(uri, None)
        self._places[uri] = line

    def opened(self, uri: str) -> TextDocument | None:
        """Return a document that the client has opened, None for one on disk."""
        document = self.workspace.get_text_document(uri)
        return None if document.version is None else document

    def pieces(self, uri: str) -> list[dict[str, str]]:
        """Return excerpts around the last visited places of other open documents, the latest at the end."""
        documents = {other: document for other in self._places if (document := self.opened(other)) is not None}
        others = [other for other in documents if other != uri][-_SHOWN:]
        found = []
        for other in others:
            lines = documents[other].lines
            first = max(0, min(self._places[other] // _STEP * _STEP - _STEP // 2, len(lines) - _LINES))
            text = "".join(lines[first : first + _LINES])[:_CHARS]
            if text.strip():
                found.append({"filename": other.rpartition("/")[2], "text": text})
        return found


def create_server(connect: Connect, workspaces: Sequence[Path] = ()) -> CompletionServer:
    """Return a language server with all handlers; the parameters are those of `CompletionServer`."""
    server = CompletionServer(connect, workspaces)
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
    async def did_open(params: lsp.DidOpenTextDocumentParams) -> None:
        document = server.opened(params.text_document.uri)
        if document is not None:
            document.__class__ = Document  # pygls creates documents itself, without a hook
        server.note_place(params.text_document.uri, 0)
        if server.completer is not None:
            await server.completer.open(params.text_document.text)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: lsp.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        if server.opened(uri) is not None:
            changed = [getattr(change, "range", None) for change in params.content_changes]
            server.note_place(uri, next((where.start.line for where in changed if where is not None), 0))

    @server.feature(lsp.SHUTDOWN)
    def shutdown(_: None) -> None:
        if server.completer is not None:
            server.completer.close()


def _add_completion(server: CompletionServer) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_INLINE_COMPLETION, lsp.InlineCompletionOptions())
    async def inline_completion(params: lsp.InlineCompletionParams) -> lsp.InlineCompletionList | None:
        await server.loaded.wait()
        completer = server.completer
        if completer is None:
            return None
        document = server.opened(params.text_document.uri)
        if document is None:  # only documents that the client has opened are read
            return None
        offset = document.offset_at_position(params.position)
        source, chosen = document.source, params.context.selected_completion_info
        left, right, given = source[:offset], source[offset:], ""
        if chosen is not None:
            # The popup's entry counts as typed; clients hide completions that do not begin with it.
            left = source[: document.offset_at_position(chosen.range.start)] + chosen.text
            given = chosen.text
        kind = params.context.trigger_kind
        server.note_place(document.uri, params.position.line)
        text = await completer.complete(document.uri, left, right, server.pieces(document.uri), kind)
        if not text:
            return None
        where = chosen.range if chosen is not None else None
        return lsp.InlineCompletionList([lsp.InlineCompletionItem(given + text, range=where)])

    @server.command(FORGET)
    async def forget() -> None:
        if server.completer is not None:
            await server.completer.forget()


def serve_stdio(
    model_name: str,
    config: ServeConfig,
    *,
    sources: DraftSources = DraftSources(),
    loading: LoadOptions = LoadOptions(),
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Serve on standard input and output until the client exits; parameters as for `run.build_service`, `run.serve`."""
    from retrieve_spec.server.run import build_service

    def load(roots: Sequence[Path]) -> Service:
        service = build_service(model_name, config, sources=replace(sources, workspaces=tuple(roots)), loading=loading)
        on_loaded()
        return service

    create_server(lambda roots: loaded(lambda: load(roots), config), sources.workspaces).start_io()


def connect_stdio(remote: Remote) -> None:
    """Serve on standard input and output with completions of another server."""
    create_server(lambda roots: connected(remote)).start_io()
