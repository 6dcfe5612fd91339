"""Attention of texts that draft nothing: one row of each of many texts, each over its own preallocated keys and values.

One call per layer serves all of them on a CPU, so that such a text costs a pass no call of its own.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.views import view_f32


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
def attend_single_rows(
    query: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
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
    for text in range(len(rows)):
        row, capacity, held = rows[text], places[text, 2], places[text, 3]
        first = max(held - window + 1, 0) if window else 0
        for h in range(kv_heads):
            own_keys = view_f32(places[text, 0] + 4 * h * capacity * d, capacity * d)
            own_values = view_f32(places[text, 1] + 4 * h * capacity * dv, capacity * dv)
            for i in range(d):
                own_keys[held * d + i] = keys[h, row, i]
            for i in range(dv):
                own_values[held * dv + i] = values[h, row, i]
            for head in range(h * groups, (h + 1) * groups):
                asks, part = query[head, row], out[row, head]
                top = np.float32(-np.inf)
                for j in range(first, held + 1):
                    key = own_keys[j * d : (j + 1) * d]
                    score = np.float32(0.0)
                    for i in range(d):
                        score += asks[i] * key[i]
                    score *= np.float32(scale)
                    if softcap:
                        score = np.float32(softcap) * np.float32(math.tanh(score / np.float32(softcap)))
                    weights[j] = score
                    top = max(top, score)
                total = np.float32(0.0)
                for j in range(first, held + 1):
                    weights[j] = math.exp(weights[j] - top)
                    total += weights[j]
                part[:] = 0.0
                for j in range(first, held + 1):
                    weight, value = weights[j] / total, own_values[j * dv : (j + 1) * dv]
                    for i in range(dv):
                        part[i] += weight * value[i]
