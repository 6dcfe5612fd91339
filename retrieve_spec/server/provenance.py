"""Provenance of completions: in which file, at which line and under which licence their lines stand verbatim."""

from __future__ import annotations

import re
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
_LOOKED_AT = 12
_HEAD_CHARS = 2000
_SPDX = re.compile(r"SPDX-License-Identifier:\s*([\w.+() -]+)")
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING", "COPYING.txt")


class Provenance:
    """Answers ``"provenance": true``."""

    def __init__(self, stores: Sequence[Datastore] = (), workspace: Workspace | None = None) -> None:
        self._stores = list(stores)
        self._workspace = workspace

    def of(self, request: Common, done: Completion, left: str = "") -> dict[str, Any]:
        """The ``provenance`` field of an answer, {} when it was not asked for.

        One entry for each line that is not trivially short: its number in the completion, its text, and up to three
        places where all of it stands as a line; one with no place stands in none of the sources. The first line
        includes what stands left of the cursor (``left``); of a last line that goes on, the beginning counts.
        """
        if not request.provenance:
            return {}
        entries = []
        lines = (left[left.rfind("\n") + 1 :] + done.text).split("\n")[:_MAX_LINES]
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if len(text) >= _MIN_CHARS:
                whole = number < len(lines)
                places = [*self._in_workspace(text, whole), *self._in_stores(text, whole)][:_PLACES]
                entries.append({"line": number, "text": text, "places": places})
        return {"provenance": entries}

    def _in_workspace(self, text: str, whole: bool) -> list[dict[str, Any]]:
        if self._workspace is None:
            return []
        return [
            {"file": str(path), "line": number, "licence": self._licence_of(path), "source": "workspace"}
            for path, number, line in self._workspace.lines(text, _LOOKED_AT)
            if _stands(text, line, whole)
        ][:_PLACES]

    def _in_stores(self, text: str, whole: bool) -> list[dict[str, Any]]:
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
            found = search_datastore(store, head, limit=_LOOKED_AT, span=8)
            for place in found.occurrences if found.matched >= found.tokens - 1 else ():
                entry = {"file": place.document.path, "licence": place.document.licence, "source": str(store.path)}
                if _stands(spelled[len(head) :], place.continuation.partition("\n")[0], whole) and entry not in places:
                    places.append(entry)
        return places

    def _licence_of(self, path: Path) -> str:
        """What a file says of its licence, else the first line of the nearest licence file above it, "" for none."""
        assert self._workspace is not None
        texts = self._workspace.texts
        if said := _SPDX.search(texts.get(path, "")[:_HEAD_CHARS]):
            return said[1].strip()
        for folder in path.parents:
            for name in _LICENCE_FILES:
                if text := texts.get(folder / name, "").strip():
                    return text.splitlines()[0].strip()[:100]
            if folder in self._workspace.roots:
                break
        return ""


def _stands(text: str, line: str, whole: bool) -> bool:
    """Whether a line of a source says the same, or, when it need not be whole, begins the same."""
    return line.strip() == text.strip() if whole else line.strip().startswith(text.strip())
