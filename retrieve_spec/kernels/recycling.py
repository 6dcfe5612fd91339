"""Numba kernels of the recycling table: the target's averaged top tokens after contexts of one to three tokens.

A fourth context is a skip-gram, the last token but one whatever followed it: after a new token, the best guess is what
the target said after others in its place.

It is a set-associative cache of ``capacity`` = sets · WAYS entries. A pass of the model evicts it from the processor's
caches, so data that is read together is stored together: a look-up reads one line of ``sets`` and, for k = 8, one of
``entries``.

``sets`` (capacity · 2,) uint64, `SET` words per set: the keys of its entries (0: free), then a word for each with its
number of observations (low half) and the time of the last (high half). ``entries`` (capacity, 2k) int32: tokens, most
probable first (-1 after the last), then the bits of their float32 probabilities; `MOST` words can be read after the
last entry. Memory is bounded by construction: a full set drops its least observed entry.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inlined, inner, kernel
from retrieve_spec.kernels.views import (
    index_among_eight,
    prefetch,
    view_f32,
    view_i32,
    view_i64_rows,
    view_u64_rows,
)

WAYS = 4
ORDERS = 3
CONTEXTS = ORDERS + 1
"""Most contexts of a row: its last 1 … `ORDERS` tokens, and its skip-gram."""
_SKIP = np.uint64(1 << 32)
"""Start of a skip-gram's hash, larger than any token."""
NO_CONTEXT = np.uint64(2)
"""Not the hash of any context; those are odd."""
SET = 2 * WAYS
"""Words per set."""
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_TOGETHER = 64
"""Number of rows learned together, whose sets and entries fit into the first-level cache."""
MOST = 8
"""Most tokens of an entry: as many as are compared at once."""
_MIXED = (3 * MOST + 2) // 2
MEMORY = 1 + _MIXED + 3 * _TOGETHER * CONTEXTS
"""Words of `learn_rows`' memory: a counter, an entry that is averaged, and rows."""


@kernel
def mix(h: np.uint64, token: int) -> np.uint64:
    """Extend a context's hash by the next older token."""
    h = (h ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
    h ^= h >> np.uint64(31)
    return h * np.uint64(0xD6E8FEB86659FD93) | np.uint64(1)


@inner
def skipping(token: int) -> np.uint64:
    """Return the hash of the skip-gram after a token."""
    return mix(_SKIP, token)


@inner
def _num_contexts(length: int) -> int:
    """Return the number of contexts of a row with so many tokens."""
    return min(ORDERS, length) + (1 if length > 1 else 0)


@inner
def _hash_contexts(tails: NDArray[np.int32], row: int, length: int, keys: NDArray[np.uint64], at: int) -> None:
    """Write the hashes of a row's contexts to ``keys[at]``."""
    h = np.uint64(0)
    n = min(ORDERS, length)
    for order in range(n):
        h = mix(h, tails[row, order])
        keys[at, order] = h
    if length > 1:
        keys[at, n] = skipping(tails[row, 1])


@kernel
def context_keys(tokens: NDArray[np.int32], places: NDArray[np.int64], keys: NDArray[np.uint64]) -> None:
    """Write the hashes of the contexts that end at each token: of one, two, … tokens, and the skip-gram.

    Parameters
    ----------
    tokens, places
        (n,) int32 tokens of concatenated texts, and (n,) int64 indices of the tokens in their texts.
    keys
        (CONTEXTS, n) uint64 output; 0 where a text has fewer tokens.
    """
    for i in range(len(tokens)):
        h = np.uint64(0)
        for order in range(ORDERS):
            if order <= places[i]:
                h = mix(h, tokens[i - order])
                keys[order, i] = h
            else:
                keys[order, i] = 0
        keys[ORDERS, i] = skipping(tokens[i - 1]) if places[i] > 0 else np.uint64(0)


@inner
def home(sets: NDArray[np.uint64], key: np.uint64) -> int:
    """Return the set of a context."""
    return np.int64((key >> np.uint64(20)) & np.uint64(len(sets) // SET - 1))


@kernel
def find(sets: NDArray[np.uint64], key: np.uint64) -> int:
    """Return the entry of a context, or -1."""
    s = home(sets, key)
    for way in range(WAYS):
        if sets[s * SET + way] == key:
            return s * WAYS + way
    return -1


@inner
def prefetch_contexts(sets: NDArray[np.uint64], tails: NDArray[np.int32], row: int) -> None:
    """Prefetch the sets of the contexts in a row of tails."""
    h = np.uint64(0)
    for order in range(ORDERS):
        h = mix(h, tails[row, order])
        prefetch(np.int64(sets.ctypes.data) + 8 * SET * home(sets, h))
    prefetch(np.int64(sets.ctypes.data) + 8 * SET * home(sets, skipping(tails[row, 1])))


@inner
def seen(sets: NDArray[np.uint64], entry: int) -> int:
    """Return how often an entry was observed."""
    return np.int64(sets[(entry // WAYS) * SET + WAYS + entry % WAYS] & _LOW)


@inner
def claim(sets: NDArray[np.uint64], key: np.uint64) -> int:
    """Return the entry of a context; a new context replaces the set's least observed, then least recent entry."""
    first = home(sets, key) * SET
    victim = 0
    for way in range(WAYS):
        if sets[first + way] == key:
            return first // SET * WAYS + way
        if sets[first + way] == 0:
            victim = way
            break
        here, least = sets[first + WAYS + way], sets[first + WAYS + victim]
        older = here & _LOW == least & _LOW and here >> _HALF < least >> _HALF
        if here & _LOW < least & _LOW or older:
            victim = way
    sets[first + victim] = key
    sets[first + WAYS + victim] = 0
    return first // SET * WAYS + victim


@inner
def _put(ids: NDArray[np.int32], p: NDArray[np.float32], n: int, k: int, token: int, chance: float) -> int:
    """Insert a token into a list of at most k, by probability, then lower id; return the new length."""
    if chance <= 0 or (n == k and (p[k - 1] > chance or (p[k - 1] == chance and ids[k - 1] < token))):
        return n
    at = n if n < k else k - 1
    while at > 0 and (p[at - 1] < chance or (p[at - 1] == chance and ids[at - 1] > token)):
        ids[at] = ids[at - 1]
        p[at] = p[at - 1]
        at -= 1
    ids[at] = token
    p[at] = chance
    return n + 1 if n < k else k


@inlined
def _average(
    times: int,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    new_ids: NDArray[np.int32],
    row: int,
    new_p: NDArray[np.float32],
    falling: bool,
    scratch_ids: NDArray[np.int32],
    scratch_p: NDArray[np.float32],
) -> None:
    """Move an entry's probabilities towards new ones by 1 / (times + 1), at least 1/4; keep the k largest.

    If the new ones are ``falling`` (strictly decreasing and positive), a new entry needs no sorting.
    """
    k, width = len(tokens), len(new_p)
    if times == 0 and falling:
        for i in range(width):
            tokens[i], probs[i] = new_ids[row, i], new_p[i]
        for i in range(width, k):
            tokens[i], probs[i] = -1, 0
        return
    rate = max(1.0 / (times + 1), 0.25)
    old = 0
    if times > 0:
        while old < k and tokens[old] >= 0:
            scratch_ids[old] = tokens[old]
            scratch_p[old] = (1.0 - rate) * np.float64(probs[old])
            old += 1
    fresh = np.int64(0)  # bit j: the entry lacks new token j, whose share is written to an unused place
    for j in range(width):
        at = index_among_eight(np.int64(tokens.ctypes.data), new_ids[row, j])  # later words belong to others
        at = at if at < old else MOST
        scratch_p[at] = np.float64(scratch_p[at]) + rate * np.float64(new_p[j])
        fresh |= np.int64(at == MOST) << j
    n = np.int64(0)
    for i in range(old):  # first, since they are almost sorted
        n = _put(tokens, probs, n, k, scratch_ids[i], scratch_p[i])
    for j in range(width):
        if fresh >> j & 1:
            n = _put(tokens, probs, n, k, new_ids[row, j], np.float32(rate * np.float64(new_p[j])))
    for i in range(n, k):
        tokens[i] = -1
        probs[i] = 0


@inlined
def softmax(logits: NDArray[np.float32], row: int, out: NDArray[np.float32]) -> None:
    """Write the softmax over a row's top tokens only; calibration accounts for the missing tail."""
    top = np.float64(logits[row, 0])
    total = 0.0
    for i in range(len(out)):
        out[i] = np.exp(np.float64(logits[row, i]) - top)
        total += np.float64(out[i])
    for i in range(len(out)):
        out[i] = np.float64(out[i]) / total


@kernel
def learn_rows(
    sets: NDArray[np.uint64],
    entries: NDArray[np.int32],
    tails: NDArray[np.int32],
    tail_lens: NDArray[np.int32],
    ids: NDArray[np.int32],
    logits: NDArray[np.float32],
    memory: NDArray[np.int64],
) -> None:
    """Store the target's top tokens after the contexts of all verified nodes.

    Every step is done for many rows before the next step, so that memory is prefetched early.

    Parameters
    ----------
    tails, tail_lens
        (m, ≥ 3) int32 newest tokens of each context, newest first, and (m,) their valid numbers.
    ids, logits
        (m, ≥ 1) int32 top tokens, most probable first, and float32 raw logits; k are stored.
    memory
        (MEMORY,) int64: number of calls, then scratch.
    """
    memory[0] += 1
    k = entries.shape[1] // 2
    width = min(k, ids.shape[1])
    at = np.int64(memory.ctypes.data) + 8
    scratch_ids, p, scratch_p = view_i32(at, MOST), view_f32(at + 4 * MOST, width), view_f32(at + 8 * MOST, MOST + 1)
    at += 8 * _MIXED
    keys = view_u64_rows(at, _TOGETHER, CONTEXTS)
    known = view_i64_rows(at + 8 * _TOGETHER * CONTEXTS, _TOGETHER, CONTEXTS)
    times = view_i64_rows(at + 16 * _TOGETHER * CONTEXTS, _TOGETHER, CONTEXTS)
    at_sets, at_entries = np.int64(sets.ctypes.data), np.int64(entries.ctypes.data)
    for first in range(0, len(ids), _TOGETHER):
        rows = min(_TOGETHER, len(ids) - first)
        for i in range(rows):
            _hash_contexts(tails, first + i, tail_lens[first + i], keys, i)
            for j in range(_num_contexts(tail_lens[first + i])):
                prefetch(at_sets + 8 * SET * home(sets, keys[i, j]))
        for i in range(rows):
            for j in range(_num_contexts(tail_lens[first + i])):
                e = claim(sets, keys[i, j])
                known[i, j] = e
                times[i, j] = seen(sets, e)
                note = np.uint64(memory[0]) << _HALF | np.uint64(times[i, j] + 1)
                sets[e // WAYS * SET + WAYS + e % WAYS] = note
                prefetch(at_entries + 8 * k * e)
        for i in range(rows):
            softmax(logits, first + i, p)
            falling = p[width - 1] > 0
            for rank in range(1, width):
                falling &= p[rank] < p[rank - 1]
            for j in range(_num_contexts(tail_lens[first + i])):
                at = at_entries + 8 * k * known[i, j]
                tokens, probs = view_i32(at, k), view_f32(at + 4 * k, k)
                _average(times[i, j], tokens, probs, ids, first + i, p, falling, scratch_ids, scratch_p)
