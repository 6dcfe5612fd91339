"""Suffix array intervals: matches and next-token counts of sorted text positions.

A segment's text is a flat array of *local* ids: 0 separates documents, tokens are numbered from 1 in the order of their
ids, and the last entry is 0. The suffix array `sa` holds the positions of all tokens (except separators and removed
documents), sorted by the text that starts there. All suffixes that share their first `depth` tokens form an interval
``[lo, hi)``, sorted by the next token. No token of a query is 0, so no match crosses a document's end.

A search finds the interval of the longest suffix of a text that occurs. For searches, `top` is a sparse index: entry j
packs the first ``64 // bits`` tokens of suffix ``j << TOP_SHIFT`` into one uint64, so that a search reads a few cache
lines of it and a short range of `sa`.
"""

from __future__ import annotations

import numpy as np

from retrieve_spec.kernels.compiled_code import inner, kernel, kernel_with_arrays

SEPARATOR = 0
"""Local id between documents."""
TOP_SHIFT = 6
"""The top table has an entry per ``1 << TOP_SHIFT`` suffixes (0.125 bytes per token)."""


@inner
def sa_token(tokens, sa, i, depth):  # type: ignore[no-untyped-def]
    """Return the token at `depth` of suffix i; a separator if a damaged array points outside the text."""
    at = np.int64(sa[i]) + depth
    return np.int64(tokens[at]) if at < len(tokens) else np.int64(SEPARATOR)


@inner
def sa_lower(tokens, sa, lo, hi, depth, token):  # type: ignore[no-untyped-def]
    """Return the first index in ``[lo, hi)`` whose suffix has a token of at least `token` at `depth`, or `hi`."""
    while lo < hi:
        mid = (lo + hi) >> 1
        if sa_token(tokens, sa, mid, depth) < token:
            lo = mid + 1
        else:
            hi = mid
    return lo


@inner
def sa_upper(tokens, sa, lo, hi, depth, token):  # type: ignore[no-untyped-def]
    """Return the first index in ``[lo, hi)`` whose suffix has a token above `token` at `depth`; gallops from `lo`."""
    step = 1
    while lo + step < hi and sa_token(tokens, sa, lo + step, depth) <= token:
        lo += step
        step <<= 1
    return sa_lower(tokens, sa, lo, min(lo + step, hi), depth, token + 1)


@kernel
def sa_narrow(tokens, sa, lo, hi, depth, token):  # type: ignore[no-untyped-def]
    """Narrow an interval to the suffixes whose next token is `token`.

    Parameters
    ----------
    tokens
        (n,) uint16 or uint32 local ids; the last is 0.
    sa
        (m,) uint32 or int64 sorted positions.
    lo, hi
        Interval of suffixes that share their first `depth` tokens.
    depth
        Tokens matched so far.
    token
        Local id to follow; 0 and ids outside the segment match nothing.

    Returns
    -------
    tuple of int
        ``(lo, hi)`` of depth + 1; empty (``lo == hi``) if the token does not follow.
    """
    if token <= 0 or lo >= hi:
        return lo, lo
    lo = sa_lower(tokens, sa, lo, hi, depth, token)
    if lo >= hi or sa_token(tokens, sa, lo, depth) != token:
        return lo, lo
    return lo, sa_upper(tokens, sa, lo, hi, depth, token)


@inner
def _block_token(tokens, sa, lo, hi, depth, unit, block):  # type: ignore[no-untyped-def]
    """Return the next token of the suffix in the middle of a block of `unit` suffixes."""
    return sa_token(tokens, sa, min(lo + block * unit + (unit >> 1), hi - 1), depth)


@inner
def _run_end(tokens, sa, lo, hi, depth, unit, block, n_blocks, token):  # type: ignore[no-untyped-def]
    """Return the first block after `block` with another token than `token`: gallop, then bisect."""
    step = 1
    while block + step < n_blocks and _block_token(tokens, sa, lo, hi, depth, unit, block + step) == token:
        block += step
        step <<= 1
    left = block + 1
    right = min(block + step, n_blocks)
    while left < right:
        mid = (left + right) >> 1
        if _block_token(tokens, sa, lo, hi, depth, unit, mid) == token:
            left = mid + 1
        else:
            right = mid
    return left


@kernel
def sa_successors(tokens, sa, lo, hi, depth, max_reads, out_tokens, out_counts):  # type: ignore[no-untyped-def]
    """Count the next tokens of an interval, exactly or from a systematic sample.

    The interval is divided into at most `max_reads` blocks of ``unit`` suffixes (a power of two), and the suffix in the
    middle represents its block: a systematic sample, exact if ``unit`` is 1. Next tokens are sorted, so runs of blocks
    with the same token are found by galloping instead of reading each (the counts are those of infini-gram's rule, Liu
    et al. 2024, which halves the interval while its ends differ).

    Parameters
    ----------
    tokens, sa, lo, hi, depth
        As in `sa_narrow`.
    max_reads
        Most blocks, and so most distinct tokens.
    out_tokens, out_counts
        (≥ max_reads,) integer or float arrays, filled in the order of local ids.

    Returns
    -------
    tuple of int
        Number of distinct tokens written, and ``hi - lo``, to which the counts add up, except for suffixes at the end
        of a document.
    """
    total = hi - lo
    unit = 1
    while total > unit * max_reads:
        unit <<= 1
    n_blocks = (total + unit - 1) // unit
    n = 0
    block = np.int64(0)
    while block < n_blocks:
        token = _block_token(tokens, sa, lo, hi, depth, unit, block)
        end = _run_end(tokens, sa, lo, hi, depth, unit, block, n_blocks, token)
        if token != SEPARATOR:
            out_tokens[n] = token
            out_counts[n] = min(end * unit, total) - block * unit
            n += 1
        block = end
    return n, total


@inner
def _pack(tokens, start, n_tokens, width, bits):  # type: ignore[no-untyped-def]
    """Pack the first `width` of `n_tokens` tokens from `start` into one uint64, missing ones as 0."""
    key = np.uint64(0)
    for i in range(width):
        key <<= np.uint64(bits)
        if i < n_tokens:
            key |= np.uint64(tokens[start + i])
    return key


@kernel_with_arrays
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
def _first_beyond(top, lo, key, above):  # type: ignore[no-untyped-def]
    """Return the first index from `lo` on of a sorted uint64 array with at least `key` (`above` 1: more than it)."""
    hi = len(top)
    while lo < hi:
        mid = (lo + hi) >> 1
        if top[mid] < key or (above == 1 and top[mid] == key):
            lo = mid + 1
        else:
            hi = mid
    return lo


@inner
def _suffix_not_below(tokens, sa, lo, hi, skip, pattern, start, n, above):  # type: ignore[no-untyped-def]
    """Return the first index in ``[lo, hi)`` with a suffix at least (`above` 1: above) ``pattern[start : start + n]``.

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


@kernel
def sa_search(tokens, sa, top, bits, pattern, start, n):  # type: ignore[no-untyped-def]
    """Find the interval of ``pattern[start : start + n]``.

    Parameters
    ----------
    tokens, sa
        As in `sa_narrow`.
    top, bits
        Top table of the segment and the bits of one packed token (`sa_top_table`).
    pattern
        Integer array of local ids; an id below 1 or above ``2**bits - 1`` matches nothing.
    start, n
        Part of the pattern to search for, n ≥ 1.

    Returns
    -------
    tuple of int
        ``(lo, hi)``, empty (``lo == hi``) if the pattern does not occur.
    """
    width = min(n, 64 // bits)
    for i in range(start, start + n):
        if pattern[i] <= 0 or pattern[i] >> bits:
            return 0, 0
    spare = np.uint64((64 // bits - width) * bits)
    low = _pack(pattern, start, width, width, bits) << spare
    high = low | ((np.uint64(1) << spare) - np.uint64(1))
    zero, one = np.int64(0), np.int64(1)  # not literals, since each literal would compile the search again
    a = _first_beyond(top, zero, low, zero)
    b = _first_beyond(top, a, high, one)
    # Suffixes between the last sample below and the first sample above.
    left = max(a - 1, 0) << TOP_SHIFT
    right = min(b << TOP_SHIFT, len(sa))
    left = _suffix_not_below(tokens, sa, left, min(a << TOP_SHIFT, right), zero, pattern, start, width, zero)
    right = _suffix_not_below(tokens, sa, max(left, (b - 1) << TOP_SHIFT), right, zero, pattern, start, width, one)
    if n > width and left < right:
        left = _suffix_not_below(tokens, sa, left, right, width, pattern, start, n, zero)
        right = _suffix_not_below(tokens, sa, left, right, width, pattern, start, n, one)
    return left, right


@kernel
def sa_longest(tokens, sa, top, bits, recent, n, longest):  # type: ignore[no-untyped-def]
    """Find the longest suffix of ``recent[:n]``, of at most `longest` tokens, that occurs.

    If a suffix occurs, so do all shorter ones, so lengths are bisected: at most ``log2(longest) + 1`` searches.

    Returns
    -------
    tuple of int
        ``(lo, hi, depth)``; depth 0 with the interval of the whole array if not even the last token occurs.
    """
    return _lengthen(tokens, sa, top, bits, recent, n, 0, len(sa), 0, min(n, longest))


@inner
def _lengthen(tokens, sa, top, bits, recent, n, lo, hi, depth, longest):  # type: ignore[no-untyped-def]
    """Find the longest suffix of ``recent[:n]`` that occurs, given one of `depth` tokens that does."""
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
    """Find the longest suffix of a text, within bounds of its length, that occurs.

    Usually one search shows that none of `shortest` tokens does.

    Parameters
    ----------
    tokens, sa, top, bits
        The segment.
    recent
        (n,) end of the text (local ids; 0 or less: not in the segment).
    shortest, longest
        1 ≤ shortest ≤ longest ≤ n; longer suffixes do not occur, or are not wanted.

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
