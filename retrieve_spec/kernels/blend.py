"""Numba kernels that turn the cursors of all sources at one node into one distribution over next tokens.

Every source answers in *levels*: an order-k context that has been seen, with the tokens that followed and how often.
Levels of all sources are merged from the longest match to the shortest. Level k takes the share ``λ_k`` of the mass
that longer levels left over and spends it on its own continuations (prediction by partial matching, interpolated).
`kernels/weights.py` says what ``λ`` is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import recycling
from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.levels import (
    CLOSED,
    evidence,
    look_up,
    next_level,
    open_row,
    read_level,
)
from retrieve_spec.kernels.ngram import MAX_ORDER, ngram_hash
from retrieve_spec.kernels.source_table import NUMBER, READ_LIMIT, TAIL
from retrieve_spec.kernels.unigram import LISTED
from retrieve_spec.kernels.views import borrowed, view_f32, view_i32, view_i64, view_i64_rows, view_u64_rows
from retrieve_spec.kernels.weights import cell_of, level_weight, multiplied, odds_of, prior_weight, recency_weight

MAX_LEVELS = 24
MAX_CANDIDATES = 160
HASH = 512
_LEVELS, _CANDIDATES = 5 * MAX_LEVELS, 3 * MAX_CANDIDATES
"""Words of scratch for levels (4 integers and a weight each) and for candidates (3 words each)."""
_READ = max(READ_LIMIT, LISTED)
"""Continuations that one level can have."""
MASS_FLOOR = 0.01
"""Mass below which learning stops reading levels."""


class Scratch(NamedTuple):
    """Arrays that are written at one node and read before the next.

    Attributes
    ----------
    levels, weights
        (MAX_LEVELS, 4) int64 source row, handle, cell, total; (MAX_LEVELS,) float32 λ, longest match first.
    tokens, probs, credit
        (MAX_CANDIDATES,) int32 candidates, float32 their probabilities, int64 the row that gave the largest share.
    slots
        (HASH,) int64 token → candidate; entries carry the node's stamp, so that nothing is cleared between nodes.
    open_levels, open_rows, hashes, read_tokens, read_counts, read_p, share
        (s, 2) int64, (s,) int64, (2, TAIL) uint64, (_READ,) int32, int32, float32, (MAX_CANDIDATES,) float32.
    """

    levels: NDArray[np.int64]
    weights: NDArray[np.float32]
    tokens: NDArray[np.int32]
    probs: NDArray[np.float32]
    credit: NDArray[np.int64]
    slots: NDArray[np.int64]
    open_levels: NDArray[np.int64]
    open_rows: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    read_tokens: NDArray[np.int32]
    read_counts: NDArray[np.int32]
    read_p: NDArray[np.float32]
    share: NDArray[np.float32]


def scratch_memory(rows: int) -> NDArray[np.int64]:
    """Memory for the scratch of a table of so many sources."""
    return np.zeros(_LEVELS + _CANDIDATES + HASH + 3 * rows + 2 * TAIL + 2 * _READ, np.int64)


@inner
def open_scratch(memory: NDArray[np.int64], rows: int) -> Scratch:
    """The scratch over its memory, which the caller holds, with the stamps of `slots` cleared."""
    scratch = scratch_of(memory, rows)
    scratch.slots[:] = 0
    return scratch


@inner
def scratch_of(memory: NDArray[np.int64], rows: int) -> Scratch:
    """Lay the arrays of a scratch over its memory.

    Kernels lay them out anew instead of handing them on: thirteen arrays are a hundred words at every call.
    """
    levels = np.int64(memory.ctypes.data)
    candidates = levels + 8 * _LEVELS
    slots = candidates + 8 * _CANDIDATES
    open_levels = slots + 8 * HASH
    hashes = open_levels + 24 * rows
    read = hashes + 16 * TAIL
    return Scratch(
        view_i64_rows(levels, MAX_LEVELS, 4),
        view_f32(levels + 32 * MAX_LEVELS, MAX_LEVELS),
        view_i32(candidates, MAX_CANDIDATES),
        view_f32(candidates + 4 * MAX_CANDIDATES, MAX_CANDIDATES),
        view_i64(candidates + 8 * MAX_CANDIDATES, MAX_CANDIDATES),
        view_i64(slots, HASH),
        view_i64_rows(open_levels, rows, 2),
        view_i64(open_levels + 16 * rows, rows),
        view_u64_rows(hashes, 2, TAIL),
        view_i32(read, _READ),
        view_i32(read + 4 * _READ, _READ),
        view_f32(read + 8 * _READ, _READ),
        view_f32(candidates + 16 * MAX_CANDIDATES, MAX_CANDIDATES),
    )


@inner
def context_hashes(tails: NDArray[np.int32], at: int, tail_len: int, out: NDArray[np.uint64]) -> None:
    """Hashes of the last 1, 2, … tokens: row 0 as n-gram tables are keyed, row 1 as the recycling table is."""
    h = np.uint64(0)
    g = np.uint64(0)
    for i in range(min(tail_len, MAX_ORDER)):
        h = ngram_hash(h, tails[at, i])
        out[0, i] = h
        if i < recycling.ORDERS:
            g = recycling.mix(g, tails[at, i])
            out[1, i] = g


@inner
def collect_levels(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    base: int,
    tails: NDArray[np.int32],
    at: int,
    tail_len: int,
    cells: NDArray[np.float32],
    trust: NDArray[np.float64],
    mass_floor: float,
    memory: NDArray[np.int64],
) -> int:
    """Merge the levels of all sources, longest match first, into the scratch's ``levels`` and ``weights``.

    Parameters
    ----------
    table
        (s, ROW) int64 sources.
    cursors, base
        (m, CURSOR) int64; the node's cursors are rows base … base + s - 1. Indices are passed instead of slices, which
        would cost more than the work done with them.
    tails, at, tail_len
        (m, TAIL) int32, the node's row: newest tokens, newest first, and how many are valid.
    cells, trust
        (CELLS, 4) float32 calibration, (NUM_SOURCES, 1 + LENGTH_CLASSES, 2) float64 the request's corrections.
    mass_floor
        Levels that would share less than this mass are not read.
    memory
        `scratch_memory` of the table's rows.

    Returns
    -------
    int
        Number of levels.
    """
    table, cursors, tails = borrowed(table), borrowed(cursors), borrowed(tails)
    cells, trust = borrowed(cells), borrowed(trust)
    rows = len(table)
    scratch = scratch_of(memory, rows)
    open_levels, hashes, levels, weights = scratch.open_levels, scratch.hashes, scratch.levels, scratch.weights
    open_rows = scratch.open_rows
    context_hashes(tails, at, tail_len, hashes)
    live = 0
    for s in range(rows):
        handle, length = open_row(table, s, cursors, base + s, hashes, tail_len)
        if length >= 0:
            open_levels[live, 0], open_levels[live, 1], open_rows[live] = handle, length, s
            live += 1
    n = 0
    mass = 1.0
    while n < MAX_LEVELS and mass > mass_floor:
        i = -1
        length = np.int64(-1)
        for j in range(live):
            if open_levels[j, 1] > length:
                i = j
                length = open_levels[j, 1]
        if i < 0:
            break
        best = open_rows[i]
        handle = open_levels[i, 0]
        if handle == CLOSED:
            open_levels[i, 0], open_levels[i, 1] = look_up(table, best, hashes, length)
            continue
        total, distinct = evidence(table, best, cursors, base + best, handle)
        source = table[best, NUMBER]
        cell = cell_of(source, length, total, distinct)
        weight = level_weight(cells, cell, prior_weight(source, length, total, distinct))
        weight = multiplied(weight, odds_of(trust, cell))
        levels[n, 0] = best
        levels[n, 1] = handle
        levels[n, 2] = cell
        levels[n, 3] = total
        weights[n] = weight
        mass *= 1.0 - weight
        n += 1
        open_levels[i, 0], open_levels[i, 1] = next_level(table, best, handle, length, hashes)
    return n


@inner
def blend(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    base: int,
    cells: NDArray[np.float32],
    num_levels: int,
    floor: float,
    stamp: int,
    memory: NDArray[np.int64],
) -> int:
    """Spend the mass of all levels on their continuations: the scratch's ``tokens``, ``probs`` and ``credit``.

    Parameters
    ----------
    floor
        Shares below this probability are left out.
    stamp
        A number not used with this scratch since it was opened.
    memory
        As for `collect_levels`.

    Returns
    -------
    int
        Number of candidates, in no particular but deterministic order.
    """
    table, cursors, cells = borrowed(table), borrowed(cursors), borrowed(cells)
    scratch = scratch_of(memory, len(table))
    levels, weights, slots = scratch.levels, scratch.weights, scratch.slots
    tokens, probs, credit, share = scratch.tokens, scratch.probs, scratch.credit, scratch.share
    read_tokens, read_counts, read_p = scratch.read_tokens, scratch.read_counts, scratch.read_p
    n = 0
    mass = 1.0
    for level in range(num_levels):
        row = levels[level, 0]
        recency = recency_weight(cells, levels[level, 2])
        spend = mass * np.float64(weights[level])
        mass -= spend
        m = read_level(
            table,
            row,
            cursors,
            base + row,
            levels[level, 1],
            levels[level, 3],
            recency,
            0.999 * floor / max(spend, 1e-30),  # just below: the limit itself is drawn here, for all sources alike
            read_tokens,
            read_counts,
            read_p,
        )
        for i in range(m):
            p = spend * np.float64(read_p[i])
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
                probs[c] = np.float64(probs[c]) + p
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
