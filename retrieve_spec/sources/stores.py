"""Open datastores as rows of the mixture's source table: suffix array segments and n-gram tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import source_table
from retrieve_spec.kernels.ngram import MAX_ORDER

if TYPE_CHECKING:
    from retrieve_spec.datastore.ngrams import NgramTable
    from retrieve_spec.datastore.segment import Segment
    from retrieve_spec.datastore.store import Datastore


@dataclass(slots=True)
class StoreRows:
    """Descriptors of all stores, and the stores themselves so that their maps stay open.

    Attributes
    ----------
    stores
        The open stores.
    ngram, exact
        Rows of the n-gram tables and of the suffix array segments.
    """

    stores: list[Datastore]
    ngram: list[NDArray[np.int64]] = field(default_factory=list)
    exact: list[NDArray[np.int64]] = field(default_factory=list)

    @classmethod
    def of(cls, stores: list[Datastore], ngram_number: int, exact_number: int) -> StoreRows:
        """Rows of every segment, numbered over all stores; orders that an n-gram table has are left to the table."""
        made = cls(stores)
        segments = [segment for store in stores for segment in store.segments]
        for place, segment in enumerate(segments):
            if segment.ngram is not None:
                made.ngram.append(_ngram_row(segment.ngram, ngram_number, len(segment.to_local)))
            if len(segment.suffix_array):
                row = _exact_row(segment, exact_number, 1 if segment.ngram is None else MAX_ORDER + 1)
                row[15] = place
                made.exact.append(row)
        return made


def address(array: NDArray[Any]) -> int:
    """Where an array's data begin, for a source row."""
    return int(array.__array_interface__["data"][0])


def _ngram_row(table: NgramTable, number: int, vocabulary: int) -> NDArray[np.int64]:
    row = np.zeros(source_table.ROW, np.int64)
    row[0], row[1] = source_table.NGRAM, number
    row[2], row[3] = address(table.slots), len(table.slots)
    row[7], row[8], row[9] = address(table.succ_tokens), address(table.succ_counts), len(table.succ_tokens)
    row[10], row[11], row[12] = MAX_ORDER, table.succ_tokens.dtype.itemsize, vocabulary
    return row


def _exact_row(segment: Segment, number: int, min_depth: int) -> NDArray[np.int64]:
    row = np.zeros(source_table.ROW, np.int64)
    row[0], row[1] = source_table.EXACT, number
    row[2], row[3], row[4] = address(segment.tokens), len(segment.tokens), segment.tokens.dtype.itemsize
    row[5], row[6] = address(segment.suffix_array), len(segment.suffix_array)
    row[7], row[8] = address(segment.to_local), len(segment.to_local)
    row[9], row[11] = address(segment.to_global), len(segment.to_global)
    row[10] = min_depth
    row[12], row[13], row[14] = address(segment.top), len(segment.top), segment.bits
    return row
