"""Numba kernels of the sampler: draw a token from a processed row of logits (Gumbel-max, counter-based noise)."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, inner_with_arrays, kernel, kernel_with_arrays
from retrieve_spec.kernels.topk import BLOCK, block_maxima, collect_at_least, row_topk
from retrieve_spec.kernels.vector_math import REASSOCIATE, exp, largest


@inner
def mix(x: np.uint64) -> np.uint64:
    """Scramble 64 bits (the finaliser of splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    x = np.uint64(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(x ^ (x >> np.uint64(31)))


@kernel
def noise_key(seed: int, row: int, position: int) -> np.uint64:
    """Return the key of all noise at one position of one row of one request."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    key = mix(np.uint64(seed) + golden)
    key = mix(key + (np.uint64(row) + np.uint64(1)) * golden)
    return mix(key + (np.uint64(position) + np.uint64(1)) * golden)


@kernel
def noise_bits(key: np.uint64, token_id: int) -> np.uint64:
    """Return the noise of one token under a key, 53 bits."""
    bits = mix(key + (np.uint64(token_id) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return np.uint64(bits >> np.uint64(11))


@kernel
def uniform(key: np.uint64, token_id: int) -> float:
    """Return the noise of one token under a key, uniform in (0, 1)."""
    return (np.float64(noise_bits(key, token_id)) + 0.5) * (1.0 / 9007199254740992.0)


@kernel
def gumbel_argmax(
    ids: NDArray[np.int32], scores: NDArray[np.float64], count: int, seed: int, row: int, position: int
) -> int:
    """Draw one of `ids[:count]` with probability softmax(`scores[:count]`): largest score plus Gumbel noise."""
    key = noise_key(seed, row, position)
    best = ids[0]
    best_score = -np.inf
    for i in range(count):
        score = scores[i] - np.log(-np.log(uniform(key, ids[i])))
        if score > best_score:
            best_score = score
            best = ids[i]
    return int(best)


@kernel
def _least_bits(gap: float) -> np.uint64:
    """Return the smallest noise (53 bits) with which a token can win from ``gap`` below the best score so far.

    It wins when its uniform number is above exp(-exp(-gap)) >= 1 - exp(-gap).
    """
    if not gap > 0.0:  # above it, or NaN
        return np.uint64(0)
    return np.uint64(max((1.0 - np.exp(-gap) * (1.0 + 1e-9)) * 9007199254740992.0 - 2.0, 0.0))


@kernel
def gumbel_argmax_row(logits: NDArray[np.float32], temperature: float, seed: int, row: int, position: int) -> int:
    """Draw an index of `logits` (v,) with probability softmax(logits / temperature).

    -inf and NaN are never drawn, except for index 0 if there is nothing else.

    Most tokens cannot win against the most probable one with their noise; they take a hash, but no logarithm.
    """
    key = noise_key(seed, row, position)
    heat = np.float32(temperature)
    size = int(logits.shape[0])
    best = 0
    for i in range(1, size):
        if logits[i] > logits[best]:
            best = i
    best_score = np.float64(logits[best] / heat) - np.log(-np.log(uniform(key, best)))
    if np.isnan(best_score):
        best_score = -np.inf
    for first in range(0, size, BLOCK):
        end = min(first + BLOCK, size)
        highest = logits[first]
        for i in range(first, end):
            highest = max(highest, logits[i])
        least = _least_bits(best_score - np.float64(highest / heat))
        able = 0
        for i in range(first, end):  # without a branch: several at a time
            able += 1 if noise_bits(key, i) >= least else 0
        if able == 0 or highest == -np.inf:
            continue
        for i in range(first, end):
            scaled = np.float64(logits[i] / heat)
            if scaled == -np.inf or noise_bits(key, i) < least:
                continue
            score = scaled - np.log(-np.log(uniform(key, i)))
            if score > best_score or (score == best_score and i < best):
                best_score = score
                best = i
    return best


@inner_with_arrays
def _highest(logits: NDArray[np.float32]) -> np.float32:
    """Return the highest logit; -inf if the logits are no distribution: a NaN, an infinity, or all -inf."""
    undrawable = False
    for i in range(logits.shape[0]):  # without a branch: several at a time
        undrawable |= not logits[i] < np.inf
    return np.float32(-np.inf) if undrawable else largest(logits)


@kernel
def draw_row(logits: NDArray[np.float32], temperature: float, seed: int, row: int, position: int) -> int:
    """Do `gumbel_argmax_row`; return -1 if the logits are no distribution: a NaN, an infinity, or all -inf."""
    return gumbel_argmax_row(logits, temperature, seed, row, position) if _highest(logits) > -np.inf else -1


@njit(cache=True, nogil=True, fastmath=REASSOCIATE, error_model="numpy")  # checked divisions are not vectorised
def _mass(logits: NDArray[np.float32], heat: np.float32, top: np.float32) -> np.float32:
    """Return the sum of exp(logits / heat - top)."""
    total = np.float32(0.0)
    for i in range(len(logits)):
        total += exp(logits[i] / heat - top)
    return total


@inner_with_arrays
def _nucleus(
    row: NDArray[np.float32],
    maxima: NDArray[np.float32],
    heat: np.float32,
    top_p: float,
    ids: NDArray[np.int32],
    top: float,
) -> int:
    """Write the smallest set of most probable tokens of `row` that reaches `top_p` to `ids`; return how many.

    The probability of all tokens is a sum in float32, as in `transformers`; `maxima` are those of `row_topk`.
    """
    v = int(row.shape[0])
    total = 0.0
    for first in range(0, v, BLOCK):
        total += np.float64(_mass(row[first : first + BLOCK], heat, np.float32(top)))
    k = min(64, v)
    while True:
        best_ids = np.empty((1, k), np.int32)
        best = np.empty((1, k), np.float32)
        row_topk(row.reshape(1, v), maxima, best_ids, best)
        before = 0.0
        for i in range(k):
            ids[i] = best_ids[0, i]
            before += np.exp(np.float64(best[0, i] / heat) - top) / total
            if before >= top_p:
                return i + 1
        if k == v:
            return v
        if k >= 1024:
            break
        k = min(k * 4, v)
    order = np.argsort(-row, kind="mergesort")  # equal values by id
    before = 0.0
    for i in range(v):
        ids[i] = order[i]
        before += np.exp(np.float64(row[order[i]] / heat) - top) / total
        if before >= top_p:
            return i + 1
    return v


@kernel_with_arrays
def truncate_row(
    row: NDArray[np.float32],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    ids: NDArray[np.int32],
    scores: NDArray[np.float64],
) -> int:
    """Apply temperature, top-k, top-p and min-p in that order to `row` (v,).

    Writes the remaining tokens to `ids` and their scaled logits to `scores`, both of length >= v, and returns how many
    remain: none if the logits are no distribution (a NaN, an infinity, or all -inf). `top_k` 0, `top_p` 1 and `min_p` 0
    disable a rule; ties at the k-th place all remain.
    """
    highest = _highest(row)
    if highest == -np.inf:
        return 0
    v = int(row.shape[0])
    maxima = block_maxima(row).reshape(1, v // BLOCK)
    heat = np.float32(temperature)
    top = np.float64(highest / heat)
    count = v
    if 0 < top_k < v:
        best_ids = np.empty((1, top_k), np.int32)
        best = np.empty((1, top_k), np.float32)
        row_topk(row.reshape(1, v), maxima, best_ids, best)
        count = collect_at_least(row, np.float64(best[0, top_k - 1]), ids)
        order = np.argsort(-row[ids[:count]], kind="mergesort")
        chosen = ids[:count].copy()
        for i in range(count):
            ids[i] = chosen[order[i]]
    if top_p < 1.0:
        if count < v:
            total = 0.0
            for i in range(count):
                total += np.exp(np.float64(row[ids[i]] / heat) - top)
            before = 0.0
            for i in range(count):
                before += np.exp(np.float64(row[ids[i]] / heat) - top) / total
                if before >= top_p:
                    count = i + 1
                    break
        else:
            count = _nucleus(row, maxima, heat, top_p, ids, top)
    elif count == v:
        floor = -np.inf if min_p <= 0.0 else (top + np.log(min_p)) * temperature
        floor -= np.abs(floor) * 1e-6  # rounded, it may be above the highest logit; the rule itself follows
        count = collect_at_least(row, floor, ids)
    kept = 0
    for i in range(count):
        scaled = np.float64(row[ids[i]] / heat)
        if min_p <= 0.0 or scaled - top >= np.log(min_p):
            ids[kept] = ids[i]
            scores[kept] = scaled
            kept += 1
    return kept
