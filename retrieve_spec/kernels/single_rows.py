"""Attention of texts that draft nothing: one row of each of many texts, each over its own preallocated keys and values.

One call per layer serves all of them on a CPU, so that such a text costs a pass no call of its own. Texts with one
prompt read its keys and values at one place: what one of them has brought near, the next finds there.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.views import view_f32

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


@njit(cache=True, nogil=True, fastmath=_FAST)
def attend_single_rows(
    query: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    prefixes: NDArray[np.int64],
    weights: NDArray[np.float32],
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
    weights
        (most keys,) to work in.
    scale, softcap, window
        As in `attention.online_softmax.LayerRule`.
    out
        (all, heads, dv), filled where texts have their rows.
    """
    heads, _, d = query.shape
    kv_heads, dv = len(keys), values.shape[2]
    groups = heads // kv_heads
    begin, texts = 0, len(rows)
    while begin < texts:
        end = begin + 1
        while end < texts and prefixes[begin, 2] and prefixes[end, 0] == prefixes[begin, 0]:
            end += 1
        for h in range(kv_heads):
            for text in range(begin, end):
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
        begin = end
