"""Indexes of a segment's text besides its suffix array: n-gram tables and the gram filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import StoreConfig
from retrieve_spec.kernels import ngram

LOAD = 0.7
"""Load factor of a table; a hit reads about two slots, a miss six."""
_HISTOGRAM = 4096
_FEW_TABLES = 4
"""Number of tables up to which no context filter is made."""
_SMALL_SLOTS = 1 << 18
_BUCKETS_EACH = 16
"""Filter buckets per context of the largest small table: at most one in so many searches of an order is in vain."""
_FILTER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class NgramTable:
    """Contexts of one to five tokens with their continuations; `retrieve_spec.kernels.ngram` describes the layout.

    Attributes
    ----------
    slots
        (capacity, 4) uint32, one row per context: fingerprint, count, first continuation, extent.
    succ_tokens, succ_counts
        (k,) uint16 or uint32 token ids, and (k,) uint32 counts, most frequent first within a slot.
    """

    slots: NDArray[np.uint32]
    succ_tokens: NDArray[Any]
    succ_counts: NDArray[np.uint32]

    @property
    def contexts(self) -> int:
        """Number of contexts in the table."""
        return int(np.count_nonzero(self.slots[:, ngram.KEY]))

    def look_up(
        self, h: np.uint64, vocabulary: int = 1 << 32
    ) -> tuple[int, int, NDArray[Any], NDArray[np.uint32]] | None:
        """Look up a context by its hash: (count, distinct continuations, (k,) top tokens, (k,) their counts).

        Ids ≥ `vocabulary`, which occur in damaged tables only, are left out.
        """
        slot = int(ngram.ngram_find(self.slots, h))
        if slot < 0:
            return None
        start = int(self.slots[slot, ngram.START])
        part = slice(start, start + int(ngram.ngram_kept(self.slots, slot)))
        distinct = int(ngram.ngram_distinct(self.slots, slot))
        tokens, counts = self.succ_tokens[part], self.succ_counts[part]
        known = tokens < vocabulary
        return int(self.slots[slot, ngram.TOTAL]), distinct, tokens[known], counts[known]


def _choose_min_count(
    histograms: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]], limit: int, width: int
) -> int:
    """Return the smallest minimum count (≥ 2) of contexts of two or more tokens with which the table fits."""
    contexts = np.zeros(_HISTOGRAM + 1, np.int64)
    continuations = np.zeros(_HISTOGRAM + 1, np.int64)
    for order, (c, k) in histograms.items():
        if order > 1:
            contexts += c
            continuations += k
    at_least = np.cumsum(contexts[::-1])[::-1], np.cumsum(continuations[::-1])[::-1]
    first = tuple(int(h.sum()) for h in histograms[1])
    for count in range(2, _HISTOGRAM + 1):
        slots = int((first[0] + int(at_least[0][count])) / LOAD + 2)
        if 4 * ngram.SLOT * slots + (first[1] + int(at_least[1][count])) * (width + 4) <= limit:
            return count
    return 2**31


def suffix_beginnings(tokens: NDArray[Any], sa: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return shared tokens and following tokens of each suffix (`retrieve_spec.kernels.ngram.suffix_beginnings`)."""
    shared, ahead = np.empty(len(sa), np.uint8), np.empty(len(sa), np.uint8)
    ngram.suffix_beginnings(tokens, sa, shared, ahead)
    return shared, ahead


def build_grams(
    tokens: NDArray[Any], to_global: NDArray[Any], beginnings: tuple[NDArray[np.uint8], NDArray[np.uint8]]
) -> NDArray[np.uint64]:
    """Build a segment's gram filter (`retrieve_spec.kernels.ngram`), (w,) uint64; parameters as for `build_ngrams`."""
    words = np.zeros(ngram.count_grams(*beginnings) // ngram.PER_WORD + 1, np.uint64)
    ngram.fill_grams(tokens, to_global, words)
    return words


def build_ngrams(
    tokens: NDArray[Any],
    sa: NDArray[Any],
    to_global: NDArray[Any],
    config: StoreConfig,
    beginnings: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None,
) -> NgramTable:
    """Count the contexts of a segment and keep the most frequent ones, as many as fit.

    Contexts of one token are all kept. Longer ones need a minimum count: the smallest (≥ 2) with which the table takes
    at most ``config.ngram_share`` of the bytes of tokens and suffix array, or ``config.ngram_floor`` bytes if that is
    more.

    Parameters
    ----------
    tokens, sa
        Local ids and suffix array of the segment.
    to_global
        (v,) uint32 token id of each local id.
    config
        Limits: orders, continuations per context, size.
    beginnings
        `suffix_beginnings` of the segment, if known.

    Returns
    -------
    NgramTable
        Deterministic in its inputs.
    """
    dtype = np.uint16 if int(to_global.max(initial=0)) < 1 << 16 else np.uint32
    limit = max(int(config.ngram_share * (tokens.nbytes + len(sa) * 4)), config.ngram_floor)
    shared, ahead = beginnings or suffix_beginnings(tokens, sa)
    top = config.ngram_successors
    histograms = {}
    for order in range(1, config.ngram_orders + 1):
        histograms[order] = np.zeros(_HISTOGRAM + 1, np.int64), np.zeros(_HISTOGRAM + 1, np.int64)
        ngram.count_contexts(shared, ahead, order, top, *histograms[order])
    min_count = _choose_min_count(histograms, limit, np.dtype(dtype).itemsize)
    kept = sum(int(c[1 if k == 1 else min(min_count, _HISTOGRAM + 1) :].sum()) for k, (c, _) in histograms.items())

    slots = np.zeros((int(kept / LOAD) + 2, ngram.SLOT), np.uint32)
    owner = np.full(len(slots), -1, np.int64)
    for order in range(1, config.ngram_orders + 1):
        least = 1 if order == 1 else min_count
        ngram.insert_contexts(tokens, sa, shared, ahead, to_global, order, least, top, slots, owner)
    stored = int((slots[:, ngram.EXTENT] >> 16).sum())
    succ_tokens = np.zeros(stored, dtype)
    succ_counts = np.zeros(stored, np.uint32)
    ngram.fill_continuations(tokens, sa, shared, ahead, to_global, owner, slots, succ_tokens, succ_counts)
    return NgramTable(slots, succ_tokens, succ_counts)


@dataclass(frozen=True, slots=True)
class ContextFilter:
    """Tells which of a store's small n-gram tables may hold a context (`retrieve_spec.kernels.ngram`).

    Attributes
    ----------
    marks
        (buckets, words) uint64; (0, 0) if there are too few tables for a filter.
    columns
        Column of each table, -1 for tables that are not small.
    """

    marks: NDArray[np.uint64]
    columns: tuple[int, ...]


def filter_contexts(tables: Sequence[NgramTable | None]) -> ContextFilter:
    """Build the context filter of a store's tables (None: a segment without); takes some ms per million contexts."""
    small = [(i, table) for i, table in enumerate(tables) if table is not None and len(table.slots) <= _SMALL_SLOTS]
    if len(small) < _FEW_TABLES:
        return ContextFilter(np.zeros((0, 0), np.uint64), (-1,) * len(tables))
    columns = [-1] * len(tables)
    words = -(-len(small) // 64)
    largest = max(table.contexts for _, table in small)
    buckets = 1 << (_BUCKETS_EACH * largest - 1).bit_length()
    while buckets * words * 8 > _FILTER_BYTES:
        buckets //= 2
    marks = np.zeros((buckets, words), np.uint64)
    for column, (i, table) in enumerate(small):
        columns[i], held = column, table.slots[:, ngram.KEY]
        marks[held[held != 0] & np.uint32(buckets - 1), column >> 6] |= np.uint64(1 << (column & 63))
    return ContextFilter(marks, tuple(columns))
