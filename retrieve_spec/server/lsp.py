"""Serves `textDocument/inlineCompletion` (LSP 3.18) on the same engine as the HTTP surface.

Names outside the specification follow the de facto ones of Copilot's language server: `textDocument/didShowCompletion`,
`textDocument/didPartiallyAcceptCompletion`, `textDocument/didFocus`, and a command that runs after an accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

from retrieve_spec._version import __version__
from retrieve_spec.config import ServeConfig
from retrieve_spec.server.fim import FimParts
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.schemas import Common
from retrieve_spec.server.service import Caller, Service
from retrieve_spec.server.stream import Stream
from retrieve_spec.server.workspace import Workspace

log = logging.getLogger("retrieve_spec.server")

ACCEPT = "retrieve-spec.accept"
FORGET = "retrieve-spec.forget"
_TOKENS = {lsp.InlineCompletionTriggerKind.Automatic: 64, lsp.InlineCompletionTriggerKind.Invoked: 128}
_LINE_MS = {lsp.InlineCompletionTriggerKind.Automatic: 250.0, lsp.InlineCompletionTriggerKind.Invoked: 1000.0}
_LOADING, _INDEXING = "retrieve-spec/loading", "retrieve-spec/indexing"

MakeService = Callable[[Sequence[Path]], Service]


class CompletionServer(LanguageServer):
    """A language server that only completes.

    Parameters
    ----------
    make_service
        Loads the model, given the client's workspace folders; runs in a thread while the editor starts up.
    workspaces
        Folders to draft from besides the client's.
    """

    def __init__(self, make_service: MakeService, workspaces: Sequence[Path] = ()) -> None:
        super().__init__("retrieve-spec", __version__)
        self._make_service = make_service
        self._workspaces = list(workspaces)
        self.service: Service | None = None
        self.shown: dict[str, tuple[str, str]] = {}
        self._loaded = asyncio.Event()

    async def load(self, folders: Sequence[Path]) -> None:
        """Load the model, then index the folders; requests wait for the model, not for the index."""
        roots = [*self._workspaces, *folders]
        try:
            async with self._bar(_LOADING, "Loading the model"):
                service = await asyncio.to_thread(self._make_service, roots)
            service.engine.start()
            self.service = service
            for document in list(self.workspace.text_documents.values()):
                self.remember(document.uri, document.source)
        finally:
            self._loaded.set()
        if service.workspace is not None:
            await self._index(service.workspace)

    async def ready(self) -> Service | None:
        """The service once the model is loaded, None when that failed."""
        await self._loaded.wait()
        return self.service

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
        if self.service is not None:
            self.service.memory("").note_buffer(uri, text)

    def close(self) -> None:
        """End the engine and the index."""
        if self.service is not None:
            if self.service.workspace is not None:
                self.service.workspace.close()
            self.service.engine.close()


def create_server(make_service: MakeService, workspaces: Sequence[Path] = ()) -> CompletionServer:
    """A language server with all handlers; arguments as of `CompletionServer`."""
    server = CompletionServer(make_service, workspaces)
    _add_documents(server)
    _add_completion(server)
    _add_feedback(server)
    return server


def _add_documents(server: CompletionServer) -> None:
    @server.feature(lsp.INITIALIZED)
    async def initialized(_: lsp.InitializedParams) -> None:
        folders = [path for uri in server.workspace.folders if (path := uri_to_path(uri)) and path.is_dir()]
        try:
            await server.load(folders)
        except Exception as error:
            log.exception("the model could not be loaded")
            message = lsp.ShowMessageParams(lsp.MessageType.Error, f"retrieve-spec: {error}")
            server.window_show_message(message)

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def did_open(params: lsp.DidOpenTextDocumentParams) -> None:
        server.remember(params.text_document.uri, params.text_document.text)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def did_change(params: lsp.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        if (document := server.workspace.text_documents.get(uri)) is not None:
            server.remember(uri, document.source)

    @server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    def did_save(params: lsp.DidSaveTextDocumentParams) -> None:
        path = uri_to_path(params.text_document.uri)
        if server.service is not None and server.service.workspace is not None and path is not None:
            threading.Thread(target=server.service.workspace.update, args=([path],), daemon=True).start()

    @server.feature(lsp.SHUTDOWN)
    def shutdown(_: None) -> None:
        server.close()


def _add_completion(server: CompletionServer) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_INLINE_COMPLETION, lsp.InlineCompletionOptions())
    async def inline_completion(params: lsp.InlineCompletionParams) -> lsp.InlineCompletionList | None:
        service = await server.ready()
        if service is None or service.fim is None:
            return None
        document = server.workspace.text_documents.get(params.text_document.uri)
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
        request = Common.model_validate({"t_max_predict_ms": _LINE_MS[kind]})
        others = 2 if kind == lsp.InlineCompletionTriggerKind.Invoked else 0
        caller = Caller("", f"lsp\0{document.uri}", explicit=True)
        try:
            prepared = await asyncio.to_thread(
                service.fill, FimParts(left, right), request, caller, _TOKENS[kind], others
            )
            stream = Stream(service, prepared)
        except Refusal as refusal:
            log.warning("%s", refusal.message)
            return None
        try:
            done = await stream.result()
        finally:
            stream.close()
        if done.outcome != "done":
            return None
        texts = [text for text in (done.text, *done.alternatives) if text.strip()]
        prepared.remember(done)
        where = chosen.range if chosen is not None else None
        return lsp.InlineCompletionList([_item(document.uri, left, given + text, where) for text in texts])


def _item(uri: str, left: str, text: str, where: lsp.Range | None) -> lsp.InlineCompletionItem:
    line = left[left.rfind("\n") + 1 :]
    command = lsp.Command("Remember the accepted completion", ACCEPT, arguments=[uri, line, text])
    return lsp.InlineCompletionItem(text, range=where, command=command)


def _add_feedback(server: CompletionServer) -> None:
    @server.command(ACCEPT)
    def accept(uri: str = "", line: str = "", text: str = "") -> None:
        if server.service is not None:
            server.service.memory("").note_accepted(line + text)

    @server.command(FORGET)
    def forget() -> None:
        if server.service is not None:
            server.service.forget()

    @server.feature("textDocument/didPartiallyAcceptCompletion")
    def partially_accepted(params: Any) -> None:
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            text, length = params.item.insertText, int(params.acceptedLength)
            taken = text.encode("utf-16-le")[: 2 * length].decode("utf-16-le", "ignore")
            arguments = getattr(getattr(params.item, "command", None), "arguments", None) or ["", ""]
            accept(line=str(arguments[1]), text=taken)

    @server.feature("textDocument/didShowCompletion")
    def shown(params: Any) -> None:
        """Nothing is learned from showing."""

    @server.feature("textDocument/didFocus")
    def focused(params: Any) -> None:
        with contextlib.suppress(AttributeError, KeyError):
            uri = params.textDocument.uri
            server.remember(uri, server.workspace.text_documents[uri].source)


def uri_to_path(uri: str) -> Path | None:
    """The path of a `file:` URI."""
    parsed = urlparse(uri)
    return Path(unquote(parsed.path)) if parsed.scheme == "file" else None


def serve_stdio(
    model_name: str,
    config: ServeConfig,
    *,
    workspaces: Sequence[Path] = (),
    stores: Sequence[Path] = (),
    dtype: str = "auto",
    device: str = "auto",
) -> None:
    """Serve on standard input and output until the client ends it; arguments as of `run.build_service`."""

    def make(roots: Sequence[Path]) -> Service:
        from retrieve_spec.server.run import build_service

        return build_service(model_name, config, workspaces=roots, stores=stores, dtype=dtype, device=device).service

    create_server(make, workspaces).start_io()
