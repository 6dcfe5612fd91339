"""Suffix array intervals: matches and next-token counts of sorted text positions.

A segment's text is a flat array of *local* ids: 0 separates documents, tokens are numbered from 1 in the order of their
ids, and the last entry is 0. The suffix array `sa` holds the positions of all tokens (separators and removed documents
left out), sorted by the text that starts there. All suffixes that share their first `depth` tokens form one interval
``[lo, hi)``, and inside it they are sorted by the next token; no token of a query is 0, so no match crosses a border.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from retrieve_spec.kernels.compiled_code import inner

SEPARATOR = 0
"""Local id between two documents."""


@inner
def sa_token(tokens, sa, i, depth):  # type: ignore[no-untyped-def]
    """Token at `depth` of suffix i; a separator where a damaged array points outside the text."""
    at = np.int64(sa[i]) + depth
    return np.int64(tokens[at]) if at < len(tokens) else np.int64(SEPARATOR)


@inner
def sa_lower(tokens, sa, lo, hi, depth, token):  # type: ignore[no-untyped-def]
    """First index in ``[lo, hi)`` whose suffix has a token of at least `token` at `depth`, or `hi`."""
    while lo < hi:
        mid = (lo + hi) >> 1
        if sa_token(tokens, sa, mid, depth) < token:
            lo = mid + 1
        else:
            hi = mid
    return lo


@inner
def sa_upper(tokens, sa, lo, hi, depth, token):  # type: ignore[no-untyped-def]
    """First index in ``[lo, hi)`` whose suffix has a token above `token` at `depth`, galloping from `lo`."""
    step = 1
    while lo + step < hi and sa_token(tokens, sa, lo + step, depth) <= token:
        lo += step
        step <<= 1
    return sa_lower(tokens, sa, lo, min(lo + step, hi), depth, token + 1)


@njit(cache=True, nogil=True)
def sa_narrow(tokens, sa, lo, hi, depth, token):  # type: ignore[no-untyped-def]
    """Narrow an interval to the suffixes whose next token is `token`.

    Parameters
    ----------
    tokens
        (n,) uint16 or uint32, local ids; the last is 0.
    sa
        (m,) uint32 or int64, sorted positions.
    lo, hi
        Interval of suffixes that share their first `depth` tokens.
    depth
        Tokens matched so far.
    token
        Local id to follow; 0 and ids outside the segment match nothing.

    Returns
    -------
    tuple of int
        ``(lo, hi)`` of depth + 1; empty (``lo == hi``) when nothing follows.
    """
    if token <= 0 or lo >= hi:
        return lo, lo
    lo = sa_lower(tokens, sa, lo, hi, depth, token)
    if lo >= hi or sa_token(tokens, sa, lo, depth) != token:
        return lo, lo
    return lo, sa_upper(tokens, sa, lo, hi, depth, token)


@inner
def _block_token(tokens, sa, lo, hi, depth, unit, block):  # type: ignore[no-untyped-def]
    """Token that follows the suffix in the middle of a block of `unit` suffixes."""
    return sa_token(tokens, sa, min(lo + block * unit + (unit >> 1), hi - 1), depth)


@inner
def _run_end(tokens, sa, lo, hi, depth, unit, block, n_blocks, token):  # type: ignore[no-untyped-def]
    """First block after `block` that does not show `token`: galloping, then bisection."""
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


@njit(cache=True, nogil=True)
def sa_successors(tokens, sa, lo, hi, depth, max_reads, out_tokens, out_counts):  # type: ignore[no-untyped-def]
    """Count the tokens that follow an interval, exactly or from a fair sample.

    The interval is cut into at most `max_reads` blocks of ``unit`` suffixes (a power of two), and the suffix in the
    middle of each block speaks for the block: a systematic sample, exact when ``unit`` is 1. Next tokens are sorted, so
    runs of blocks that show the same token are found by galloping instead of reading each (the counts are those of
    infini-gram's rule, Liu et al. 2024, which halves the interval while its ends differ).

    Parameters
    ----------
    tokens, sa, lo, hi, depth
        As in `sa_narrow`.
    max_reads
        Blocks at most, and so distinct tokens at most.
    out_tokens, out_counts
        (≥ max_reads,) integer or float arrays, filled in the order of local ids.

    Returns
    -------
    tuple of int
        Number of distinct tokens written, and ``hi - lo``: counts add up to it, less the suffixes at which a document
        ends (no token follows there).
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
