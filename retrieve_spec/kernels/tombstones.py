"""Numba kernels of tombstones: indexes of a segment that do not show the documents that count as removed.

A removed suffix shows its nearest neighbour in the suffix array instead, so the array stays sorted and as long as it
was, every search works as before, and an interval is empty unless a text that is left goes on that way. What it costs:
a neighbour's count grows by the suffixes that it stands for, until the segment is written anew without them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.ngram import EXTENT, MAX_ORDER, START, TOTAL, ngram_find, ngram_hash
from retrieve_spec.kernels.suffix_array import TOP_SHIFT, pack


@njit(cache=True, nogil=True)
def ranks_of(sa, first, last, gone, ranks):  # type: ignore[no-untyped-def]
    """Find where the suffixes of removed documents stand in a suffix array.

    Parameters
    ----------
    sa
        (m,) suffix array.
    first, last
        Removed documents lie in ``[first, last)`` of the text.
    gone
        (⌈(last - first) / 8⌉,) uint8, bit i of byte j says whether position ``first + 8 j + i`` was removed.
    ranks
        Output, as long as there are such positions.

    Returns
    -------
    int
        How many were found; they rise.
    """
    n = 0
    begin, length = np.uint64(first), np.uint64(last - first)
    for i in range(len(sa)):
        at = np.uint64(sa[i]) - begin  # beyond `length` for what is in front, too
        if at < length and (gone[at >> np.uint64(3)] >> (at & np.uint64(7))) & 1 and n < len(ranks):
            ranks[n] = i
            n += 1
    return n


@njit(cache=True, nogil=True)
def hide_suffixes(sa, ranks):  # type: ignore[no-untyped-def]
    """Let every suffix of rising `ranks` show its nearest neighbour that is left, the one before it if there is one."""
    n = len(ranks)
    i = 0
    while i < n:
        first = np.int64(ranks[i])
        end = first + 1
        i += 1
        while i < n and np.int64(ranks[i]) == end:
            end += 1
            i += 1
        if first == 0 and end == len(sa):
            return
        shown = sa[first - 1] if first > 0 else sa[end]
        for rank in range(first, end):
            sa[rank] = shown


@njit(cache=True, nogil=True)
def hide_tops(tokens, sa, ranks, bits, top):  # type: ignore[no-untyped-def]
    """Pack the beginnings of the suffixes anew that `ranks` changed and that the top table samples."""
    width = 64 // bits
    for i in range(len(ranks)):
        rank = np.int64(ranks[i])
        if rank & ((1 << TOP_SHIFT) - 1):
            continue
        start = np.int64(sa[rank])
        top[rank >> TOP_SHIFT] = pack(tokens, start, min(width, len(tokens) - start), width, bits)


@njit(cache=True, nogil=True)
def forget_document(ids, slots, succ_tokens, succ_counts):  # type: ignore[no-untyped-def]
    """Take the contexts of one removed document out of an n-gram table's counts.

    A continuation that nothing else was counted for is dropped from its slot; the slot stays, since searches for other
    contexts pass over it.

    Parameters
    ----------
    ids
        (n,) token ids of the document.
    slots, succ_tokens, succ_counts
        Arrays of the table, altered in place.
    """
    for i in range(len(ids) - 1):
        h = np.uint64(0)
        for order in range(1, min(i + 1, MAX_ORDER) + 1):
            h = ngram_hash(h, ids[i + 1 - order])
            slot = ngram_find(slots, h)
            if slot >= 0:
                _forget(slots, slot, succ_tokens, succ_counts, ids[i + 1])


@inner
def _forget(slots, slot, succ_tokens, succ_counts, token):  # type: ignore[no-untyped-def]
    """Count one continuation of a context less."""
    if slots[slot, TOTAL] > 0:
        slots[slot, TOTAL] -= np.uint32(1)
    extent = np.int64(slots[slot, EXTENT])
    kept = extent >> 16
    start = np.int64(slots[slot, START])
    end = min(start + kept, np.int64(min(len(succ_tokens), len(succ_counts))))
    at = start
    while at < end and succ_tokens[at] != token:
        at += 1
    if at >= end:
        return
    count = np.int64(succ_counts[at]) - 1
    # Down to its place: the most frequent come first, of equals the smaller token.
    while at + 1 < end and (
        succ_counts[at + 1] > count or (succ_counts[at + 1] == count and succ_tokens[at + 1] < token)
    ):
        succ_counts[at] = succ_counts[at + 1]
        succ_tokens[at] = succ_tokens[at + 1]
        at += 1
    succ_counts[at] = max(count, 0)
    succ_tokens[at] = token
    if count <= 0:  # the last one now
        slots[slot, EXTENT] = np.uint32(((kept - 1) << 16) | max((extent & 0xFFFF) - 1, np.int64(0)))
