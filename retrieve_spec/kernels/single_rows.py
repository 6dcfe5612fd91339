"""Attention of texts that draft nothing: one row of each of many texts, each over its own preallocated keys and values.

One call per layer serves all of them on a CPU, so that such a text costs a pass no call of its own. Texts with one
prompt read its keys and values at one place: what one of them has brought near, the next finds there. Where several
threads compute, each takes a few texts and one head of keys at a time: what a text is given does not depend on whom.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cfunc, config, njit
from numpy.typing import NDArray

from retrieve_spec.kernels.views import take_ticket, view_f32, view_f32_cube, view_f64, view_i64, view_i64_rows
from retrieve_spec.openmp import run_in_threads, threads_of_torch

_TOGETHER = 8
"""Texts that a thread takes at once, at most."""
_ALONE = 1 << 18
"""Products of numbers for which one thread takes as long as others take to join it."""
_FAST = {"reassoc", "contract", "nsz", "arcp"}


@njit(cache=True, nogil=True, fastmath=_FAST)
def _score(
    asks: NDArray[np.float32],
    keys: NDArray[np.float32],
    first: int,
    last: int,
    weights: NDArray[np.float32],
    scale: float,
    softcap: float,
    top: np.float32,
) -> np.float32:
    """Score keys `first … last - 1`, d numbers each, into `weights`; the highest score, or `top`."""
    d = len(asks)
    factor, cap = np.float32(scale), np.float32(softcap)
    whole = first + (last - first) // 4 * 4
    for j in range(first, whole, 4):  # four at a time, since each sum waits for itself
        at = j * d
        k0, k1, k2, k3 = (
            keys[at : at + d],
            keys[at + d : at + 2 * d],
            keys[at + 2 * d : at + 3 * d],
            keys[at + 3 * d : at + 4 * d],
        )
        a = b = c = e = np.float32(0.0)
        for i in range(d):
            ask = asks[i]
            a += ask * k0[i]
            b += ask * k1[i]
            c += ask * k2[i]
            e += ask * k3[i]
        weights[j], weights[j + 1], weights[j + 2], weights[j + 3] = a, b, c, e
    for j in range(whole, last):
        score = np.float32(0.0)
        for i in range(d):
            score += asks[i] * keys[j * d + i]
        weights[j] = score
    for j in range(first, last):
        weights[j] *= factor
    if cap:
        for j in range(first, last):
            weights[j] = cap * np.float32(math.tanh(weights[j] / cap))
    for j in range(first, last):
        top = max(top, weights[j])
    return top


@njit(cache=True, nogil=True, fastmath=_FAST)
def _mix(
    part: NDArray[np.float32],
    values: NDArray[np.float32],
    first: int,
    last: int,
    weights: NDArray[np.float32],
    total: np.float32,
) -> None:
    """Add values `first … last - 1`, dv numbers each, by their share of the weights."""
    dv = len(part)
    share = np.float32(1.0) / total
    whole = first + (last - first) // 4 * 4
    for j in range(first, whole, 4):
        at = j * dv
        v0, v1, v2, v3 = (
            values[at : at + dv],
            values[at + dv : at + 2 * dv],
            values[at + 2 * dv : at + 3 * dv],
            values[at + 3 * dv : at + 4 * dv],
        )
        a, b, c, e = weights[j] * share, weights[j + 1] * share, weights[j + 2] * share, weights[j + 3] * share
        for i in range(dv):
            part[i] += a * v0[i] + b * v1[i] + c * v2[i] + e * v3[i]
    for j in range(whole, last):
        weight = weights[j] * share
        for i in range(dv):
            part[i] += weight * values[j * dv + i]


_NUMBERS = 20


@njit(cache=True, nogil=True, fastmath=_FAST)
def _attend(address: int) -> None:
    """Attend texts, one head of keys at a time, until all is taken; `address` is that of the numbers of `_laid_out`."""
    numbers = view_i64(address, _NUMBERS)
    texts, together, heads, kv_heads, width, d, dv, most = numbers[2:10]
    query, keys = view_f32_cube(numbers[10], heads, width, d), view_f32_cube(numbers[11], kv_heads, width, d)
    values, out = view_f32_cube(numbers[12], kv_heads, width, dv), view_f32_cube(numbers[13], width, heads, dv)
    rows, places = view_i64(numbers[14], texts), view_i64_rows(numbers[15], texts, 4)
    prefixes, window = view_i64_rows(numbers[16], texts, 3), numbers[17]
    scale, softcap = view_f64(numbers[18], 2)
    weights = view_f32(numbers[19] + 4 * most * take_ticket(address), most)
    groups, parts = heads // kv_heads, -(-texts // together)
    while True:
        taken = take_ticket(address + 8)
        if taken >= parts * kv_heads:
            return
        h, begin = taken % kv_heads, taken // kv_heads * together
        for text in range(begin, min(begin + together, texts)):
            row, capacity, held, common = rows[text], places[text, 2], places[text, 3], prefixes[text, 2]
            first = max(held - window + 1, 0) if window else 0
            between = max(min(common, held), first)
            own_keys = view_f32(places[text, 0] + 4 * h * capacity * d, capacity * d)
            own_values = view_f32(places[text, 1] + 4 * h * capacity * dv, capacity * dv)
            common_keys = view_f32(prefixes[text, 0] + 4 * h * common * d, common * d)
            common_values = view_f32(prefixes[text, 1] + 4 * h * common * dv, common * dv)
            for i in range(d):
                own_keys[held * d + i] = keys[h, row, i]
            for i in range(dv):
                own_values[held * dv + i] = values[h, row, i]
            for head in range(h * groups, (h + 1) * groups):
                asks, part = query[head, row], out[row, head]
                top = _score(asks, common_keys, first, between, weights, scale, softcap, np.float32(-np.inf))
                top = _score(asks, own_keys, between, held + 1, weights, scale, softcap, top)
                total = np.float32(0.0)
                for j in range(first, held + 1):
                    weights[j] = math.exp(weights[j] - top)
                    total += weights[j]
                part[:] = 0.0
                _mix(part, common_values, first, between, weights, total)
                _mix(part, own_values, between, held + 1, weights, total)


@functools.cache
def _in_c() -> Any:
    """`_attend` as a C function."""

    @cfunc("void(int64)", cache=True)
    def attend(address: int) -> None:
        _attend(address)

    return attend


def attend_single_rows(
    query: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    prefixes: NDArray[np.int64],
    scale: float,
    softcap: float,
    window: int,
    out: NDArray[np.float32],
) -> None:
    """Write one row of each text behind the rows it holds, and let it attend to these and itself.

    Parameters
    ----------
    query
        (heads, all, d) of the pass.
    keys, values
        (kv_heads, all, d) and (kv_heads, all, dv) of the pass.
    rows
        (texts,) which row of the pass is the text's.
    places
        (texts, 4): addresses of the layer's keys (kv_heads, capacity, d) and values (kv_heads, capacity, dv), capacity,
        and rows held there.
    prefixes
        (texts, 3): addresses of keys (kv_heads, n, d) and values (kv_heads, n, dv) of the first n rows that a text has
        in common with others, equal to its own, and n; 0 where it has none. Such texts stand side by side.
    scale, softcap, window
        As in `attention.tree_attention.LayerRule`.
    out
        (all, heads, dv), filled where texts have their rows.
    """
    heads, width, d = query.shape
    work = int(places[:, 3].sum()) * heads * d
    threads = threads_of_torch() if work >= _ALONE and not config.DISABLE_JIT else 1
    weights = np.empty((threads, 1 + int(places[:, 3].max(initial=0))), np.float32)
    rule = np.array([scale, softcap], np.float64)
    arrays = (query, keys, values, out, rows, places, prefixes)
    assert all(array.flags.c_contiguous for array in arrays)
    at = [array.ctypes.data for array in arrays]
    together = min(max(len(rows) * len(keys) // (2 * threads), 1), _TOGETHER)
    sizes = (len(rows), together, heads, len(keys), width, d, values.shape[2], weights.shape[1])
    numbers = np.array([0, 0, *sizes, *at, window, rule.ctypes.data, weights.ctypes.data], np.int64)
    if config.DISABLE_JIT:
        _attend(numbers.ctypes.data)
    else:  # the same code for any number of threads: nothing is compiled when that changes
        run_in_threads(_in_c(), numbers, threads)
