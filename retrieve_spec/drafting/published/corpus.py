"""Rules that copy from a store: REST, and what other rules share to read a store's suffix arrays."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.published.base import EXACT, FULL, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.errors import MissingSourceError
from retrieve_spec.kernels.suffix_array import SEPARATOR, sa_narrow, sa_successors
from retrieve_spec.kernels.suffix_search import sa_longest
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.segment import Segment
    from retrieve_spec.datastore.store import Datastore

Places = list[tuple[int, int, int]]
"""A match: (number of the segment, first suffix, end of the interval) wherever it occurs."""
FIRST = 5000
"""Matches read at most per segment, the first in the order of the suffix array, as in REST."""


def need_store(datastores: Sequence[Datastore], preset: str) -> None:
    """Refuse to go on without a store.

    Raises
    ------
    MissingSourceError
        When there is none, or none that keeps its text.
    """
    if not any(len(segment.suffix_array) for store in datastores for segment in store.segments):
        got = "none" if not datastores else "only stores without an exact index"
        raise MissingSourceError(
            f"a datastore with an exact index for draft={preset!r}",
            got,
            "Give one, or choose another draft.",
        )


class Corpus:
    """Suffix arrays of all segments of some stores as one text to look up."""

    def __init__(self, datastores: Sequence[Datastore]) -> None:
        self.segments: list[Segment] = [s for store in datastores for s in store.segments if len(s.suffix_array)]
        self._tokens = np.empty(FIRST, np.int64)
        self._counts = np.empty(FIRST, np.int64)

    def longest(self, recent: NDArray[np.int32], longest: int) -> tuple[Places, int]:
        """Where the longest suffix of a text, of at most `longest` tokens, occurs; and its length."""
        tail = recent[-longest:]
        best: Places = []
        length = 0
        for i, segment in enumerate(self.segments):
            local = segment.localise(tail)
            lo, hi, depth = sa_longest(
                segment.tokens, segment.suffix_array, segment.top, segment.bits, local, len(local), longest
            )
            if depth > length:
                best, length = [], int(depth)
            if depth == length and depth > 0:
                best.append((i, int(lo), int(hi)))
        return best, length

    def first(self, places: Places) -> Places:
        """The first `FIRST` matches of every segment."""
        return [(i, lo, min(hi, lo + FIRST)) for i, lo, hi in places]

    def next_counts(self, places: Places, depth: int, reads: int = FIRST) -> dict[int, int]:
        """Token → how often it follows a match of `depth` tokens; estimates where more than `reads` places match."""
        counts: dict[int, int] = {}
        for place in places:
            n = self._read_next(place, depth, reads)
            tokens = self.segments[place[0]].ids_of(self._tokens[:n]).tolist()
            for token, count in zip(tokens, self._counts[:n].tolist(), strict=True):
                counts[token] = counts.get(token, 0) + count
        return counts

    def _read_next(self, place: tuple[int, int, int], depth: int, reads: int) -> int:
        """Read what follows the matches of one segment into `_tokens` (local ids) and `_counts`; how many tokens."""
        i, lo, hi = place
        s = self.segments[i]
        n, _ = sa_successors(s.tokens, s.suffix_array, lo, hi, depth, reads, self._tokens, self._counts)
        return int(n)

    def narrow(self, places: Places, depth: int, token: int) -> Places:
        """The matches that a token follows."""
        kept: Places = []
        for i, lo, hi in places:
            s = self.segments[i]
            local = int(s.to_local[token]) if token < len(s.to_local) else 0
            a, b = sa_narrow(s.tokens, s.suffix_array, lo, hi, depth, local)
            if a < b:
                kept.append((i, int(a), int(b)))
        return kept

    def earliest(self, places: Places, depth: int, length: int) -> list[int]:
        """What follows the earliest match in its document, at most `length` tokens."""
        i, lo, hi = places[0]
        s = self.segments[i]
        at = int(s.suffix_array[lo:hi].min()) + depth
        run = s.tokens[at : at + length]
        ends = np.flatnonzero(run == SEPARATOR)
        run = run[: ends[0]] if len(ends) else run
        return [int(token) for token in s.ids_of(run)]

    def add_tree(
        self,
        places: Places,
        depth: int,
        builder: TreeBuilder,
        *,
        nodes: int,
        max_depth: int,
        children: int = FIRST,
        per_level: int = FIRST,
        reads: int = FIRST,
    ) -> None:
        """Add the continuations of a match, most frequent first, of equals the shallower, then the smaller token.

        Parameters
        ----------
        places, depth
            The match and its length.
        nodes, max_depth
            Nodes added at most, and how deep.
        children, per_level
            Children per node and nodes per depth at most.
        reads
            Places read at most per node to count what follows.
        """
        total = sum(hi - lo for _, lo, hi in places)
        levels = [0] * (max_depth + 1)
        front: list[tuple[int, int, int, int, Places]] = []
        self._push(front, places, depth, 1, ROOT, min(children, nodes), reads)
        while front and nodes > 0 and len(builder) < builder.max_nodes:
            count, level, token, parent, above = heapq.heappop(front)
            if levels[level] >= per_level:
                continue
            node = builder.add(parent, token, -count / (total + 1), EXACT)
            if node == FULL:
                continue
            levels[level] += 1
            nodes -= 1
            if level < min(max_depth, builder.max_depth) and nodes > 0:
                here = self.narrow(above, depth + level - 1, token)
                self._push(front, here, depth + level, level + 1, node, min(children, nodes), reads)

    def _push(
        self,
        front: list[tuple[int, int, int, int, Places]],
        places: Places,
        depth: int,
        level: int,
        parent: int,
        children: int,
        reads: int,
    ) -> None:
        """Queue the most frequent next tokens of some places as children of a node."""
        counts = self.next_counts(places, depth, reads)
        ranked = heapq.nsmallest(children, ((-count, token) for token, count in counts.items()))
        for count, token in ranked:
            heapq.heappush(front, (count, level, token, parent, places))


class Rest(PublishedDrafter):
    """Preset `rest`: the most frequent continuations of the longest match in a store.

    Follows REST (He et al. 2024): the last 16 … 2 tokens, longest first, are looked up and the first length that
    occurs decides; of its first 5,000 places per segment (in the order of the suffix array) the next ten tokens are
    merged into a trie, and the 64 prefixes that occur most often are drafted.

    Differs: nothing is drafted where nothing matches (REST verifies a dummy token); documents end (REST drafts across
    borders); ties are decided by depth and token id instead of the order of a hash map; counts of segments add up.
    """

    nodes = 64
    longest, shortest = 16, 2
    length = 10

    def __init__(self, datastores: Sequence[Datastore], session: SessionMemory | None = None) -> None:
        super().__init__(session)
        need_store(datastores, "rest")
        self._corpus = Corpus(datastores)

    def _draft(self, builder: TreeBuilder) -> None:
        places, depth = self._corpus.longest(self.text.ids, self.longest)
        if depth >= self.shortest:
            first = self._corpus.first(places)
            self._corpus.add_tree(first, depth, builder, nodes=self.nodes, max_depth=self.length)
