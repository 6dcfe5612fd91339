"""Provenance: which accepted drafts stand in which document, and under which licence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrieve_spec.kernels.order import ORIGIN_BITS

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore


@dataclass(frozen=True, slots=True)
class SourcedRun:
    """Accepted drafted tokens that stand verbatim in one document of a store.

    Attributes
    ----------
    position, tokens
        Index of the first among the new tokens, and how many.
    store, path, licence
        Folder of the store; the document's path in it and its stated licence (`""`: none stated).
    store_position
        Token position in the store's segment.
    """

    position: int
    tokens: int
    store: str
    path: str
    licence: str
    store_position: int


def sourced_runs(runs: Iterable[tuple[int, int, int]], datastores: Sequence[Datastore]) -> list[SourcedRun]:
    """Look up the documents of (position, tokens, origin) runs; origins outside the stores are left out.

    Raises
    ------
    StoreCorruptError
        When the catalogue of a store is damaged.
    """
    segments = [(store, index) for store in datastores for index in range(len(store.segments))]
    found = []
    for position, tokens, origin in runs:
        number, place = origin >> ORIGIN_BITS, origin & ((1 << ORIGIN_BITS) - 1)
        if 0 <= number < len(segments):
            store, segment = segments[number]
            document = store.document_at(segment, place)
            found.append(SourcedRun(position, tokens, str(store.path), document.path, document.licence, place))
    return found
