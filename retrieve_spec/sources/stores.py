"""Open datastores as rows of the mixture's source table: suffix array segments and n-gram tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from retrieve_spec.kernels import source_table
from retrieve_spec.kernels.ngram import MAX_ORDER
from retrieve_spec.sources.rows import Row, source_row

if TYPE_CHECKING:
    from retrieve_spec.datastore.segment import Segment
    from retrieve_spec.datastore.store import Datastore


@dataclass(slots=True)
class StoreRows:
    """Rows of all stores, which keep their maps open, and the stores themselves.

    Attributes
    ----------
    stores
        The open stores.
    ngram, exact
        Rows of the n-gram tables and of the suffix array segments.
    """

    stores: list[Datastore]
    ngram: list[Row] = field(default_factory=list)
    exact: list[Row] = field(default_factory=list)

    @classmethod
    def of(cls, stores: list[Datastore], ngram_number: int, exact_number: int) -> StoreRows:
        """Rows of every segment, numbered over all stores; orders that an n-gram table has are left to the table."""
        made = cls(stores)
        segments = [(store, number) for store in stores for number in range(len(store.segments))]
        for place, (store, number) in enumerate(segments):
            segment = store.segments[number]
            if segment.ngram is not None:
                made.ngram.append(_ngram_row(store, number, ngram_number))
            if len(segment.suffix_array):
                min_depth = 1 if segment.ngram is None else MAX_ORDER + 1
                made.exact.append(_exact_row(segment, exact_number, min_depth, place))
        return made


def _ngram_row(store: Datastore, place: int, number: int) -> Row:
    table, contexts = store.segments[place].ngram, store.contexts
    assert table is not None
    filtered = contexts.columns[place] >= 0
    return source_row(
        source_table.NGRAM,
        number,
        {
            source_table.NGRAM_SLOTS: table.slots,
            source_table.NGRAM_TOKENS: table.succ_tokens,
            source_table.NGRAM_COUNTS: table.succ_counts,
            source_table.NGRAM_MARKS: contexts.marks,
        },
        {
            source_table.NGRAM_NUM_SLOTS: len(table.slots),
            source_table.NGRAM_SIZE: len(table.succ_tokens),
            source_table.NGRAM_ITEMSIZE: table.succ_tokens.dtype.itemsize,
            source_table.NGRAM_ORDERS: MAX_ORDER,
            source_table.NGRAM_VOCABULARY: store.segments[place].vocabulary,
            source_table.NGRAM_BUCKETS: len(contexts.marks) if filtered else 0,
            source_table.NGRAM_WORDS: contexts.marks.shape[1],
            source_table.NGRAM_COLUMN: max(contexts.columns[place], 0),
        },
    )


def _exact_row(segment: Segment, number: int, min_depth: int, place: int) -> Row:
    return source_row(
        source_table.EXACT,
        number,
        {
            source_table.EXACT_TOKENS: segment.tokens,
            source_table.EXACT_SUFFIXES: segment.suffix_array,
            source_table.EXACT_TO_LOCAL: segment.to_local,
            source_table.EXACT_TO_GLOBAL: segment.to_global,
            source_table.EXACT_TOP: segment.top,
            source_table.EXACT_GRAMS: segment.grams,
        },
        {
            source_table.EXACT_LENGTH: len(segment.tokens),
            source_table.EXACT_ITEMSIZE: segment.tokens.dtype.itemsize,
            source_table.EXACT_NUM_SUFFIXES: len(segment.suffix_array),
            source_table.EXACT_VOCABULARY: segment.vocabulary,
            source_table.EXACT_NUM_LOCAL: len(segment.to_global),
            source_table.EXACT_TOP_SIZE: len(segment.top),
            source_table.EXACT_NUM_GRAMS: len(segment.grams),
            source_table.EXACT_TOP_BITS: segment.bits,
            source_table.EXACT_MIN_DEPTH: min_depth,
            source_table.EXACT_SEGMENT: place,
        },
    )
