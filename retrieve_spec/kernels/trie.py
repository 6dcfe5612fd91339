"""Numba kernels of a small trie of retrieved spans: sorted rows of tokens, a node is an interval of rows and a depth.

``spans`` (k, w) int32, rows sorted token by token, ``END`` behind the end of a row. Every row has a similarity (k,)
float32 and a weight (k,) float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import door, inner, making_door
from retrieve_spec.kernels.suffix_array import SEPARATOR

END = -1
"""Token behind the end of a span; sorts before all others."""


@door
def gather(
    tokens: NDArray[Any],
    to_global: NDArray[np.uint32],
    positions: NDArray[np.int64],
    similarity: NDArray[np.float32],
    anchor: int,
    place: int,
    spans: NDArray[np.int32],
    kept_similarity: NDArray[np.float32],
    origins: NDArray[np.int64],
    n: int,
) -> int:
    """Read what follows each position, up to the end of its document, and keep it where it begins with the anchor.

    Parameters
    ----------
    tokens, to_global
        A segment's text and its token ids by local id.
    positions, similarity
        (m,) int64, positions before the continuations (-1: none); (m,) float32.
    anchor
        Token id that the continuation must begin with.
    place
        Added to the position of a span's first token to make its origin.
    spans, kept_similarity, origins
        (k, w) int32, (k,) float32 and (k,) int64 outputs, filled from row ``n``.

    Returns
    -------
    int
        Rows filled.
    """
    size, width = spans.shape
    for i in range(len(positions)):
        first = positions[i] + 1
        if n == size or positions[i] < 0 or first >= len(tokens):
            continue
        length = 0
        while length < width and first + length < len(tokens):
            local = tokens[first + length]
            if local == SEPARATOR or local >= len(to_global):
                break
            token = np.int32(to_global[local])
            if length == 0 and token != anchor:
                break
            spans[n, length] = token
            length += 1
        if length == 0:
            continue
        for j in range(length, width):
            spans[n, j] = END
        kept_similarity[n] = similarity[i]
        origins[n] = place + first
        n += 1
    return n


@inner
def _comes_before(spans: NDArray[np.int32], similarity: NDArray[np.float32], a: int, b: int) -> bool:
    """Whether row a sorts before row b: by tokens, then the more similar one."""
    for j in range(spans.shape[1]):
        if spans[a, j] != spans[b, j]:
            return bool(spans[a, j] < spans[b, j])
        if spans[a, j] == END:
            break
    return bool(similarity[a] > similarity[b])


@making_door
def sort_spans(spans: NDArray[np.int32], similarity: NDArray[np.float32], origins: NDArray[np.int64], n: int) -> None:
    """Sort the first ``n`` rows in place; equal rows keep their order."""
    order = np.arange(n)
    for i in range(1, n):
        row = order[i]
        j = i
        while j > 0 and _comes_before(spans, similarity, row, order[j - 1]):
            order[j] = order[j - 1]
            j -= 1
        order[j] = row
    spans[:n] = spans[:n][order]
    similarity[:n] = similarity[:n][order]
    origins[:n] = origins[:n][order]


@door
def weigh(similarity: NDArray[np.float32], n: int, temperature: float, weight: NDArray[np.float32]) -> None:
    """Weights of the first ``n`` rows: ``exp(similarity / temperature)``, 1 for the most similar."""
    top = np.float32(-np.inf)
    for i in range(n):
        top = max(top, similarity[i])
    for i in range(n):
        weight[i] = np.exp((similarity[i] - top) / temperature)


@inner
def narrow(spans: NDArray[np.int32], lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """Rows of a node that go on with ``token``; empty where there are none."""
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
    """(rows that go on behind a node, different tokens they go on with)."""
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
    """Tokens behind a node, rising, and their shares of its weight; returns how many (at most ``limit``)."""
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
    """Share of a node's weight that goes on with ``token``."""
    total = 0.0
    part = 0.0
    for i in range(lo, hi):
        if spans[i, depth] != END:
            total += weight[i]
            part += weight[i] if spans[i, depth] == token else 0.0
    return part / total if total > 0 else 0.0


@door
def dense_length(similarity: NDArray[np.float32], spans: NDArray[np.int32], lo: int, hi: int, depth: int) -> int:
    """What stands for the match length at a node of a trie of spans: similarity, and tokens followed since.

    Each halving of the distance 1 - similarity counts as one token, up to seven. -1 where no span goes on.
    """
    best = -2.0
    for i in range(lo, hi):
        if depth < spans.shape[1] and spans[i, depth] != END:
            best = max(best, float(similarity[i]))
    if best < -1:
        return np.int64(-1)
    near = int(-math.log2(max(1.0 - best, 0.0078125)))
    return np.int64(max(near, 0) + depth - 1)
