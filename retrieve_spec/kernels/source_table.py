"""One source as a row of integers: what the row holds, and Numba kernels that read the arrays behind it.

Source table: one int64 row per source, `KIND`, `NUMBER` (index into `SOURCE_NAMES`) and addresses of its arrays.
Cursors: (rows, `CURSOR`) int64 per node.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels import ngram
from retrieve_spec.kernels.suffix_array import sa_narrow, sa_successors, sa_token
from retrieve_spec.kernels.views import view_i32, view_rows, view_slots, view_u16, view_u32

KIND, NUMBER = 0, 1
AUTOMATON, RECYCLING, PREDICTION, NGRAM, EXACT, DENSE = 0, 1, 2, 3, 4, 5
ROW = 17
"""Integers per source row."""
RESTING = 16
"""Field of a source row that is 1 while the source is not asked, because it has explained next to nothing lately."""
CURSOR = 4
"""Integers per cursor."""
TAIL = 8
"""How many of the newest tokens every node knows."""
READ_LIMIT = 32
"""Continuations read per level, most recent or most frequent first."""


@njit(cache=True, nogil=True)
def states_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """State rows of an automaton source."""
    return view_rows(table[s, 2], table[s, 3], 5)


@njit(cache=True, nogil=True)
def edges_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """Edge rows of an automaton source."""
    return view_rows(table[s, 4], table[s, 5], 6)


@njit(cache=True, nogil=True)
def slots_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """Edge hash table of an automaton source."""
    return view_i32(table[s, 6], table[s, 7])


@njit(cache=True, nogil=True)
def spans_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """Rows of a trie of retrieved spans."""
    return view_rows(table[s, 2], table[s, 3], table[s, 4])


@njit(cache=True, nogil=True)
def ngram_part(table: NDArray[np.int64], s: int, slot: int) -> tuple[int, int]:
    """Where the continuations of an n-gram begin and end; inside the arrays also where a damaged store says else."""
    slots = view_slots(table[s, 2], table[s, 3])
    first = np.int64(slots[slot, ngram.START])
    return first, min(first + ngram.ngram_kept(slots, slot), table[s, 9])


@njit(cache=True, nogil=True)
def ngram_token(table: NDArray[np.int64], s: int, i: int) -> int:
    """Token of one stored continuation of an n-gram table."""
    if table[s, 11] == 2:
        return np.int64(view_u16(table[s, 7], table[s, 9])[i])
    return np.int64(view_u32(table[s, 7], table[s, 9])[i])


@njit(cache=True, nogil=True)
def exact_narrow(table: NDArray[np.int64], s: int, lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """Suffix array interval of a store's segment after one more token of the model's vocabulary."""
    local = view_i32(table[s, 7], table[s, 8])[token] if 0 <= token < table[s, 8] else np.int32(0)
    sa = view_u32(table[s, 5], table[s, 6])
    if table[s, 4] == 2:
        a, b = sa_narrow(view_u16(table[s, 2], table[s, 3]), sa, lo, hi, depth, np.int64(local))
    else:
        a, b = sa_narrow(view_u32(table[s, 2], table[s, 3]), sa, lo, hi, depth, np.int64(local))
    return np.int64(a), np.int64(b)


@njit(cache=True, nogil=True)
def exact_successors(
    table: NDArray[np.int64],
    s: int,
    lo: int,
    hi: int,
    depth: int,
    out_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
) -> int:
    """Next tokens of an interval, as ids of the model's vocabulary, with counts; returns how many."""
    sa = view_u32(table[s, 5], table[s, 6])
    if table[s, 4] == 2:
        n, _ = sa_successors(view_u16(table[s, 2], table[s, 3]), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    else:
        n, _ = sa_successors(view_u32(table[s, 2], table[s, 3]), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    to_global = view_u32(table[s, 9], table[s, 11])
    known = 0
    for i in range(n):
        if out_tokens[i] < len(to_global):  # a damaged store can hold other ids
            out_tokens[known] = to_global[out_tokens[i]]
            out_counts[known] = out_counts[i]
            known += 1
    return np.int64(known)


@njit(cache=True, nogil=True)
def exact_distinct(table: NDArray[np.int64], s: int, lo: int, hi: int, depth: int) -> int:
    """1 when all suffixes of a sorted interval go on alike, else a guess from its size (a read would cost more)."""
    sa = view_u32(table[s, 5], table[s, 6])
    if table[s, 4] == 2:
        tokens = view_u16(table[s, 2], table[s, 3])
        same = sa_token(tokens, sa, lo, depth) == sa_token(tokens, sa, hi - 1, depth)
    else:
        wide = view_u32(table[s, 2], table[s, 3])
        same = sa_token(wide, sa, lo, depth) == sa_token(wide, sa, hi - 1, depth)
    return 1 if same else min(hi - lo, 2 + (hi - lo) // 8)
