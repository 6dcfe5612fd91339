"""Rows of logits in, the k largest entries of every row out (what `torch.topk` does, fast for few rows on one core)."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

_BLOCK = 128


@njit(cache=True, nogil=True)
def row_topk(logits: NDArray[np.float32], ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
    """Fill `ids` and `values`, both (m, k), with the k largest entries of each row of `logits` (m, v), largest first.

    Equal entries come in order of their index, as `argmax` breaks ties; NaN is never chosen. k >= 1, k <= v.
    """
    m, v = logits.shape
    k = ids.shape[1]
    for r in range(m):
        row = logits[r]
        for j in range(k):
            ids[r, j] = j
            values[r, j] = -np.inf
        floor = np.float32(-np.inf)
        for start in range(0, v, _BLOCK):
            stop = min(start + _BLOCK, v)
            above = 0
            for i in range(start, stop):  # a counting loop without branches: compiled to vector compares
                above += row[i] > floor
            if above == 0:
                continue
            for i in range(start, stop):
                x = row[i]
                if x > floor:
                    j = k - 1
                    while j > 0 and values[r, j - 1] < x:
                        values[r, j] = values[r, j - 1]
                        ids[r, j] = ids[r, j - 1]
                        j -= 1
                    values[r, j] = x
                    ids[r, j] = i
                    floor = values[r, k - 1]


@njit(cache=True, nogil=True)
def collect_at_least(row: NDArray[np.float32], floor: float, ids: NDArray[np.int32]) -> int:
    """Write the indices of the entries of `row` (v,) that are >= `floor` to `ids`, in order; return how many (<= v)."""
    v = row.shape[0]
    limit = np.float32(floor)
    count = 0
    for start in range(0, v, _BLOCK):
        stop = min(start + _BLOCK, v)
        above = 0
        for i in range(start, stop):
            above += row[i] >= limit
        if above == 0:
            continue
        for i in range(start, stop):
            if row[i] >= limit:
                ids[count] = i
                count += 1
    return count
