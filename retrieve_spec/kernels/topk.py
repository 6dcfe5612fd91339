"""Top-k of rows of logits (what `torch.topk` does, fast for few rows on one core)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import kernel, kernel_with_arrays
from retrieve_spec.kernels.vector_math import largest

BLOCK = 128
"""Width of the blocks whose maxima `row_topk` uses."""


@kernel
def row_topk(
    logits: NDArray[np.float32],
    maxima: NDArray[np.float32],
    ids: NDArray[np.int32],
    values: NDArray[np.float32],
) -> bool:
    """Fill `ids` and `values`, both (m, k), with the k largest entries of each row of `logits` (m, v), largest first.

    `maxima` (m, v // BLOCK) holds the maximum of every full block. The k-th largest of them is at most the k-th largest
    entry, so only the few blocks that reach it are read. Equal entries come in order of their index, as `argmax`
    breaks ties; NaN is never chosen. 1 <= k <= v. Returns whether there is a NaN, by the maximum of its block.
    """
    m, v = logits.shape
    k = ids.shape[1]
    blocks = maxima.shape[1]
    unordered = False
    for r in range(m):
        row = logits[r]
        best = values[r]
        best[:] = -np.inf
        for b in range(blocks):  # the k largest maxima, stored in the result's array
            x = maxima[r, b]
            unordered |= np.isnan(x)
            if x > best[k - 1]:
                j = k - 1
                while j > 0 and best[j - 1] < x:
                    best[j] = best[j - 1]
                    j -= 1
                best[j] = x
        floor = best[k - 1]
        best[:] = -np.inf
        for j in range(k):
            ids[r, j] = j
        for b in range(blocks + 1):
            if b < blocks and maxima[r, b] < floor:
                continue
            for i in range(b * BLOCK, min((b + 1) * BLOCK, v)):
                x = row[i]
                if x >= floor and x > best[k - 1]:
                    j = k - 1
                    while j > 0 and best[j - 1] < x:
                        best[j] = best[j - 1]
                        ids[r, j] = ids[r, j - 1]
                        j -= 1
                    best[j] = x
                    ids[r, j] = i
        for i in range(blocks * BLOCK, v):
            unordered |= np.isnan(row[i])
    return unordered


@kernel
def collect_at_least(row: NDArray[np.float32], floor: float, ids: NDArray[np.int32]) -> int:
    """Write the indices of the entries of `row` (v,) that are >= `floor` to `ids`, in order; return how many (<= v)."""
    v = row.shape[0]
    limit = np.float32(floor)
    count = 0
    for start in range(0, v, BLOCK):
        stop = min(start + BLOCK, v)
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


@kernel_with_arrays
def block_maxima(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """(v // BLOCK,) maxima of the full blocks of `row` (v,), for callers that hold one row."""
    maxima = np.empty(row.shape[0] // BLOCK, np.float32)
    for b in range(maxima.shape[0]):
        maxima[b] = largest(row[b * BLOCK : (b + 1) * BLOCK])
    return maxima
