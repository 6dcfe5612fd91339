"""Numba kernels that turn the cursors of all sources at one node into one distribution over next tokens.

Every source answers in *levels*: an order-k context that has been seen, with the tokens that followed and how often.
Levels of all sources are merged from the longest match to the shortest. Level k takes the share ``λ_k`` of the mass
that longer levels left over and spends it on its own continuations (prediction by partial matching, interpolated).
``λ`` is learned online per cell (source, match length, count, number of distinct continuations) by expectation
maximisation of the likelihood of the emitted tokens, starting from ``n / (n + a·d)``.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.levels import (
    NUMBER,
    context_hashes,
    evidence,
    next_level,
    open_row,
    read_level,
)

LENGTH_BUCKETS, COUNT_BUCKETS, DISTINCT_BUCKETS = 12, 8, 6
NUM_SOURCES = 8
CELLS = NUM_SOURCES * LENGTH_BUCKETS * COUNT_BUCKETS * DISTINCT_BUCKETS
PRIOR_WEIGHT = 6.0
"""Observations that the prior of a cell counts for."""
CELL_MEMORY = 400.0
"""Observations after which a cell forgets as fast as it learns."""
MAX_LEVELS = 24
MAX_CANDIDATES = 160
HASH = 512
MASS_FLOOR = 0.01
"""Mass below which learning stops reading levels."""


@njit(cache=True, nogil=True)
def length_bucket(n: int) -> int:
    """0 … 11 for match lengths 0, 1, 2, 3, 4, 5, 6–7, 8–11, 12–15, 16–23, 24–39, 40 and more."""
    if n <= 5:
        return n
    if n <= 7:
        return 6
    if n <= 11:
        return 7
    if n <= 15:
        return 8
    if n <= 23:
        return 9
    return 10 if n <= 39 else 11


@njit(cache=True, nogil=True)
def count_bucket(n: int) -> int:
    """0 … 7 for counts 1, 2, 3, 4–5, 6–8, 9–16, 17–64, 65 and more."""
    if n <= 3:
        return max(n, 1) - 1
    if n <= 5:
        return 3
    if n <= 8:
        return 4
    if n <= 16:
        return 5
    return 6 if n <= 64 else 7


@njit(cache=True, nogil=True)
def distinct_bucket(n: int) -> int:
    """0 … 5 for 1, 2, 3, 4–5, 6–8, 9 and more distinct continuations."""
    if n <= 3:
        return max(n, 1) - 1
    if n <= 5:
        return 3
    return 4 if n <= 8 else 5


@njit(cache=True, nogil=True)
def cell_of(source: int, length: int, total: int, distinct: int) -> int:
    """Row of the calibration table."""
    c = source * LENGTH_BUCKETS + length_bucket(length)
    return (c * COUNT_BUCKETS + count_bucket(total)) * DISTINCT_BUCKETS + distinct_bucket(distinct)


@njit(cache=True, nogil=True)
def level_weight(cells: NDArray[np.float32], cell: int, prior: float) -> float:
    """Share of the remaining mass that a level takes: learned, shrunk towards its prior."""
    return (cells[cell, 0] + PRIOR_WEIGHT * prior) / (cells[cell, 1] + PRIOR_WEIGHT)


@njit(cache=True, nogil=True)
def recency_weight(cells: NDArray[np.float32], cell: int) -> float:
    """Share of a level that goes to its most recent continuation, whatever its count."""
    return (cells[cell, 2] + 0.15 * PRIOR_WEIGHT) / (cells[cell, 3] + PRIOR_WEIGHT)


@njit(cache=True, nogil=True)
def prior_weight(source: int, length: int, total: int, distinct: int) -> float:
    """Weight of a level before anything was learned: n / (n + a·d), with a falling in the match length."""
    if source == 3:  # recycling: the target's own probabilities
        return 0.75 if length >= 2 else 0.6
    if source == 2:  # prediction: one continuation, trusted by how long it has been right
        return 1.0 - 0.6 / (1.0 + length)
    if length == 0:
        a = 20.0
    elif length <= 1:
        a = 6.0 if source == 0 else 4.0
    elif length == 2:
        a = 2.5
    elif length == 3:
        a = 1.5
    elif length == 4:
        a = 1.0
    else:
        a = max(0.15, 3.5 / length)
    if source > 3:
        a = 3.0 if source == 6 and length < 6 else 1.0  # a similar state says less than the same text
    return total / (total + a * distinct)


@njit(cache=True, nogil=True)
def collect_levels(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    base: int,
    tails: NDArray[np.int32],
    at: int,
    tail_len: int,
    cells: NDArray[np.float32],
    mass_floor: float,
    open_levels: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    levels: NDArray[np.int64],
    weights: NDArray[np.float32],
) -> int:
    """Merge the levels of all sources, longest match first.

    Parameters
    ----------
    table
        (s, ROW) int64 sources.
    cursors, base
        (m, CURSOR) int64; the node's cursors are rows base … base + s - 1. Indices are passed instead of slices, which
        would cost more than the work done with them.
    tails, at, tail_len
        (m, TAIL) int32, the node's row: newest tokens, newest first, and how many are valid.
    cells
        (CELLS, 4) float32 calibration.
    mass_floor
        Levels that would share less than this mass are not read.
    open_levels, hashes
        (s, 2) int64 and (2, TAIL) uint64 scratch.
    levels, weights
        (MAX_LEVELS, 4) int64 and (MAX_LEVELS,) float32, filled: source row, handle, cell, total; weight λ.

    Returns
    -------
    int
        Number of levels.
    """
    rows = len(table)
    context_hashes(tails, at, tail_len, hashes)
    for s in range(rows):
        open_levels[s, 0], open_levels[s, 1] = open_row(table, s, cursors, base + s, hashes, tail_len)
    n = 0
    mass = 1.0
    while n < MAX_LEVELS and mass > mass_floor:
        best = -1
        length = np.int64(-1)
        for s in range(rows):
            if open_levels[s, 1] > length:
                best = s
                length = open_levels[s, 1]
        if best < 0:
            break
        handle = open_levels[best, 0]
        total, distinct = evidence(table, best, cursors, base + best, handle)
        source = table[best, NUMBER]
        cell = cell_of(source, length, total, distinct)
        weight = level_weight(cells, cell, prior_weight(source, length, total, distinct))
        levels[n, 0] = best
        levels[n, 1] = handle
        levels[n, 2] = cell
        levels[n, 3] = total
        weights[n] = weight
        mass *= 1.0 - weight
        n += 1
        open_levels[best, 0], open_levels[best, 1] = next_level(table, best, handle, length, hashes)
    return n


@njit(cache=True, nogil=True)
def blend(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    base: int,
    cells: NDArray[np.float32],
    levels: NDArray[np.int64],
    weights: NDArray[np.float32],
    num_levels: int,
    floor: float,
    slots: NDArray[np.int64],
    stamp: int,
    read_tokens: NDArray[np.int32],
    read_counts: NDArray[np.int32],
    read_p: NDArray[np.float32],
    share: NDArray[np.float32],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    credit: NDArray[np.int64],
) -> int:
    """Spend the mass of all levels on their continuations.

    Parameters
    ----------
    floor
        Shares below this probability are left out.
    slots, stamp
        (HASH,) int64 scratch and a number not used with it before: token → candidate without clearing.
    read_tokens, read_counts, read_p, share
        (READ_LIMIT,) int32, int32, float32 and (MAX_CANDIDATES,) float32 scratch.
    tokens, probs, credit
        (MAX_CANDIDATES,) outputs: candidates, their probabilities, and the source row that gave the largest share.

    Returns
    -------
    int
        Number of candidates, in no particular but deterministic order.
    """
    n = 0
    mass = 1.0
    for level in range(num_levels):
        row = levels[level, 0]
        recency = recency_weight(cells, levels[level, 2])
        m = read_level(
            table,
            row,
            cursors,
            base + row,
            levels[level, 1],
            levels[level, 3],
            recency,
            read_tokens,
            read_counts,
            read_p,
        )
        spend = mass * weights[level]
        mass -= spend
        for i in range(m):
            p = spend * read_p[i]
            if p < floor:
                continue
            h = (np.int64(read_tokens[i]) * 0x9E3779B1 >> 7) & (HASH - 1)
            while True:
                entry = slots[h]
                if entry >> 16 != stamp:
                    break
                if tokens[entry & 0xFFFF] == read_tokens[i]:
                    break
                h = (h + 1) & (HASH - 1)
            if entry >> 16 == stamp:
                c = entry & 0xFFFF
                probs[c] += p
                if p > share[c]:
                    share[c] = p
                    credit[c] = row
            elif n < MAX_CANDIDATES:
                slots[h] = (np.int64(stamp) << 16) | n
                tokens[n] = read_tokens[i]
                probs[n] = p
                share[n] = p
                credit[n] = row
                n += 1
    return n
