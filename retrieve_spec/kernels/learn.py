"""Numba kernels that learn from the tokens that came: which levels explained them, and how probabilities turned out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment, automaton, trie, unigram
from retrieve_spec.kernels.blend import (
    CANDIDATES,
    CREDIT,
    HASH,
    LEVELS,
    MASS_FLOOR,
    MAX_CANDIDATES,
    MAX_LEVELS,
    SHARES,
    SLOTS,
    WEIGHTS,
    blend,
    collect_levels,
)
from retrieve_spec.kernels.calibration import (
    CELL_MEMORY,
    NUM_SOURCES,
    SCALE_MEMORY,
    adapt,
    multiplied,
    odds_of,
    recency_weight,
    scale_bin,
)
from retrieve_spec.kernels.compiled_code import inner, making, part
from retrieve_spec.kernels.expand import NEGLIGIBLE, couple
from retrieve_spec.kernels.levels import advance_row
from retrieve_spec.kernels.request import push
from retrieve_spec.kernels.sampling import noise_key
from retrieve_spec.kernels.source_table import (
    ALIGNMENT,
    AUTOMATON,
    CURSOR,
    DENSE,
    EXACT,
    KIND,
    NGRAM,
    NUMBER,
    PREDICTION,
    RECYCLING_K,
    RESTING,
    TAIL,
    UNIGRAM,
    edges_of,
    exact_narrow,
    expected_text,
    ngram_counts,
    ngram_part,
    ngram_token,
    recycling_probs,
    recycling_tokens,
    slots_of,
    span_weights,
    spans_of,
    states_of,
)
from retrieve_spec.kernels.views import view_f32, view_i32, view_i64, view_i64_rows

USE_MEMORY = 512.0
"""Tokens over which the use of a source is averaged."""


@inner
def _share_of(
    table: NDArray[np.int64],
    s: int,
    cursors: NDArray[np.int64],
    c: int,
    handle: int,
    total: int,
    token: int,
    stores: int | None,
) -> tuple[float, float]:
    """(share of a level that goes to ``token`` by count, 1 if the token is its most recent continuation)."""
    kind = table[s, KIND]
    if kind == AUTOMATON:
        states = states_of(table, s)
        edges = edges_of(table, s)
        count = automaton.count_of(states, edges, slots_of(table, s), handle, token)
        recent = 1.0 if automaton.most_recent(states, edges, handle) == token else 0.0
        return count / total, recent
    if kind == PREDICTION:
        hit = 1.0 if expected_text(table, s)[handle] == token else 0.0
        return hit, hit
    if kind == ALIGNMENT:
        return 1.0 if handle & alignment.LOW == token else 0.0, 0.0
    if stores is not None:
        if kind == NGRAM:
            first, end = ngram_part(table, s, handle)
            for j in range(first, end):
                if ngram_token(table, s, j) == token:
                    return ngram_counts(table, s)[j] / total, 0.0
            return 0.0, 0.0
        if kind == EXACT:
            a, b = exact_narrow(table, s, cursors[c, 0], cursors[c, 1], cursors[c, 2], token)
            return (b - a) / total, 0.0
        if kind == DENSE:
            weight = span_weights(table, s)
            return trie.share(spans_of(table, s), weight, cursors[c, 0], cursors[c, 1], cursors[c, 2], token), 0.0
    if kind == UNIGRAM:
        return unigram.share_of(table, s, handle, token), 0.0
    k = table[s, RECYCLING_K]
    ids = recycling_tokens(table, s, handle)
    p = recycling_probs(table, s, handle)
    for i in range(k):
        if ids[i] == token:
            return np.float64(p[i]), 0.0
    return 0.0, 0.0


@part
def learn_weights(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    cells: NDArray[np.float32],
    trust: NDArray[np.float64],
    adapted: NDArray[np.float64],
    memory: NDArray[np.int64],
    num_levels: int,
    use: NDArray[np.float64],
    token: int,
    stores: int | None,
) -> None:
    """One step of online expectation maximisation: which level explains the token that came.

    ``use`` (s,) is the running share of tokens that each source explained, of those it was asked about.

    The mass that no level took explains it with a small uniform probability, so a surprise lowers every weight.
    """
    scratch = np.int64(memory.ctypes.data)
    levels, weights = view_i64_rows(scratch + LEVELS, MAX_LEVELS, 4), view_f32(scratch + WEIGHTS, MAX_LEVELS)
    joint = np.empty(MAX_LEVELS, np.float64)
    by_count = np.empty(MAX_LEVELS, np.float64)
    by_recency = np.empty(MAX_LEVELS, np.float64)
    mass = 1.0
    total = 0.0
    for i in range(num_levels):
        s = levels[i, 0]
        recency = recency_weight(cells, levels[i, 2]) if table[s, KIND] == AUTOMATON else 0.0
        share, recent = _share_of(table, s, cursors, s, levels[i, 1], levels[i, 3], token, stores)
        by_count[i] = (1.0 - recency) * share
        by_recency[i] = recency * recent
        weight = np.float64(weights[i])
        joint[i] = mass * weight * (by_count[i] + by_recency[i])
        mass *= 1.0 - weight
        total += joint[i]
    total += mass * 1e-4
    reached = 1.0
    for s in range(len(use)):
        if table[s, RESTING] == 0:
            use[s] *= 1.0 - 1.0 / USE_MEMORY
    for i in range(num_levels):
        cell = levels[i, 2]
        r = joint[i] / total
        use[levels[i, 0]] += r / USE_MEMORY
        if table[levels[i, 0], KIND] == UNIGRAM:
            unigram.learn(table, levels[i, 0], levels[i, 1], token, reached, r)
        seen = np.float64(cells[cell, 1])
        keep = 1.0 if seen < CELL_MEMORY else 1.0 - reached / CELL_MEMORY
        cells[cell, 0] = np.float64(cells[cell, 0]) * keep + r
        cells[cell, 1] = seen * keep + reached
        part = by_count[i] + by_recency[i]
        if part > 0:
            cells[cell, 2] = np.float64(cells[cell, 2]) * keep + r * by_recency[i] / part
            cells[cell, 3] = np.float64(cells[cell, 3]) * keep + r
        now = multiplied(np.float64(weights[i]), odds_of(adapted, cell) / odds_of(trust, cell))
        adapt(adapted, cell, now, r, reached)
        reached -= r
        if reached <= 1e-9:
            break


@part
def learn_scale(
    scale: NDArray[np.float32],
    first: int,
    table: NDArray[np.int64],
    memory: NDArray[np.int64],
    n: int,
    min_p: float,
    token: int,
) -> None:
    """Compare the probability of each of ``n`` candidates with what came.

    Parameters
    ----------
    scale, first
        Modified in place; the row of source 0, which tells greedy decoding from sampling with known noise.
    min_p
        Candidates below it are never drafted, so nothing is learned of them.
    """
    scratch = np.int64(memory.ctypes.data)
    tokens, probs = view_i32(scratch + CANDIDATES, MAX_CANDIDATES), view_f32(scratch + SHARES, MAX_CANDIDATES)
    credit = view_i64(scratch + CREDIT, MAX_CANDIDATES)
    for i in range(n):
        p = np.float64(probs[i])
        if p < min_p:
            continue
        row = first + table[credit[i], NUMBER]
        b, f = scale_bin(p)
        hit = 1.0 if tokens[i] == token else 0.0
        for j in range(2):
            w = (1.0 - f) if j == 0 else f
            cell = scale[row, b + j]
            if cell[1] > SCALE_MEMORY:
                cell[0] = np.float64(cell[0]) * (1.0 - 1.0 / SCALE_MEMORY)
                cell[1] = np.float64(cell[1]) * (1.0 - 1.0 / SCALE_MEMORY)
            cell[0] = np.float64(cell[0]) + w * hit
            cell[1] = np.float64(cell[1]) + w * p


@making
def learn(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    tail: NDArray[np.int32],
    tail_len: int,
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    trust: NDArray[np.float64],
    use: NDArray[np.float64],
    noise: NDArray[np.int64],
    min_p: float,
    emitted: NDArray[np.int32],
    every: int,
    memory: NDArray[np.int64],
    stores: int | None,
) -> None:
    """Follow the emitted tokens with all cursors and learn at every position; cursors and tail end after the last.

    Parameters
    ----------
    every
        Stores are read at one position of so many, chosen by its number in the text (``tail_len`` is that of the
        first), whatever came there: nothing is favoured. At the others the rest learns without them.
    memory
        `blend.scratch_memory` of the table's rows.
    """
    scratch = np.int64(memory.ctypes.data)
    tokens, probs = view_i32(scratch + CANDIDATES, MAX_CANDIDATES), view_f32(scratch + SHARES, MAX_CANDIDATES)
    view_i64(scratch + SLOTS, HASH)[:] = 0
    adapted = trust.copy()
    moved = np.empty((1, CURSOR), np.int64)
    resting = table[:, RESTING].copy()
    here = np.int64(0)  # not a literal: for each of those Numba compiles what it is given to once more
    for i in range(len(emitted)):
        token = emitted[i]
        for s in range(len(table)):
            slow = table[s, KIND] == NGRAM or table[s, KIND] == EXACT
            table[s, RESTING] = 1 if slow and (tail_len + i) % every != 0 else resting[s]
        k = collect_levels(
            table, cursors, here, tail, here, min(tail_len + i, TAIL), cells, trust, MASS_FLOOR, memory, stores
        )
        c = blend(table, cursors, here, cells, k, 0.0 if noise[0] else NEGLIGIBLE * min_p, i + 1, memory, stores)
        if noise[0]:
            couple(tokens, probs, c, noise_key(noise[1], noise[2], noise[3] + i))
        learn_scale(scale, noise[0] * NUM_SOURCES, table, memory, c, min_p, token)
        learn_weights(table, cursors, cells, trust, adapted, memory, k, use, token, stores)
        for s in range(len(table)):
            for j in range(CURSOR):  # an assigned slice is compiled with what it says of shapes that differ: seconds
                moved[0, j] = cursors[s, j]
            advance_row(table, s, cursors, s, token, moved, here, stores)
            for j in range(CURSOR):
                cursors[s, j] = moved[0, j]
        push(tail, token)
    for s in range(len(table)):
        table[s, RESTING] = resting[s]
    for s in range(len(trust)):
        for j in range(trust.shape[1]):
            trust[s, j, 0], trust[s, j, 1] = adapted[s, j, 0], adapted[s, j, 1]
