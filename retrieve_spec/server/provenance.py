"""Turns the places a draft was read from into lines a user can check: which file, which lines, which licence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from retrieve_spec.server.jobs import Completion
from retrieve_spec.server.schemas import Common


class OriginLookup(Protocol):
    """Where a token of a store stands."""

    def __call__(self, origin: int) -> dict[str, Any] | None:
        """File, licence and the like of an origin, None if unknown."""


class Provenance:
    """Answers `"provenance": true`.

    Parameters
    ----------
    lookups
        One per attached store, asked in turn.
    """

    def __init__(self, lookups: Sequence[OriginLookup] = ()) -> None:
        self._lookups = list(lookups)

    def of(self, request: Common, prepared: Any, done: Completion) -> dict[str, Any]:
        """The `provenance` field of an answer, {} when it was not asked for."""
        if not request.provenance:
            return {}
        runs = []
        for position, length, origin in done.figures.provenance:
            begin = position - done.prompt_tokens
            entry: dict[str, Any] = {"token": begin, "tokens": length}
            for lookup in self._lookups:
                place = lookup(origin)
                if place is not None:
                    entry.update(place)
                    break
            runs.append(entry)
        return {"provenance": runs}
