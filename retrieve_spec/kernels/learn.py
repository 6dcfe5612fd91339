"""Numba kernels that learn from emitted tokens: weights of levels, and the scale of probabilities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment, automaton, hidden_states, trie, unigram
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
from retrieve_spec.kernels.compiled_code import inlined, inner, inner_with_arrays
from retrieve_spec.kernels.expand import NEGLIGIBLE, couple
from retrieve_spec.kernels.levels import advance_row
from retrieve_spec.kernels.request import (
    cells_of,
    cursors_of,
    is_store,
    newest_of,
    push,
    scale_of,
    sources_of,
    trust_of,
    use_of,
)
from retrieve_spec.kernels.sampling import noise_key
from retrieve_spec.kernels.source_table import (
    CURSOR,
    KIND_ALIGNMENT,
    KIND_AUTOMATON,
    KIND_DENSE,
    KIND_EXACT,
    KIND_NGRAM,
    KIND_PREDICTION,
    KIND_STATES,
    KIND_UNIGRAM,
    TAIL,
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
from retrieve_spec.kernels.views import Record, view_f32, view_i32, view_i64, view_i64_rows

USE_MEMORY = 512.0
"""Number of tokens over which the use of a source is averaged."""


@inner
def _share_among(ids: NDArray[np.int32], p: NDArray[np.float32], token: int) -> float:
    """Return the probability of a token among some."""
    for i in range(len(ids)):
        if ids[i] == token:
            return np.float64(p[i])
    return 0.0


@inner
def _share_of(
    source: Record,
    cursors: NDArray[np.int64],
    c: int,
    handle: int,
    total: int,
    token: int,
    stores: int | None,
) -> tuple[float, float]:
    """Return the share of a level that goes to ``token`` by count, and 1 if it is the most recent continuation."""
    kind = source.kind
    if kind == KIND_AUTOMATON:
        states = states_of(source.automaton)
        edges = edges_of(source.automaton)
        count = automaton.count_of(states, edges, slots_of(source.automaton), handle, token)
        recent = 1.0 if automaton.most_recent(states, edges, handle) == token else 0.0
        return count / total, recent
    if kind == KIND_PREDICTION:
        hit = 1.0 if expected_text(source.prediction)[handle] == token else 0.0
        return hit, hit
    if kind == KIND_ALIGNMENT:
        return 1.0 if handle & alignment.LOW == token else 0.0, 0.0
    if stores is not None:
        if kind == KIND_STATES:
            ids, p = hidden_states.tokens_of(source.states, handle), hidden_states.probs_of(source.states, handle)
            return _share_among(ids, p, token), 0.0
        if kind == KIND_NGRAM:
            first, end = ngram_part(source.ngram, handle)
            for j in range(first, end):
                if ngram_token(source.ngram, j) == token:
                    return ngram_counts(source.ngram)[j] / total, 0.0
            return 0.0, 0.0
        if kind == KIND_EXACT:
            a, b = exact_narrow(source.exact, cursors[c, 0], cursors[c, 1], cursors[c, 2], token)
            return (b - a) / total, 0.0
        if kind == KIND_DENSE:
            weight = span_weights(source.dense)
            return trie.share(spans_of(source.dense), weight, cursors[c, 0], cursors[c, 1], cursors[c, 2], token), 0.0
    if kind == KIND_UNIGRAM:
        return unigram.share_of(source.unigram, handle, token), 0.0
    known = source.recycling
    return _share_among(recycling_tokens(known, handle), recycling_probs(known, handle), token), 0.0


@inlined
def learn_weights(
    request: Record, adapted: NDArray[np.float64], num_levels: int, token: int, stores: int | None
) -> None:
    """Do one step of online expectation maximisation for the level that explains the emitted token.

    The mass that no level took explains it with a small uniform probability, so surprises lower all weights.
    """
    table, cells, trust, use = sources_of(request), cells_of(request), trust_of(request), use_of(request)
    cursors, scratch = cursors_of(request), request.scratch
    levels, weights = view_i64_rows(scratch + LEVELS, MAX_LEVELS, 4), view_f32(scratch + WEIGHTS, MAX_LEVELS)
    joint = np.empty(MAX_LEVELS, np.float64)
    by_count = np.empty(MAX_LEVELS, np.float64)
    by_recency = np.empty(MAX_LEVELS, np.float64)
    mass = 1.0
    total = 0.0
    for i in range(num_levels):
        s = levels[i, 0]
        recency = recency_weight(cells, levels[i, 2]) if table[s].kind == KIND_AUTOMATON else 0.0
        share, recent = _share_of(table[s], cursors, s, levels[i, 1], levels[i, 3], token, stores)
        by_count[i] = (1.0 - recency) * share
        by_recency[i] = recency * recent
        weight = np.float64(weights[i])
        joint[i] = mass * weight * (by_count[i] + by_recency[i])
        mass *= 1.0 - weight
        total += joint[i]
    total += mass * 1e-4
    reached = 1.0
    for s in range(len(use)):
        if table[s].disabled == 0:
            use[s] *= 1.0 - 1.0 / USE_MEMORY
    for i in range(num_levels):
        cell = levels[i, 2]
        r = joint[i] / total
        use[levels[i, 0]] += r / USE_MEMORY
        source = table[levels[i, 0]]
        if source.kind == KIND_UNIGRAM:
            unigram.learn(source.unigram, levels[i, 1], token, reached, r)
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


@inlined
def learn_scale(request: Record, n: int, token: int) -> None:
    """Update the scale by the probabilities of ``n`` candidates and the emitted token.

    Candidates below `min_p`, which are never drafted, are ignored.
    """
    table, scale, scratch = sources_of(request), scale_of(request), request.scratch
    tokens, probs = view_i32(scratch + CANDIDATES, MAX_CANDIDATES), view_f32(scratch + SHARES, MAX_CANDIDATES)
    credit = view_i64(scratch + CREDIT, MAX_CANDIDATES)
    for i in range(n):
        p = np.float64(probs[i])
        if p < request.min_p:
            continue
        row = request.sampled * NUM_SOURCES + table[credit[i]].number
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


@inner_with_arrays
def learn(request: Record, emitted: NDArray[np.int32], every: int, stores: int | None) -> None:
    """Advance all cursors by the emitted tokens, and learn at each; cursors and newest tokens end after the last.

    Parameters
    ----------
    request
        The text's request before the tokens; its `length` is not changed.
    emitted
        (e,) int32.
    every
        Stores are read at one of so many positions, chosen by index, which avoids bias. At other positions, learning
        leaves them out.
    """
    table, cursors, newest, trust = sources_of(request), cursors_of(request), newest_of(request), trust_of(request)
    scratch, sampled = request.scratch, request.sampled
    tokens, probs = view_i32(scratch + CANDIDATES, MAX_CANDIDATES), view_f32(scratch + SHARES, MAX_CANDIDATES)
    view_i64(scratch + SLOTS, HASH)[:] = 0
    adapted = trust.copy()
    moved = np.empty((1, CURSOR), np.int64)
    disabled = np.empty(len(table), np.int64)
    for s in range(len(table)):
        disabled[s] = table[s].disabled
    here = np.int64(0)  # not a literal, since each literal would compile the callee again
    for i in range(len(emitted)):
        token = emitted[i]
        for s in range(len(table)):
            left_out = is_store(table[s]) and (request.length + i) % every != 0
            table[s].disabled = 1 if left_out else disabled[s]
        valid = min(request.length + i, TAIL)
        k = collect_levels(request, cursors, here, newest, here, valid, MASS_FLOOR, stores)
        c = blend(request, cursors, here, k, 0.0 if sampled else NEGLIGIBLE * request.min_p, i + 1, stores)
        if sampled:
            couple(tokens, probs, c, noise_key(request.seed, request.row, request.position + i))
        learn_scale(request, c, token)
        learn_weights(request, adapted, k, token, stores)
        for s in range(len(table)):
            for j in range(CURSOR):  # a loop, since Numba takes seconds to compile a slice assignment's shape check
                moved[0, j] = cursors[s, j]
            advance_row(table[s], cursors, s, token, moved, here, stores)
            for j in range(CURSOR):
                cursors[s, j] = moved[0, j]
        push(newest, token)
    for s in range(len(table)):
        table[s].disabled = disabled[s]
    for s in range(len(trust)):
        for j in range(trust.shape[1]):
            trust[s, j, 0], trust[s, j, 1] = adapted[s, j, 0], adapted[s, j, 1]
