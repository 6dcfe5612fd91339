"""Search in a suffix array from nothing: the interval of a text's longest end that occurs.

`top` is a sparse copy of the array: entry j packs the first ``64 // bits`` tokens of suffix ``j << TOP_SHIFT`` into one
uint64, so that a search from nothing reads a few cache lines of it and one short stretch of `sa`.
`kernels/suffix_array.py` says what `tokens` and `sa` are.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.suffix_array import sa_narrow, sa_token

TOP_SHIFT = 6
"""One entry of the top table stands for ``1 << TOP_SHIFT`` suffixes (0.125 byte per token)."""


@inner
def _pack(tokens, start, n_tokens, width, bits):  # type: ignore[no-untyped-def]
    """Pack the first `width` of `n_tokens` tokens from `start` into one uint64, missing ones as 0."""
    key = np.uint64(0)
    for i in range(width):
        key <<= np.uint64(bits)
        if i < n_tokens:
            key |= np.uint64(tokens[start + i])
    return key


@njit(cache=True, nogil=True)
def sa_top_table(tokens, sa, bits):  # type: ignore[no-untyped-def]
    """Pack the beginning of every ``1 << TOP_SHIFT``-th suffix: (⌈m / 64⌉,) uint64."""
    width = 64 // bits
    m = (len(sa) + (1 << TOP_SHIFT) - 1) >> TOP_SHIFT
    top = np.empty(m, np.uint64)
    for j in range(m):
        start = np.int64(sa[j << TOP_SHIFT])
        top[j] = _pack(tokens, start, min(width, len(tokens) - start), width, bits)
    return top


@inner
def _first_not_below(top, key):  # type: ignore[no-untyped-def]
    """First index of a sorted uint64 array that holds at least `key`."""
    lo = 0
    hi = len(top)
    while lo < hi:
        mid = (lo + hi) >> 1
        if top[mid] < key:
            lo = mid + 1
        else:
            hi = mid
    return lo


@inner
def _first_above(top, lo, key):  # type: ignore[no-untyped-def]
    """First index from `lo` on of a sorted uint64 array that holds more than `key`, galloping: it is often near."""
    step = 1
    while lo + step <= len(top) and top[lo + step - 1] <= key:
        lo += step
        step <<= 1
    hi = min(lo + step, len(top))
    while lo < hi:
        mid = (lo + hi) >> 1
        if top[mid] <= key:
            lo = mid + 1
        else:
            hi = mid
    return lo


@inner
def _suffix_not_below(tokens, sa, lo, hi, skip, pattern, start, n, above):  # type: ignore[no-untyped-def]
    """First index in ``[lo, hi)`` whose suffix is not below (`above` 1: is above) ``pattern[start : start + n]``.

    All suffixes of the interval share the pattern's first `skip` tokens; one that begins with the pattern is equal.
    """
    while lo < hi:
        mid = (lo + hi) >> 1
        order = 0
        for i in range(skip, n):
            token = sa_token(tokens, sa, mid, i)
            wanted = np.int64(pattern[start + i])
            if token != wanted:
                order = -1 if token < wanted else 1
                break
        if order < 0 or (above == 1 and order == 0):
            lo = mid + 1
        else:
            hi = mid
    return lo


@njit(cache=True, nogil=True)
def sa_search(tokens, sa, top, bits, pattern, start, n):  # type: ignore[no-untyped-def]
    """Find the interval of ``pattern[start : start + n]`` from nothing.

    Parameters
    ----------
    tokens, sa
        As in `sa_narrow`.
    top, bits
        Top table of the segment and the bits of one packed token (`sa_top_table`).
    pattern
        Integer array of local ids; an id below 1 or above ``2**bits - 1`` matches nothing.
    start, n
        Which part of the pattern to look for, n ≥ 1.

    Returns
    -------
    tuple of int
        ``(lo, hi)``, empty (``lo == hi``) when the pattern does not occur.
    """
    width = min(n, 64 // bits)
    for i in range(start, start + n):
        if pattern[i] <= 0 or pattern[i] >> bits:
            return 0, 0
    spare = np.uint64((64 // bits - width) * bits)
    low = _pack(pattern, start, width, width, bits) << spare
    high = low | ((np.uint64(1) << spare) - np.uint64(1))
    a = _first_not_below(top, low)
    b = _first_above(top, a, high)
    # Suffixes between the last sample below and the first sample above.
    left = max(a - 1, 0) << TOP_SHIFT
    right = min(b << TOP_SHIFT, len(sa))
    zero, one = np.int64(0), np.int64(1)  # not literals: for each of those the search would be compiled once more
    left = _suffix_not_below(tokens, sa, left, min(a << TOP_SHIFT, right), zero, pattern, start, width, zero)
    right = _suffix_not_below(tokens, sa, max(left, (b - 1) << TOP_SHIFT), right, zero, pattern, start, width, one)
    if n > width and left < right:
        left = _suffix_not_below(tokens, sa, left, right, width, pattern, start, n, zero)
        right = _suffix_not_below(tokens, sa, left, right, width, pattern, start, n, one)
    return left, right


@njit(cache=True, nogil=True)
def sa_longest(tokens, sa, top, bits, recent, n, longest):  # type: ignore[no-untyped-def]
    """Find the longest suffix of ``recent[:n]``, of at most `longest` tokens, that occurs.

    A suffix occurs wherever a longer one does, so lengths are bisected: at most ``log2(longest) + 1`` searches.

    Returns
    -------
    tuple of int
        ``(lo, hi, depth)``; depth 0 with the interval of the whole array when not even the last token occurs.
    """
    return _lengthen(tokens, sa, top, bits, recent, n, 0, len(sa), 0, min(n, longest))


@inner
def _lengthen(tokens, sa, top, bits, recent, n, lo, hi, depth, longest):  # type: ignore[no-untyped-def]
    """Find the longest suffix of ``recent[:n]`` that occurs, from one of `depth` tokens that does."""
    while depth < longest:
        length = (depth + longest + 1) >> 1
        a, b = sa_search(tokens, sa, top, bits, recent, n - length, length)
        if a < b:
            lo, hi, depth = a, b, length
        else:
            longest = length - 1
    return lo, hi, depth


@inner
def sa_between(tokens, sa, top, bits, recent, shortest, longest):  # type: ignore[no-untyped-def]
    """Find the longest suffix of a text that occurs and has so many tokens.

    Most of the time one search says that none of `shortest` tokens does.

    Parameters
    ----------
    tokens, sa, top, bits
        The segment.
    recent
        (n,) end of the text (local ids; 0 or less: unknown to the segment).
    shortest, longest
        1 ≤ shortest ≤ longest ≤ n; no longer suffix occurs, or none is looked for.

    Returns
    -------
    tuple of int
        ``(lo, hi, depth)``; ``(0, 0, 0)`` for none.
    """
    n = len(recent)
    lo, hi = sa_search(tokens, sa, top, bits, recent, n - shortest, shortest)
    if lo >= hi:
        return 0, 0, 0
    return _lengthen(tokens, sa, top, bits, recent, n, lo, hi, shortest, longest)


@njit(cache=True, nogil=True)
def sa_extend(tokens, sa, top, bits, lo, hi, depth, recent, n, longest):  # type: ignore[no-untyped-def]
    """Follow one more token of the text, keeping the longest suffix that occurs.

    While the match grows this is one narrowing of an interval that only shrinks; when it falls off, the new match is at
    most as long as the old one and is found by `sa_longest`.

    Parameters
    ----------
    tokens, sa, top, bits
        The segment.
    lo, hi, depth
        Match of the text without its last token; ``(0, len(sa), 0)`` for none.
    recent, n
        ``recent[:n]`` ends with the new token (local ids; 0 or less: unknown to the segment). As many tokens of the
        text as a match may keep when it falls off, usually 64.
    longest
        Longest match kept when falling off.

    Returns
    -------
    tuple of int
        ``(lo, hi, depth)`` of the text with the token; ``(0, len(sa), 0)`` when the token does not occur.
    """
    if depth == 0:
        return sa_longest(tokens, sa, top, bits, recent, n, min(n, 1))
    a, b = sa_narrow(tokens, sa, lo, hi, depth, np.int64(recent[n - 1]))
    if a < b:
        return a, b, depth + 1
    return sa_longest(tokens, sa, top, bits, recent, n, min(depth, longest))
