"""Numba kernels that follow a text: where its newest tokens stand in the segments of stores.

A match that goes on is narrowed. Where there was none, or it fell off, a match must end with the newest tokens: the
gram filters of all segments say, for one read each, which of them can hold that, and only those are searched.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import part
from retrieve_spec.kernels.grams import GRAM, may_hold, newest_gram
from retrieve_spec.kernels.ngram import home
from retrieve_spec.kernels.source_table import (
    EXACT_GRAMS,
    EXACT_ITEMSIZE,
    EXACT_MIN_DEPTH,
    EXACT_NUM_GRAMS,
    EXACT_TOP,
    EXACT_TOP_BITS,
    EXACT_TOP_SIZE,
    exact_narrow,
    suffixes_of,
    text_u16,
    text_u32,
    to_local_of,
)
from retrieve_spec.kernels.suffix_array import sa_between
from retrieve_spec.kernels.views import prefetch, view_u64

MATCH = 64
"""Longest match with a store that is kept when the text leaves it."""


@njit(cache=True, nogil=True)
def follow_all(
    table: NDArray[np.int64], first: int, cursors: NDArray[np.int64], window: NDArray[np.int32], fresh: int
) -> None:
    """Follow the newest tokens of the text with the longest-match cursors of stores.

    Parameters
    ----------
    table, first
        Sources, and the number of the first `EXACT` one; the others follow it.
    cursors
        (m, CURSOR) int64, one row for each: (lo, hi, depth) before the fresh tokens, modified in place; depth 0 for
        none.
    window
        (w,) int32 newest tokens of the text, oldest first, the fresh ones included.
    fresh
        How many of them are new.
    """
    known = len(window) >= GRAM
    gram = newest_gram(window) if known else np.uint64(0)
    for i in range(len(cursors)):  # all words at once: they lie far apart, and each would be waited for
        if known and table[first + i, EXACT_NUM_GRAMS] > 0:
            prefetch(table[first + i, EXACT_GRAMS] + 8 * home(gram, table[first + i, EXACT_NUM_GRAMS]))
    for i in range(len(cursors)):
        _follow(table, first + i, cursors, i, window, fresh, known, gram)


@part
def _follow(
    table: NDArray[np.int64],
    s: int,
    cursors: NDArray[np.int64],
    c: int,
    window: NDArray[np.int32],
    fresh: int,
    known: bool,
    gram: np.uint64,
) -> None:
    """`follow_all` for one cursor; ``gram`` is the hash of the newest tokens, if ``known``."""
    lo, hi, depth = cursors[c, 0], cursors[c, 1], cursors[c, 2]
    least = table[s, EXACT_MIN_DEPTH]
    n = len(window)
    i = n - fresh
    while depth > 0 and i < n:
        a, b = exact_narrow(table, s, lo, hi, depth, window[i])
        if a >= b:
            break
        lo, hi, depth = a, b, depth + 1
        i += 1
    if depth == 0 or i < n:
        # The match before token i was `depth` long and did not go on with it, or was shorter than `least`.
        longest = min((depth if depth > 0 else least) - 1 + n - i, n, MATCH)
        if known and longest >= GRAM and not may_hold(view_u64(table[s, EXACT_GRAMS], table[s, EXACT_NUM_GRAMS]), gram):
            longest = np.int64(GRAM - 1)
        lo, hi, depth = np.int64(0), np.int64(0), np.int64(0)
        if longest >= least:
            lo, hi, depth = _search(table, s, window[n - longest :], least)
    cursors[c, 0], cursors[c, 1], cursors[c, 2] = lo, hi, depth


@part
def _search(table: NDArray[np.int64], s: int, recent: NDArray[np.int32], least: int) -> tuple[int, int, int]:
    """(lo, hi, depth) of the longest suffix of at least ``least`` tokens of a text that a segment holds."""
    local = np.empty(len(recent), np.int64)
    to_local = to_local_of(table, s)
    for i in range(len(recent)):
        local[i] = to_local[recent[i]] if 0 <= recent[i] < len(to_local) else 0
    sa = suffixes_of(table, s)
    top = view_u64(table[s, EXACT_TOP], table[s, EXACT_TOP_SIZE])
    bits = table[s, EXACT_TOP_BITS]
    if table[s, EXACT_ITEMSIZE] == 2:
        lo, hi, depth = sa_between(text_u16(table, s), sa, top, bits, local, least, len(local))
    else:
        lo, hi, depth = sa_between(text_u32(table, s), sa, top, bits, local, least, len(local))
    return np.int64(lo), np.int64(hi), np.int64(depth)
