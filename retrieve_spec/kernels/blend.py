"""Numba kernels that merge all sources' continuations at a node into one distribution over next tokens.

A source has *levels*: contexts of order k that occurred, with the tokens that followed and how often. Levels of all
sources are merged from the longest match to the shortest. Level k takes the share ``λ_k`` of the mass that longer
levels left, and distributes it over its continuations (interpolated prediction by partial matching).
`kernels/calibration.py` defines ``λ``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import recycling
from retrieve_spec.kernels.calibration import PRIOR_WEIGHT, cell_of, multiplied, odds_of, prior_weight, recency_weight
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
from retrieve_spec.kernels.request import cells_of, sources_of, trust_of
from retrieve_spec.kernels.source_table import READ_LIMIT, TAIL
from retrieve_spec.kernels.unigram import LISTED
from retrieve_spec.kernels.views import Record, view_f32, view_i32, view_i64, view_i64_rows, view_u64_rows

MAX_LEVELS = 24
MAX_CANDIDATES = 160
HASH = 512
_READ = max(READ_LIMIT, LISTED)
"""Most continuations of a level."""
MASS_FLOOR = 0.01
"""Remaining mass below which learning reads no further levels."""

LEVELS, WEIGHTS, CANDIDATES = 0, 32 * MAX_LEVELS, 40 * MAX_LEVELS
SHARES, CREDIT, SLOTS = (CANDIDATES + size * MAX_CANDIDATES for size in (4, 8, 24))
HASHES = SLOTS + 8 * HASH
READ = HASHES + 16 * TAIL
OPEN = READ + 12 * _READ
"""Byte offsets of the scratch arrays, which are valid at one node.

`LEVELS` (MAX_LEVELS, 4) int64: source row, handle, cell, total; `WEIGHTS` (MAX_LEVELS,) float32: λ, longest first.
`CANDIDATES` (MAX_CANDIDATES,) int32; `SHARES` float32: their probabilities; `CREDIT`: int64 row of the source with the
largest share of each, then float32 that share. `SLOTS` (HASH,) int64: token to candidate; entries contain the node's
stamp, so that nothing has to be cleared. `HASHES` (2, TAIL) uint64. `READ` (_READ,): int32 tokens, int32 counts and
float32 shares of a level. `OPEN`: (s, 2) int64 levels, then (s,) int64 their rows.
"""


def scratch_memory(rows: int) -> NDArray[np.int64]:
    """Allocate the scratch memory for a number of sources."""
    return np.zeros(OPEN // 8 + 3 * rows, np.int64)


@inner
def context_hashes(tails: NDArray[np.int32], at: int, tail_len: int, out: NDArray[np.uint64]) -> None:
    """Write hashes of the last 1, 2, … tokens: row 0 for n-gram tables, row 1 for recycling tables, followed by that of
    the skip-gram (`NO_CONTEXT` where there is none), with the last token at its end."""
    out[1, TAIL - 1] = tails[at, 0]
    out[1, recycling.ORDERS] = recycling.skipping(tails[at, 1]) if tail_len > 1 else recycling.NO_CONTEXT
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
    request: Record,
    cursors: NDArray[np.int64],
    base: int,
    tails: NDArray[np.int32],
    at: int,
    tail_len: int,
    mass_floor: float,
    stores: int | None,
) -> int:
    """Merge the levels of all sources, longest match first, into the scratch arrays `LEVELS` and `WEIGHTS`.

    Parameters
    ----------
    cursors, base
        (m, CURSOR) int64; the node's cursors are rows base … base + s - 1. Making slices instead of passing indices
        would take longer than the work itself.
    tails, at, tail_len
        (m, TAIL) int32 newest tokens, newest first, the node's row, and the number of valid tokens.
    mass_floor
        Levels are not read if less than this mass is left.
    stores
        As in `kernels/levels.py`.

    Returns
    -------
    int
        Number of levels.
    """
    table, cells, trust = sources_of(request), cells_of(request), trust_of(request)
    rows = len(table)
    scratch = request.scratch
    levels, weights = view_i64_rows(scratch + LEVELS, MAX_LEVELS, 4), view_f32(scratch + WEIGHTS, MAX_LEVELS)
    hashes = view_u64_rows(scratch + HASHES, 2, TAIL)
    open_levels, open_rows = view_i64_rows(scratch + OPEN, rows, 2), view_i64(scratch + OPEN + 16 * rows, rows)
    context_hashes(tails, at, tail_len, hashes)
    live = 0
    for s in range(rows):
        handle, length = open_row(table[s], cursors, base + s, hashes, tail_len, stores)
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
        source = table[best]
        handle = open_levels[i, 0]
        if stores is not None:  # noqa: SIM102 (Numba leaves out the outer branch alone)
            if handle == CLOSED:
                open_levels[i, 0], open_levels[i, 1] = look_up(source, hashes, length)
                continue
        total, distinct = evidence(source, cursors, base + best, handle, stores)
        cell = cell_of(source.number, length, total, distinct)
        prior = PRIOR_WEIGHT * prior_weight(source.number, length, total, distinct)
        learned = (np.float64(cells[cell, 0]) + prior) / (np.float64(cells[cell, 1]) + PRIOR_WEIGHT)
        weight = multiplied(learned, odds_of(trust, cell))
        levels[n, 0] = best
        levels[n, 1] = handle
        levels[n, 2] = cell
        levels[n, 3] = total
        weights[n] = weight
        mass *= 1.0 - weight
        n += 1
        open_levels[i, 0], open_levels[i, 1] = next_level(source, handle, length, hashes, stores)
    return n


@inner
def blend(
    request: Record,
    cursors: NDArray[np.int64],
    base: int,
    num_levels: int,
    floor: float,
    stamp: int,
    stores: int | None,
) -> int:
    """Distribute the mass of all levels over their continuations: scratch arrays `CANDIDATES`, `SHARES` and `CREDIT`.

    Parameters
    ----------
    floor
        Shares below this probability are left out.
    stamp
        A number that was not used with this scratch before.
    stores
        As for `collect_levels`.

    Returns
    -------
    int
        Number of candidates; their order is deterministic but unspecified.
    """
    table, cells = sources_of(request), cells_of(request)
    scratch = request.scratch
    levels, weights = view_i64_rows(scratch + LEVELS, MAX_LEVELS, 4), view_f32(scratch + WEIGHTS, MAX_LEVELS)
    tokens, probs = view_i32(scratch + CANDIDATES, MAX_CANDIDATES), view_f32(scratch + SHARES, MAX_CANDIDATES)
    credit = view_i64(scratch + CREDIT, MAX_CANDIDATES)
    share = view_f32(scratch + CREDIT + 8 * MAX_CANDIDATES, MAX_CANDIDATES)
    slots = view_i64(scratch + SLOTS, HASH)
    read_tokens, read_counts = view_i32(scratch + READ, _READ), view_i32(scratch + READ + 4 * _READ, _READ)
    read_p = view_f32(scratch + READ + 8 * _READ, _READ)
    n = 0
    mass = 1.0
    for level in range(num_levels):
        row = levels[level, 0]
        recency = recency_weight(cells, levels[level, 2])
        spend = mass * np.float64(weights[level])
        mass -= spend
        m = read_level(
            table[row],
            cursors,
            base + row,
            levels[level, 1],
            levels[level, 3],
            recency,
            0.999 * floor / max(spend, 1e-30),  # slightly less, since the limit itself is applied below, to all sources
            read_tokens,
            read_counts,
            read_p,
            stores,
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
