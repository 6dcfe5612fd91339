"""Numba kernels of the recycling table: contexts of the last 1–3 tokens to the target's top tokens, averaged.

Set-associative cache of ``capacity`` = sets · WAYS entries, those of a set side by side: ``keys`` (capacity,) uint64
(0: free), ``info`` (capacity, 2) int64 (observations, last use), ``tokens`` (capacity, k) int32 (-1 behind the last)
and ``probs`` (capacity, k) float32, most probable first. Memory is bounded by construction: a full set forgets its
least observed entry.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.views import borrowed

WAYS = 4
ORDERS = 3


@njit(cache=True, nogil=True)
def mix(h: np.uint64, token: int) -> np.uint64:
    """Hash of a context extended by the next older token."""
    h = (h ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(31)
    return h * np.uint64(0xD6E8FEB86659FD93) | np.uint64(1)


@njit(cache=True, nogil=True)
def find(keys: NDArray[np.uint64], key: np.uint64) -> int:
    """Entry of a context, or -1."""
    num_sets = keys.shape[0] // WAYS
    base = np.int64((key >> np.uint64(20)) & np.uint64(num_sets - 1)) * WAYS
    for way in range(WAYS):
        if keys[base + way] == key:
            return base + way
    return -1


@njit(cache=True, nogil=True)
def _claim(keys: NDArray[np.uint64], info: NDArray[np.int64], key: np.uint64) -> int:
    """Entry of a context; a new one replaces the set's least observed, then least recently used entry."""
    num_sets = keys.shape[0] // WAYS
    base = np.int64((key >> np.uint64(20)) & np.uint64(num_sets - 1)) * WAYS
    victim = base
    for way in range(WAYS):
        e = base + way
        if keys[e] == key:
            return e
        if keys[e] == 0:
            victim = e
            break
        older = info[e, 0] == info[victim, 0] and info[e, 1] < info[victim, 1]
        if info[e, 0] < info[victim, 0] or older:
            victim = e
    keys[victim] = key
    info[victim, 0] = 0
    return victim


@njit(cache=True, nogil=True)
def _average(
    seen: int,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    new_ids: NDArray[np.int32],
    new_p: NDArray[np.float32],
) -> None:
    """Move the entry's probabilities towards the new ones by 1 / (seen + 1), at least 1/4; keep the k largest."""
    k = len(tokens)
    rate = 1.0 if seen == 0 else max(np.float32(1.0 / (seen + 1)), np.float32(0.25))
    union_ids = np.empty(2 * k, np.int32)
    union_p = np.empty(2 * k, np.float32)
    n = 0
    if seen > 0:
        for i in range(k):
            if tokens[i] >= 0:
                union_ids[n] = tokens[i]
                union_p[n] = (1 - rate) * probs[i]
                n += 1
    old = n
    for j in range(len(new_ids)):
        at = -1
        for i in range(old):
            if union_ids[i] == new_ids[j]:
                at = i
                break
        if at >= 0:
            union_p[at] += rate * new_p[j]
        elif n < 2 * k:
            union_ids[n] = new_ids[j]
            union_p[n] = rate * new_p[j]
            n += 1
    for i in range(k):
        best = -1
        for j in range(n):
            lower_id = best >= 0 and union_p[j] == union_p[best] and union_ids[j] < union_ids[best]
            if union_p[j] > 0 and (best < 0 or union_p[j] > union_p[best] or lower_id):
                best = j
        if best < 0:
            tokens[i] = -1
            probs[i] = 0
        else:
            tokens[i] = union_ids[best]
            probs[i] = union_p[best]
            union_p[best] = -1


@njit(cache=True, nogil=True)
def learn(
    keys: NDArray[np.uint64],
    info: NDArray[np.int64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    tail: NDArray[np.int32],
    tail_len: int,
    top_ids: NDArray[np.int32],
    top_p: NDArray[np.float32],
    clock: int,
) -> None:
    """Remember the target's top tokens after a context whose newest token is ``tail[0]``."""
    h = np.uint64(0)
    for order in range(min(ORDERS, tail_len)):
        h = mix(h, tail[order])
        e = _claim(keys, info, h)
        _average(info[e, 0], tokens[e], probs[e], top_ids, top_p)
        info[e, 0] += 1
        info[e, 1] = clock


@njit(cache=True, nogil=True)
def softmax(logits: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Probabilities among the top tokens alone (the tail is left out; calibration accounts for it)."""
    top = logits[0]
    total = np.float32(0)
    for i in range(len(logits)):
        out[i] = np.exp(logits[i] - top)
        total += out[i]
    for i in range(len(logits)):
        out[i] /= total


@njit(cache=True, nogil=True)
def learn_rows(
    keys: NDArray[np.uint64],
    info: NDArray[np.int64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    tails: NDArray[np.int32],
    tail_lens: NDArray[np.int32],
    ids: NDArray[np.int32],
    logits: NDArray[np.float32],
    clock: int,
) -> None:
    """`learn` for the contexts and top tokens of all visited nodes."""
    keys, info, tokens, probs = borrowed(keys), borrowed(info), borrowed(tokens), borrowed(probs)
    p = np.empty(ids.shape[1], np.float32)
    for i in range(len(ids)):
        softmax(logits[i, : ids.shape[1]], p)
        learn(keys, info, tokens, probs, tails[i], tail_lens[i], ids[i], p, clock)
