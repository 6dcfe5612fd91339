"""Readable cursors over a store: its longest match with a text, its n-gram tables, and what followed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.store import Datastore
from retrieve_spec.kernels.ngram import MAX_ORDER, ngram_hash
from retrieve_spec.kernels.suffix_array import sa_longest, sa_narrow, sa_successors

LONGEST = 64
"""Longest match that is looked for when a match falls off."""
MAX_READS = 64
"""Suffixes read at most per segment to count next tokens."""


def sa_extend(tokens, sa, top, bits, lo, hi, depth, recent, n, longest):
    """Interval of a text's longest end that occurs after one more token, from the one before it."""
    if depth == 0:
        return sa_longest(tokens, sa, top, bits, recent, n, min(n, 1))
    a, b = sa_narrow(tokens, sa, lo, hi, depth, np.int64(recent[n - 1]))
    return (a, b, depth + 1) if a < b else sa_longest(tokens, sa, top, bits, recent, n, min(depth, longest))


@dataclass(frozen=True, slots=True)
class CorpusState:
    """Where a text stands in every segment.

    Attributes
    ----------
    recent
        (≤ `LONGEST`,) int64, end of the text as token ids.
    intervals
        (segments, 3) int64, interval and length of the longest match per segment.
    """

    recent: NDArray[np.int64]
    intervals: NDArray[np.int64]

    @property
    def match_len(self) -> int:
        """Tokens at the end of the text that occur in the store."""
        return int(self.intervals[:, 2].max(initial=0))


@dataclass(frozen=True, slots=True)
class Successors:
    """What followed a match.

    Attributes
    ----------
    token_ids
        (k,) int32, rising.
    counts
        (k,) float64, how often each followed; estimates where the match has very many places.
    total
        Places of the match, ends of documents included.
    match_len
        Length of the match in tokens.
    """

    token_ids: NDArray[np.int32]
    counts: NDArray[np.float64]
    total: int
    match_len: int


class CorpusSource:
    """Cursor over the suffix arrays of a store (the lookup of REST, He et al. 2024, kept from token to token).

    Parameters
    ----------
    store
        An open store that keeps its text.
    """

    def __init__(self, store: Datastore) -> None:
        self.segments = [segment for segment in store.segments if len(segment.suffix_array)]

    def root(self, context: NDArray[np.int32]) -> CorpusState:
        """State after a text, (n,) int32; only its last `LONGEST` tokens count."""
        whole = [[0, len(segment.suffix_array), 0] for segment in self.segments]
        state = CorpusState(np.empty(0, np.int64), np.array(whole, np.int64).reshape(-1, 3))
        for token in context[-LONGEST:]:
            state = self.advance(state, int(token))
        return state

    def advance(self, state: CorpusState, token_id: int) -> CorpusState:
        """State after one more token; the match grows by it, or shrinks to the longest that occurs."""
        recent = np.append(state.recent, token_id)[-LONGEST:]
        intervals = np.empty_like(state.intervals)
        for i, segment in enumerate(self.segments):
            local = segment.localise(recent)
            lo, hi, depth = state.intervals[i].tolist()
            intervals[i] = sa_extend(
                segment.tokens,
                segment.suffix_array,
                segment.top,
                segment.bits,
                lo,
                hi,
                depth,
                local,
                len(local),
                LONGEST,
            )
        return CorpusState(recent, intervals)

    def successors(self, state: CorpusState) -> Successors:
        """Next tokens after the longest match; counts of the segments that reach it add up."""
        longest = state.match_len
        total = 0
        tokens, counts = np.empty(MAX_READS, np.int64), np.empty(MAX_READS, np.float64)
        found_tokens, found_counts = [np.empty(0, np.int64)], [np.empty(0, np.float64)]
        for i, segment in enumerate(self.segments):
            lo, hi, depth = state.intervals[i].tolist()
            if depth != longest or depth == 0:
                continue
            n, size = sa_successors(segment.tokens, segment.suffix_array, lo, hi, depth, MAX_READS, tokens, counts)
            total += int(size)
            found_tokens.append(segment.ids_of(tokens[:n]).astype(np.int64))
            found_counts.append(counts[:n].copy())
        ids, place = np.unique(np.concatenate(found_tokens), return_inverse=True)
        summed = np.bincount(place, np.concatenate(found_counts), len(ids)).astype(np.float64)
        return Successors(ids.astype(np.int32), summed, total, longest)


class NgramSource:
    """Cursor over the n-gram tables of a store (the databases of Hierarchy Drafting, Cho et al. 2025).

    A state is the end of the text, (≤ 5,) int64 token ids.

    Parameters
    ----------
    store
        An open store with n-gram tables.
    """

    def __init__(self, store: Datastore) -> None:
        self.tables, self._vocabulary = store.ngrams, store.manifest.vocabulary

    def root(self, context: NDArray[np.int32]) -> NDArray[np.int64]:
        """State after a text, (n,) int32."""
        return np.asarray(context[-MAX_ORDER:], np.int64)

    def advance(self, state: NDArray[np.int64], token_id: int) -> NDArray[np.int64]:
        """State after one more token."""
        return np.append(state, token_id)[-MAX_ORDER:]

    def orders(self, state: NDArray[np.int64]) -> list[Successors]:
        """Continuations of the last 1, 2, … 5 tokens, shortest context first, as far as some table knows them."""
        hashes = []
        h = np.uint64(0)
        for token in state[::-1].tolist():
            h = np.uint64(ngram_hash(h, token))
            hashes.append(h)
        found = (self._order(h, order) for order, h in enumerate(hashes, 1))
        return [successors for successors in found if successors is not None]

    def successors(self, state: NDArray[np.int64]) -> Successors:
        """Continuations of the longest context that some table knows."""
        known = self.orders(state)
        return known[-1] if known else Successors(np.empty(0, np.int32), np.empty(0, np.float64), 0, 0)

    def _order(self, h: np.uint64, order: int) -> Successors | None:
        """Continuations of one context, counts of all tables added; None where no table knows it."""
        total = 0
        tokens, counts = [np.empty(0, np.int64)], [np.empty(0, np.float64)]
        for table in self.tables:
            found = table.look_up(h, self._vocabulary)
            if found is not None:
                total += found[0]
                tokens.append(found[2].astype(np.int64))
                counts.append(found[3].astype(np.float64))
        if total == 0:
            return None
        ids, place = np.unique(np.concatenate(tokens), return_inverse=True)
        summed = np.bincount(place, np.concatenate(counts), len(ids)).astype(np.float64)
        return Successors(ids.astype(np.int32), summed, total, order)
