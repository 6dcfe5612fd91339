"""Numba kernels of a small trie of retrieved spans: rows of tokens are sorted; a node is an interval and a depth.

``spans`` (k, w) int32, rows sorted token by token, ``END`` after the end of a row. Every row has a similarity (k,)
float32 and a weight (k,) float32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, kernel

END = -1
"""Token after the end of a span, which sorts before all others."""


@inner
def narrow(spans: NDArray[np.int32], lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """Return the interval of a node's rows that continue with ``token``; empty if there are none."""
    if depth >= spans.shape[1]:
        return lo, lo
    while lo < hi and spans[lo, depth] < token:
        lo += 1
    end = lo
    while end < hi and spans[end, depth] == token:
        end += 1
    return lo, end


@inner
def open_rows(spans: NDArray[np.int32], lo: int, hi: int, depth: int) -> tuple[int, int]:
    """Return how many rows of a node continue, and with how many distinct tokens."""
    if depth >= spans.shape[1]:
        return 0, 0
    count = 0
    distinct = 0
    last = END
    for i in range(lo, hi):
        if spans[i, depth] != END:
            count += 1
            distinct += spans[i, depth] != last
            last = spans[i, depth]
    return count, distinct


@inner
def successors(
    spans: NDArray[np.int32],
    weight: NDArray[np.float32],
    lo: int,
    hi: int,
    depth: int,
    limit: int,
    out_tokens: NDArray[np.int32],
    out_p: NDArray[np.float32],
) -> int:
    """Write the tokens that follow a node, ascending, and their shares of its weight; return how many (≤ ``limit``)."""
    n = 0
    total = np.float32(0)
    for i in range(lo, hi):
        token = spans[i, depth]
        if token == END:
            continue
        total += weight[i]
        if n > 0 and out_tokens[n - 1] == token:
            out_p[n - 1] += weight[i]
        elif n < limit:
            out_tokens[n] = token
            out_p[n] = weight[i]
            n += 1
    for j in range(n):
        out_p[j] /= total
    return n


@inner
def share(spans: NDArray[np.int32], weight: NDArray[np.float32], lo: int, hi: int, depth: int, token: int) -> float:
    """Return the share of a node's weight that continues with ``token``."""
    total = 0.0
    part = 0.0
    for i in range(lo, hi):
        if spans[i, depth] != END:
            total += weight[i]
            part += weight[i] if spans[i, depth] == token else 0.0
    return part / total if total > 0 else 0.0


@kernel
def dense_length(similarity: NDArray[np.float32], spans: NDArray[np.int32], lo: int, hi: int, depth: int) -> int:
    """Return the match length used for a node of a trie of spans: by similarity, plus the tokens followed since.

    Each halving of the distance 1 - similarity counts as one token, up to seven. -1 if no span continues.
    """
    best = -2.0
    for i in range(lo, hi):
        if depth < spans.shape[1] and spans[i, depth] != END:
            best = max(best, float(similarity[i]))
    if best < -1:
        return np.int64(-1)
    near = int(-math.log2(max(1.0 - best, 0.0078125)))
    return np.int64(max(near, 0) + depth - 1)
