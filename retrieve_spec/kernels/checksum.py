"""Numba kernels that tell whether the numbers of a weight are still what they were: by a sample, or all of them."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xBF58476D1CE4E5B9)


@njit(cache=True, nogil=True)
def read_diagonal(words: NDArray[np.uint32], sample: NDArray[np.uint32]) -> None:
    """Read words (n, d) along the wrapped diagonal, (i mod n, i mod d) for i = 0 …, into sample (m,).

    With m = max(n, d) every row and every column is read at least once.
    """
    rows, columns = words.shape
    row = column = 0
    for i in range(sample.shape[0]):
        sample[i] = words[row, column]
        row += 1
        if row == rows:
            row = 0
        column += 1
        if column == columns:
            column = 0


@njit(cache=True, nogil=True)
def is_diagonal(words: NDArray[np.uint32], sample: NDArray[np.uint32]) -> bool:
    """Whether the wrapped diagonal of words (n, d) still is sample (m,)."""
    rows, columns = words.shape
    row = column = 0
    for i in range(sample.shape[0]):
        if sample[i] != words[row, column]:
            return False
        row += 1
        if row == rows:
            row = 0
        column += 1
        if column == columns:
            column = 0
    return True


@njit(cache=True, nogil=True)
def checksum(words: NDArray[np.uint32]) -> np.uint64:
    """Sum of words (n,) that depends on every word and its place: any change of one word changes it.

    Eight polynomials modulo 2⁶⁴ side by side, as one would wait for its own products.
    """
    p = _FACTOR
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.uint64(0)
    eights = words.shape[0] // 8 * 8
    for i in range(0, eights, 8):
        a0 = a0 * p + np.uint64(words[i])
        a1 = a1 * p + np.uint64(words[i + 1])
        a2 = a2 * p + np.uint64(words[i + 2])
        a3 = a3 * p + np.uint64(words[i + 3])
        a4 = a4 * p + np.uint64(words[i + 4])
        a5 = a5 * p + np.uint64(words[i + 5])
        a6 = a6 * p + np.uint64(words[i + 6])
        a7 = a7 * p + np.uint64(words[i + 7])
    for i in range(eights, words.shape[0]):
        a0 = a0 * p + np.uint64(words[i])
    total = a0
    for part in (a1, a2, a3, a4, a5, a6, a7):
        total = total * _STEP + part
    return total
