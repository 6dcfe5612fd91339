"""Tells where the lines of a completion stand verbatim: in which file, at which line, under which licence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieve_spec.server.jobs import Completion
from retrieve_spec.server.schemas import Common

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore
    from retrieve_spec.server.workspace import Workspace

_MIN_CHARS = 16
_MAX_LINES = 64
_PLACES = 3


class Provenance:
    """Answers ``"provenance": true``.

    Parameters
    ----------
    stores
        Open datastores that are drafted from.
    workspace
        Opened folders.
    """

    def __init__(self, stores: Sequence[Datastore] = (), workspace: Workspace | None = None) -> None:
        self._stores = list(stores)
        self._workspace = workspace

    def of(self, request: Common, done: Completion) -> dict[str, Any]:
        """The ``provenance`` field of an answer, {} when it was not asked for.

        One entry for each line that is not trivially short: its number in the completion, its text, and up to three
        places; a line with no place stands in none of the sources.
        """
        if not request.provenance:
            return {}
        entries = []
        for number, line in enumerate(done.text.split("\n")[:_MAX_LINES], 1):
            text = line.strip()
            if len(text) >= _MIN_CHARS:
                places = [*self._in_workspace(text), *self._in_stores(text)][:_PLACES]
                entries.append({"line": number, "text": text, "places": places})
        return {"provenance": entries}

    def _in_workspace(self, text: str) -> list[dict[str, Any]]:
        places: list[dict[str, Any]] = []
        if self._workspace is None:
            return places
        for path, content in list(self._workspace.texts.items()):
            at = content.find(text)
            if at >= 0:
                number = content.count("\n", 0, at) + 1
                licence = self._licence_of(path)
                places.append({"file": str(path), "line": number, "licence": licence, "source": "workspace"})
                if len(places) == _PLACES:
                    break
        return places

    def _in_stores(self, text: str) -> list[dict[str, Any]]:
        from retrieve_spec.datastore.search import search_datastore

        places: list[dict[str, Any]] = []
        for store in self._stores:
            # The tokens at both ends of a line depend on what stands around it: the first may be cut off, and the
            # last ones are compared as text.
            spelled = " " + text
            ids = store.tokenizer.encode(spelled, add_special_tokens=False).ids
            head = store.tokenizer.decode(ids[:-2], skip_special_tokens=False)
            if not spelled.startswith(head) or len(ids) < 4:
                continue
            found = search_datastore(store, head, limit=_PLACES, span=8)
            for place in found.occurrences if found.matched >= found.tokens - 1 else ():
                entry = {"file": place.document.path, "licence": place.document.licence, "source": str(store.path)}
                if place.continuation.startswith(spelled[len(head) :]) and entry not in places:
                    places.append(entry)
        return places

    def _licence_of(self, path: Path) -> str:
        """First line of the licence file of the workspace a file belongs to, "" if there is none."""
        assert self._workspace is not None
        for root in self._workspace.roots:
            if path.is_relative_to(root):
                for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING"):
                    text = self._workspace.texts.get(root / name, "").strip()
                    if text:
                        return text.splitlines()[0].strip()[:100]
        return ""
