"""Numba kernels that read a suffix automaton: steps, successors and counts of a state.

`kernels/automaton_growth.py` appends to it.

State row, (5,) int32: suffix link, length, then three fields whose meaning depends on the third. ``TOKEN >= 0``: the
only successor, followed by its target state and count (most states). ``TOKEN = -1``: no successor. ``TOKEN <= -2``:
``-TOKEN`` successors in a list, followed by the list's head and the total count.

Edge row, (6,) int32: owner state, token, target state, count, next and previous edge of the owner's list. ``slots`` is
an open-addressing hash table over (owner, token) that holds edge indices, -1 when free.

``meta``, (`META`,) int64: number of states, number of edges, the state of the whole text, the state of its longest
suffix of at most `COUNTED` tokens, that suffix's length, tokens appended, how counts are kept.

Counts of contexts of at most `COUNTED` tokens are kept in one of two ways. `EXACT`: how often a token followed; lists
are most recent first. `EXCLUDING`: how often it followed where no longer context knew it (the update exclusion of
prediction by partial matching), since what a longer one knows is not asked of the shorter one; the most recent
successor is first in its list, behind it the most frequent come first, as far as `RANKED`. Longer contexts count once
per distinct continuation. This bounds the work per token on periodic text, where the chain of suffix links is as long
as the text.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.views import borrowed

LINK, LENGTH, TOKEN, TARGET, COUNT = range(5)
E_OWNER, E_TOKEN, E_TARGET, E_COUNT, E_NEXT, E_PREV = range(6)
M_STATES, M_EDGES, M_LAST, M_UPD, M_UPD_LEN, M_TOKENS, M_COUNTS = range(7)
META = 7
EXACT, EXCLUDING = 0, 1
COUNTED = 32
"""Longest context whose continuations are counted again."""
RANKED = 32
"""Successors of a list that are kept by count."""

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@njit(cache=True, nogil=True, inline="always")
def slot_of(owner: int, token: int, mask: int) -> int:
    """First slot to probe for an edge."""
    h = np.uint64(owner) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    return np.int64(h & np.uint64(mask))


@inner
def find_edge(edges: I32, slots: I32, owner: int, token: int) -> int:
    """Index of the listed edge (owner, token), or -1."""
    mask = len(slots) - 1
    i = slot_of(owner, token, mask)
    while True:
        e = slots[i]
        if e < 0:
            return -1
        if edges[e, E_OWNER] == owner and edges[e, E_TOKEN] == token:
            return e
        i = (i + 1) & mask


@njit(cache=True, nogil=True)
def step(states: I32, edges: I32, slots: I32, state: int, token: int) -> int:
    """State after following ``token`` from ``state``, or -1."""
    states, edges, slots = borrowed(states), borrowed(edges), borrowed(slots)
    first = states[state, TOKEN]
    if first >= -1:
        return states[state, TARGET] if first == token else -1
    e = find_edge(edges, slots, state, token)
    return edges[e, E_TARGET] if e >= 0 else -1


@njit(cache=True, nogil=True)
def advance(states: I32, edges: I32, slots: I32, state: int, matched: int, token: int) -> tuple[int, int]:
    """Follow ``token`` from the longest suffix that knows it: new (state, matched length)."""
    states, edges, slots = borrowed(states), borrowed(edges), borrowed(slots)
    s = np.int64(state)
    length = np.int64(matched)
    while s >= 0:
        t = step(states, edges, slots, s, token)
        if t >= 0:
            return np.int64(t), length + 1
        s = np.int64(states[s, LINK])
        if s >= 0:
            length = np.int64(states[s, LENGTH])
    return np.int64(0), np.int64(0)


@njit(cache=True, nogil=True)
def successors(states: I32, edges: I32, state: int, limit: int, fewest: float, out_tokens: I32, out_counts: I32) -> int:
    """Write up to ``limit`` successors, most recent first; returns how many.

    Behind the first, it ends with the first one that has a count below ``fewest``.
    """
    states, edges = borrowed(states), borrowed(edges)
    out_tokens, out_counts = borrowed(out_tokens), borrowed(out_counts)
    first = states[state, TOKEN]
    if first >= 0:
        out_tokens[0] = first
        out_counts[0] = states[state, COUNT]
        return 1
    n = 0
    if first < -1:
        e = states[state, TARGET]
        while e >= 0 and n < limit and (n == 0 or edges[e, E_COUNT] >= fewest):
            out_tokens[n] = edges[e, E_TOKEN]
            out_counts[n] = edges[e, E_COUNT]
            n += 1
            e = edges[e, E_NEXT]
    return n


@njit(cache=True, nogil=True, inline="always")
def degree(states: I32, state: int) -> int:
    """How many distinct tokens have followed."""
    first = states[state, TOKEN]
    return 1 if first >= 0 else (0 if first == -1 else -first)


@njit(cache=True, nogil=True)
def count_of(states: I32, edges: I32, slots: I32, state: int, token: int) -> int:
    """How often ``token`` has followed."""
    first = states[state, TOKEN]
    if first >= -1:
        return states[state, COUNT] if first == token else 0
    e = find_edge(edges, slots, state, token)
    return edges[e, E_COUNT] if e >= 0 else 0


@njit(cache=True, nogil=True, inline="always")
def most_recent(states: I32, edges: I32, state: int) -> int:
    """The token that followed last, or -1."""
    first = states[state, TOKEN]
    return first if first >= -1 else edges[states[state, TARGET], E_TOKEN]
