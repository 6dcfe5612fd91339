"""A growing text as an incremental suffix automaton: the context source, and the building block of the session."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import automaton as kernels
from retrieve_spec.kernels.source_table import KIND_AUTOMATON
from retrieve_spec.sources.rows import Row, source_row

BOUNDARY = -1
"""Stands for a token id; no context spans it."""


class SuffixAutomaton:
    """Incremental suffix automaton over token ids, in flat arrays.

    Appending is amortised O(1) per token. Every context of the text knows its continuations, how often each came and
    which came last.

    Parameters
    ----------
    capacity
        Tokens to make room for at first; the arrays grow as needed.
    shortest
        Shortest context that the mixture reads.
    exact
        Count every continuation of a context, as published rules do. The mixture asks shorter contexts only for what
        longer ones do not know, and counts them with that exclusion.

    Notes
    -----
    Blumer et al. 1985, with occurrence counts on transitions instead of states (`retrieve_spec.kernels.automaton`);
    contexts longer than `retrieve_spec.kernels.automaton.COUNTED` tokens count their continuations once. Update
    exclusion: Moffat, "Implementing the PPM data compression scheme", 1990.
    """

    def __init__(self, capacity: int = 1024, shortest: int = 0, exact: bool = False) -> None:
        self._capacity = max(capacity, 16)
        self._shortest = shortest
        self._row: Row | None = None  # of the current arrays
        self.states: NDArray[np.int32] = np.empty((2 * self._capacity, 5), np.int32)
        self.edges: NDArray[np.int32] = np.empty((self._capacity, 6), np.int32)
        self.slots: NDArray[np.int32] = np.empty(_power_of_two(self._capacity * 4 // 3 + 1), np.int32)
        self.meta: NDArray[np.int64] = np.zeros(kernels.META, np.int64)
        self.meta[kernels.M_COUNTS] = kernels.COUNT_ALL if exact else kernels.COUNT_EXCLUDING
        kernels.reset(self.states, self.slots, self.meta)

    def __len__(self) -> int:
        return int(self.meta[kernels.M_TOKENS])

    def reset(self) -> None:
        """Forget everything."""
        kernels.reset(self.states, self.slots, self.meta)

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Append tokens; `BOUNDARY` ends a document.

        Parameters
        ----------
        token_ids
            (n,) int32.
        """
        while (done := kernels.extend(self.states, self.edges, self.slots, self.meta, token_ids)) < len(token_ids):
            self._grow()
            token_ids = token_ids[done:]

    def _grow(self) -> None:
        """Enlarge a full array by half; the hash table always has room for all edges.

        Cut short by an interruption at any line, it leaves an automaton that can be read and extended.
        """
        num_states, num_edges = int(self.meta[kernels.M_STATES]), int(self.meta[kernels.M_EDGES])
        self._row = None
        if num_states + 2 > len(self.states):
            self.states = _grown(self.states, num_states)
            return
        edges = _grown(self.edges, num_edges)
        size = _power_of_two(len(edges) * 4 // 3 + 1)
        if size > len(self.slots):
            slots = np.full(size, -1, np.int32)
            kernels.rehash(edges, slots, num_edges)
            self.slots = slots
        self.edges = edges

    def earlier(self) -> tuple[int, int]:
        """Return (state, length) of the longest suffix of the text that occurred before; length 0 for none."""
        link = int(self.states[self.meta[kernels.M_LAST], kernels.LINK])
        return (link, int(self.states[link, kernels.LENGTH])) if link > 0 else (0, 0)

    def advance(self, state: int, matched: int, token_id: int) -> tuple[int, int]:
        """Return the match after one more token; it becomes shorter if it does not continue."""
        s, m = kernels.advance(self.states, self.edges, self.slots, state, matched, token_id)
        return int(s), int(m)

    def follow(self, token_ids: NDArray[np.int32], state: int = 0, matched: int = 0) -> tuple[int, int]:
        """Return (state, matched length) after a text, (n,) int32, that is not appended."""
        for token in token_ids.tolist():
            state, matched = self.advance(state, matched, token)
        return state, matched

    def successors(self, state: int, limit: int = 64) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """Return the continuations of a state: token ids and counts, the most recent first, and the total count."""
        ids, counts = np.empty(limit, np.int32), np.empty(limit, np.int32)
        n = kernels.successors(self.states, self.edges, state, limit, 0.0, ids, counts)
        return ids[:n], counts[:n], int(self.states[state, kernels.COUNT])

    def row(self, number: int) -> Row:
        """Return the row of the mixture's source table: the same until `extend` has replaced an array.

        Parameters
        ----------
        number
            Place in `retrieve_spec.sources.SOURCE_NAMES`, always the same for one automaton.
        """
        if self._row is None:
            self._row = source_row(
                KIND_AUTOMATON,
                number,
                "automaton",
                states=self.states,
                edges=self.edges,
                slots=self.slots,
                meta=self.meta,
                num_states=len(self.states),
                num_edges=len(self.edges),
                num_slots=len(self.slots),
                shortest=self._shortest,
            )
        return self._row


def _power_of_two(n: int) -> int:
    return 1 << max(4, (n - 1).bit_length())


def _grown(rows: NDArray[np.int32], used: int) -> NDArray[np.int32]:
    more = np.empty((len(rows) * 3 // 2 + 64, rows.shape[1]), np.int32)
    more[:used] = rows[:used]
    return more
