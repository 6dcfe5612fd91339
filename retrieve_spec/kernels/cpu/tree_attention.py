"""Attention of a pass's rows, including draft trees, over keys and values on a CPU.

Several queries of a key head are computed together. A query's result is bitwise independent of other queries and of
where the rows it sees are stored: the products of a key have a fixed order, shares are added as integers, and values
are added in the order of the text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inlined, inner
from retrieve_spec.kernels.cpu.number_formats import bytes_of, narrow, view_numbers, wide
from retrieve_spec.kernels.cpu.packed_products import block_of, multiplies_pairs
from retrieve_spec.kernels.cpu.vector_code import LANES, mix_block, score_block, transposing
from retrieve_spec.kernels.cpu.vector_units import unit_here
from retrieve_spec.kernels.vector_math import exp, largest
from retrieve_spec.kernels.views import view_f32, view_i64, view_u8

TEXT_FIELDS = 5
"""Fields of a text: its first row in the pass, its number of rows, and the addresses of its (rows, rows) bool mask, of
its (layers, 4) int64 caches (addresses of keys and values (heads, capacity, width), capacity, number of earlier rows),
and of its rows' (rows,) int64 positions relative to the first."""
QUERIES = 16
"""Queries computed together. For each, a thread needs scratch for `LANES` numbers of four bytes, three vectors of a
head's width, and a number per row of its text, including those of the pass."""
_UNIT = np.float32(1 << 40)
"""Shares are added in units of the inverse of this number."""
_BASE = np.float64(3 << 11)
"""A number whose last bit, also after adding a share, has the value of such a unit."""
_BASE_BITS = np.int64(_BASE.view(np.int64))
_VECTORS = unit_here()
_BLOCKS = _VECTORS.attention_blocks
_MOST = _BLOCKS[-1]
_transpose, _score, _mix = transposing(_VECTORS), score_block(_VECTORS), mix_block(_VECTORS)


@inner
def _parts_of(by_text: NDArray[np.int64], text: int, heads: int, kv_heads: int) -> int:
    """Return the number of parts into which one text's attention is divided."""
    return kv_heads * -(-(heads // kv_heads * by_text[text, 1]) // QUERIES)


@inner
def attention_parts(by_text: NDArray[np.int64], heads: int, kv_heads: int) -> int:
    """Return the number of parts of all texts' attention."""
    parts = 0
    for text in range(len(by_text)):
        parts += _parts_of(by_text, text, heads, kv_heads)
    return parts


@inner
def _copy(of: int, to: int, count: int, like: Any) -> None:
    """Copy numbers between addresses."""
    given, copied = view_numbers(of, count, like), view_numbers(to, count, like)
    for i in range(count):  # a loop, since Numba takes seconds to compile a slice assignment's shape check
        copied[i] = given[i]


@inner
def _copy_query(of: int, to: int, width: int, like: Any) -> None:
    """Copy a query: as bfloat16 if the unit multiplies pairs of these, else as float32."""
    if multiplies_pairs(like):
        _copy(of, to, width, like)
    else:
        given, laid = view_numbers(of, width, like), view_f32(to, width)
        for i in range(width):
            laid[i] = wide(given[i])


@inlined
def append_row(
    by_text: NDArray[np.int64], row: int, keys: int, values: int, layer: int, kv_heads: int, d: int, dv: int,
    like: Any,
) -> None:  # fmt: skip
    """Append a row's keys and values to its text's cache."""
    text = 0
    while row >= by_text[text, 0] + by_text[text, 1]:
        text += 1
    place = view_i64(by_text[text, 3] + 32 * layer, 4)
    at, size = place[3] + row - by_text[text, 0], bytes_of(like)
    for h in range(kv_heads):
        to, of = h * place[2] + at, row * kv_heads + h
        _copy(keys + size * d * of, place[0] + size * d * to, d, like)
        _copy(values + size * dv * of, place[1] + size * dv * to, dv, like)


@inner
def _cap(scores: NDArray[np.float32], scale: np.float32, softcap: np.float32) -> None:
    """Replace scores by softcap · tanh(scale · score / softcap)."""
    factor = np.float32(-2.0) * scale / softcap
    for j in range(len(scores)):
        scores[j] = softcap * (np.float32(2.0) / (np.float32(1.0) + exp(factor * scores[j])) - np.float32(1.0))


@inner
def _hide(
    scores: NDArray[np.float32], first: int, held: int, window: int, row: int, sights: NDArray[np.uint8],
    depths: NDArray[np.int64],
) -> None:  # fmt: skip
    """Mask the scores of keys from `first` on that a row does not see."""
    if window:
        for j in range(first, min(held, held + depths[row] - window + 1)):
            scores[j] = -np.inf
    for j in range(held, len(scores)):
        if not sights[j - held] or (window and depths[row] - depths[j - held] >= window):
            scores[j] = -np.inf


@njit(cache=True, nogil=True, error_model="numpy")
def _share(scores: NDArray[np.float32], scale: np.float32) -> np.float32:
    """Replace scores by exponentials relative to the largest, and add them up; masked scores become 0."""
    top, total = largest(scores), np.int64(0)
    for j in range(len(scores)):
        share = exp((scores[j] - top) * scale)
        scores[j] = share if scores[j] > -np.inf else np.float32(0.0)
    for j in range(len(scores)):  # the sum's bits count units: without AVX-512, there is no vector conversion to int64
        total += np.float64(np.float64(scores[j]) + _BASE).view(np.int64) - _BASE_BITS
    return np.float32(total) / _UNIT  # type: ignore[no-any-return]


@inlined
def attend_part(
    by_text: NDArray[np.int64], number: int, queries: int, out: int, shape: NDArray[np.int64], scale: np.float32,
    softcap: np.float32, scratch: int, like: Any,
) -> None:  # fmt: skip
    """Compute attention for some queries of a key head: (rows, heads, d) to (rows, heads, dv) at addresses.

    `shape` is (6,): layer, heads, kv_heads, d, dv, and window (0: all keys are visible). A softcap of 0 leaves scores
    unchanged.
    """
    layer, heads, kv_heads, d, dv, window = shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]
    text, groups, size = 0, heads // kv_heads, bytes_of(like)
    while number >= _parts_of(by_text, text, heads, kv_heads):
        number -= _parts_of(by_text, text, heads, kv_heads)
        text += 1
    first, rows, seen, places = by_text[text, 0], by_text[text, 1], by_text[text, 2], by_text[text, 3]
    place, h, begin = view_i64(places + 32 * layer, 4), number % kv_heads, number // kv_heads * QUERIES
    keys, values, held = place[0] + size * d * h * place[2], place[1] + size * dv * h * place[2], place[3]
    count = min(QUERIES, groups * rows - begin)
    last = held + (begin + count - 1) // groups + 1
    depths, start, whole = view_i64(by_text[text, 4], rows), 0, held  # keys to read, and those that all queries see
    if window:
        least, most = depths[begin // groups], np.int64(0)
        for row in range(begin // groups, last - held):
            least, most = min(least, depths[row]), max(most, depths[row])
        start = min(max(held + least - window + 1, 0), held) // LANES * LANES
        whole = held if held + most < window else start
    stride = -(-last // LANES) * LANES
    query_bytes = size * d if multiplies_pairs(like) else 4 * d
    asks, mixed, turned = scratch, scratch + 4 * QUERIES * d, scratch + 4 * QUERIES * (d + dv)
    scores = turned + 4 * LANES * d
    for q in range(count):
        head = (first + (begin + q) // groups) * heads + h * groups + (begin + q) % groups
        _copy_query(queries + size * head * d, asks + query_bytes * q, d, like)
    for j in range(start, last, LANES):  # keys after the last row are read but not used
        _transpose(like, keys + size * d * j, size * d, size * d // 64, turned)
        for first_query in range(0, count, _MOST):
            _score(
                like, block_of(_BLOCKS, count - first_query), turned, asks + query_bytes * first_query,
                query_bytes // 64, scores + 4 * (stride * first_query + j), 4 * stride,
            )  # fmt: skip
    for q in range(count):
        row, own = (begin + q) // groups, view_f32(scores + 4 * q * stride, last)
        if softcap:
            _cap(own[start:], scale, softcap)
        _hide(own, start, held, window, row, view_u8(seen + rows * row, rows), depths)
        view_f32(asks + 4 * q, 1)[0] = np.float32(1.0) / _share(own[start:], np.float32(1.0) if softcap else scale)
    for i in range(0, dv, LANES):
        of = values + size * (dv * start + i)
        for first_query in range(0, count, _MOST):
            of_query, to = scores + 4 * (stride * first_query + start), mixed + 4 * (dv * first_query + i)
            _mix(
                like, block_of(_BLOCKS, count - first_query), of_query, 4 * stride, of, size * dv, whole - start,
                last - whole, to, 4 * dv,
            )  # fmt: skip
    for q in range(count):
        head = (first + (begin + q) // groups) * heads + h * groups + (begin + q) % groups
        factor, sums = view_f32(asks + 4 * q, 1)[0], view_f32(mixed + 4 * q * dv, dv)
        result = view_numbers(out + size * head * dv, dv, like)
        for i in range(dv):
            result[i] = narrow(sums[i] * factor, like)
