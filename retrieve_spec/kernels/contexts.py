"""Context filter: says from one place in memory which of many small n-gram tables may hold a context.

A matrix of bits, a row per bucket of fingerprints, a column per table. A table holds a context only in a slot with the
context's fingerprint (`kernels.ngram.ngram_find`), and the slots of a table mark the buckets of theirs: where a bit is
0, the table need not be searched.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels import ngram
from retrieve_spec.kernels.views import view_u64

_ONE = np.uint64(1)
_LOW = np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True)
def mark_contexts(slots: NDArray[np.uint32], column: int, marks: NDArray[np.uint64]) -> None:
    """Mark what an n-gram table holds.

    Parameters
    ----------
    slots
        (n, SLOT) uint32, the table's.
    column
        Of the table.
    marks
        (buckets, words) uint64, buckets a power of two; bits are only set.
    """
    mask = np.int64(len(marks) - 1)
    word = column >> 6
    bit = _ONE << np.uint64(column & 63)
    for i in range(len(slots)):
        if slots[i, ngram.KEY] != 0:
            marks[np.int64(slots[i, ngram.KEY]) & mask, word] |= bit


@njit(cache=True, nogil=True)
def longest_marked(address: int, buckets: int, words: int, column: int, hashes: NDArray[np.uint64], order: int) -> int:
    """The longest context, of at most ``order`` tokens, that a table may hold; 0 for none.

    Parameters
    ----------
    address, buckets, words
        Where the marks stand, and their shape.
    column
        Of the table.
    hashes
        (rows, k) uint64, row 0: of the contexts of 1, 2, … tokens.
    order
        At most k.
    """
    mask = np.int64(buckets - 1)
    shift = np.uint64(column & 63)
    while order > 0:
        fingerprint = np.int64(max(hashes[0, order - 1] & _LOW, _ONE))
        word = view_u64(address + 8 * ((fingerprint & mask) * words + (column >> 6)), 1)[0]
        if (word >> shift) & _ONE:
            break
        order -= 1
    return order
