"""Completer: what a language server asks for suggestions, be it a model in its own process or a server elsewhere."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieve_spec.server.fim import Chunk
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.schemas import InfillRequest
from retrieve_spec.server.service import Caller, Service
from retrieve_spec.server.stream import opened
from retrieve_spec.server.workspace import Workspace

log = logging.getLogger("retrieve_spec.server")


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


class Completer:
    """What a language server needs of a model; what it need not be told of does nothing."""

    workspace: Workspace | None = None
    """Folders that are indexed in this process, if any."""

    async def complete(self, cursor: Cursor) -> str:
        """A suggestion for a place; "" where there is none, or a newer request came."""
        raise NotImplementedError

    def open(self, uri: str, text: str) -> None:
        """A document is open, or changed."""

    def accepted(self, text: str) -> None:
        """A suggestion was taken; the text is the line up to its end."""

    def saved(self, path: Path) -> None:
        """A file was saved."""

    def forget(self) -> None:
        """Drop what is kept of this user."""
        raise NotImplementedError

    def close(self) -> None:
        """End."""
        raise NotImplementedError


class LocalCompleter(Completer):
    """Completions by a model in this process."""

    def __init__(self, service: Service) -> None:
        self.service, self.workspace = service, service.workspace
        service.engine.start()

    async def complete(self, cursor: Cursor) -> str:
        """A suggestion for a place."""
        service = self.service
        if service.fim is None:
            return ""
        request = InfillRequest.model_validate(cursor.request())
        caller = Caller("", f"lsp\0{cursor.uri}", explicit=True)
        try:
            stream = await opened(service, lambda: [service.infill(request, caller)])
        except Refusal as refusal:
            log.warning("%s", refusal.message)
            return ""
        try:
            (done,) = await stream.results()
        finally:
            stream.close()
        if done.outcome != "done":
            return ""
        stream.prepared[0].remember(done)
        return request.written(done.text) if done.text.strip() else ""

    def open(self, uri: str, text: str) -> None:
        """Draft from the text of an open document."""
        self.service.memory("").note_buffer(uri, text)

    def accepted(self, text: str) -> None:
        """Remember a suggestion that was taken."""
        self.service.memory("").note_accepted(text)

    def saved(self, path: Path) -> None:
        """Read a file again."""
        if self.workspace is not None:
            threading.Thread(target=self.workspace.update, args=([path],), daemon=True).start()

    def forget(self) -> None:
        """Drop what is kept."""
        self.service.forget()

    def close(self) -> None:
        """End the engine and the index."""
        if self.workspace is not None:
            self.workspace.close()
        self.service.close()
