"""The exact index of a datastore as a cursor machine: from the text so far to its longest match and what followed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.store import Datastore
from retrieve_spec.kernels.suffix_array import sa_successors
from retrieve_spec.kernels.suffix_search import sa_extend

LONGEST = 64
"""Longest match that is looked for when a match falls off."""
MAX_READS = 64
"""Suffixes read at most per segment to count next tokens."""


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
