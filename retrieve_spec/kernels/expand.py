"""Numba kernels that grow a draft tree best-first from the sources' cursors, and learn from the tokens that came."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels import automaton
from retrieve_spec.kernels.blend import (
    AUTOMATON,
    CELL_MEMORY,
    CURSOR,
    EXACT,
    KIND,
    MASS_FLOOR,
    MAX_CANDIDATES,
    MAX_LEVELS,
    NGRAM,
    NUM_SOURCES,
    NUMBER,
    PREDICTION,
    READ_LIMIT,
    RESTING,
    TAIL,
    advance_row,
    blend,
    collect_levels,
    edges_of,
    exact_narrow,
    ngram_token,
    recency_weight,
    slots_of,
    states_of,
)
from retrieve_spec.kernels.sampling import noise_key, uniform
from retrieve_spec.kernels.suffix_array import sa_extend
from retrieve_spec.kernels.views import view_f32, view_i32, view_u16, view_u32, view_u64

ORIGIN_BITS = 40
MIN_ORIGIN = 8
"""Tokens that must match before a drafted token is said to stand in a store."""
MATCH = 64
"""Longest match with a store that is kept when the text leaves it."""
USE_MEMORY = 512.0
"""Tokens over which the use of a source is averaged."""
NEGLIGIBLE = 0.2
"""Part of the smallest useful probability below which a single share is not worth adding up."""
RANKS = 72
"""Bins of the candidates' probabilities, for pruning."""
SCALE_BINS = 33
"""Bins of the final probability scale over log-odds -8 … 8."""
SCALE_MEMORY = 1000.0
SCALE_PRIOR = 8.0


@njit(cache=True, nogil=True)
def _bin(p: float) -> tuple[int, float]:
    """Lower bin of a probability on the log-odds scale and its fractional part."""
    p = min(max(p, 1e-6), 1.0 - 1e-6)
    x = (min(max(np.log(p / (1.0 - p)), -7.999), 7.999) + 8.0) * 2.0
    i = int(x)
    return i, x - i


@njit(cache=True, nogil=True)
def scaled(scale: NDArray[np.float32], source: int, p: float) -> float:
    """Probability after the learned correction of (source, log-odds bin)."""
    i, f = _bin(p)
    low = (scale[source, i, 0] + SCALE_PRIOR * 1.0) / (scale[source, i, 1] + SCALE_PRIOR)
    high = (scale[source, i + 1, 0] + SCALE_PRIOR * 1.0) / (scale[source, i + 1, 1] + SCALE_PRIOR)
    return min(p * ((1.0 - f) * low + f * high), 0.9999)


@njit(cache=True, nogil=True)
def _before(pool_p: NDArray[np.float32], pool_ids: NDArray[np.int64], a: int, b: int) -> bool:
    """Heap order: higher probability, then lower token id, then earlier candidate."""
    if pool_p[a] != pool_p[b]:
        return bool(pool_p[a] > pool_p[b])
    if pool_ids[a, 0] != pool_ids[b, 0]:
        return bool(pool_ids[a, 0] < pool_ids[b, 0])
    return a < b


@njit(cache=True, nogil=True)
def _push(
    heap: NDArray[np.int64], size: int, item: int, pool_p: NDArray[np.float32], pool_ids: NDArray[np.int64]
) -> None:
    i = size
    while i > 0:
        above = (i - 1) >> 1
        if not _before(pool_p, pool_ids, item, heap[above]):
            break
        heap[i] = heap[above]
        i = above
    heap[i] = item


@njit(cache=True, nogil=True)
def _pop(heap: NDArray[np.int64], size: int, pool_p: NDArray[np.float32], pool_ids: NDArray[np.int64]) -> None:
    """Remove the first of ``size`` items."""
    item = heap[size - 1]
    n = size - 1
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and _before(pool_p, pool_ids, heap[child + 1], heap[child]):
            child += 1
        if not _before(pool_p, pool_ids, heap[child], item):
            break
        heap[i] = heap[child]
        i = child
    if n > 0:
        heap[i] = item


@njit(cache=True, nogil=True)
def couple(tokens: NDArray[np.int32], probs: NDArray[np.float32], n: int, key: np.uint64) -> None:
    """Turn probabilities into probabilities given the noise that the sample will be drawn with.

    The target's token is the argmax of ``p_i / E_i`` where the exponential ``E_i`` is known (Gumbel-max sampling with
    counted noise) and only ``p_i`` is estimated. So the candidates' scores are known up to the error of the estimate,
    and the chance to win is taken in proportion to them (exponents of 1.5 and 2.5 were no better, and worse
    calibrated); the mass of all others competes with its median noise, ln 2.
    """
    others = 1.0
    for i in range(n):
        others -= probs[i]
    total = max(others, 0.0) / 0.6931
    for i in range(n):
        score = probs[i] / -np.log(uniform(key, tokens[i]))
        probs[i] = score
        total += score
    for i in range(n):
        probs[i] /= total


@njit(cache=True, nogil=True)
def _best_possible(cost: NDArray[np.float32], n: int, gain: float, p: float, rate: float) -> bool:
    """Whether adding more nodes of probability at most ``p`` can still raise tokens per second above ``rate``."""
    for m in range(n + 1, len(cost)):  # noqa: SIM110 (Numba compiles the loop, not any())
        if (gain + (m - n) * p) > rate * cost[m]:
            return True
    return False


@njit(cache=True, nogil=True)
def _rank(p: float) -> int:
    """Bin of a path probability, six per halving."""
    return min(int(-6.0 * np.log2(max(p, 1e-9))), RANKS - 1)


@njit(cache=True, nogil=True)
def _cutoff(ranks: NDArray[np.int64], max_nodes: int) -> float:
    """A probability below which no further candidate can be among the ``max_nodes`` best."""
    above = 0
    for i in range(RANKS - 1):  # the last bin has no lower end
        above += ranks[i]
        if above >= max_nodes:
            return np.float64(2.0 ** (-(i + 1) / 6.0))
    return 0.0


@njit(cache=True, nogil=True)
def expand(
    table: NDArray[np.int64],
    root_cursors: NDArray[np.int64],
    tail: NDArray[np.int32],
    tail_len: int,
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    noise: NDArray[np.int64],
    cost: NDArray[np.float32],
    max_nodes: int,
    max_depth: int,
    min_p: float,
    cursors: NDArray[np.int64],
    tails: NDArray[np.int32],
    pool_p: NDArray[np.float32],
    pool_ids: NDArray[np.int64],
    heap: NDArray[np.int64],
    slots: NDArray[np.int64],
    stamp: int,
    nodes: NDArray[np.int64],
    node_p: NDArray[np.float32],
) -> tuple[int, int, int]:
    """Take the nodes of highest path probability, as long as they pay.

    Parameters
    ----------
    noise
        (4,) int64: 1 if tokens are sampled with known noise (else 0), seed, row, position of the next token.
    cost
        (max_nodes + 1,) float32 seconds of a pass over n nodes, or (0,) to fill the budget.
    cursors, tails
        ((max_nodes + 1) · s, CURSOR) int64 and (max_nodes + 1, TAIL) int32 scratch; the root's come first.
    pool_p, pool_ids, heap
        (c,) float32, (c, 3) int64 (token, parent, source row), (c,) int64 scratch for candidates.
    slots, stamp
        (HASH,) int64 scratch and a counter that only grows.
    nodes, node_p
        Output: (max_nodes, 4) int64 (token, parent, depth, source row) in best-first order, (max_nodes,) float32.

    Returns
    -------
    n, grown, stamp
        Nodes worth verifying (a prefix of those grown), nodes grown, the new stamp.
    """
    tokens = np.empty(MAX_CANDIDATES, np.int32)
    probs = np.empty(MAX_CANDIDATES, np.float32)
    credit = np.empty(MAX_CANDIDATES, np.int64)
    levels = np.empty((MAX_LEVELS, 4), np.int64)
    weights = np.empty(MAX_LEVELS, np.float32)
    open_levels = np.empty((len(table), 2), np.int64)
    hashes = np.empty((2, TAIL), np.uint64)
    read_tokens = np.empty(READ_LIMIT, np.int32)
    read_counts = np.empty(READ_LIMIT, np.int32)
    read_p = np.empty(READ_LIMIT, np.float32)
    share = np.empty(MAX_CANDIDATES, np.float32)
    rows = len(table)
    for s in range(rows):
        for j in range(CURSOR):
            cursors[s, j] = root_cursors[s, j]
    for j in range(TAIL):
        tails[0, j] = tail[0, j]
    ranks = np.zeros(RANKS, np.int64)
    cutoff = 0.0
    pool = 0
    size = 0
    n = 0
    gain = 1.0
    best_n = 0
    best_rate = 1.0 / cost[0] if len(cost) > 0 else 0.0
    at = 0  # index into cursors: node + 1
    path_p = 1.0
    depth = 0
    while True:
        if depth < max_depth and n < max_nodes:
            valid = min(tail_len + depth, TAIL)
            # No candidate below `cutoff` can be among the best: levels with too little mass to make one are not read.
            worth = max(min_p, cutoff) / path_p
            mass = MASS_FLOOR if noise[0] else max(worth, MASS_FLOOR)
            negligible = 0.0 if noise[0] else NEGLIGIBLE * worth  # known noise can make a small share the largest
            k = collect_levels(
                table, cursors, at * rows, tails, at, valid, cells, mass, open_levels, hashes, levels, weights
            )
            stamp += 1
            c = blend(
                table,
                cursors,
                at * rows,
                cells,
                levels,
                weights,
                k,
                negligible,
                slots,
                stamp,
                read_tokens,
                read_counts,
                read_p,
                share,
                tokens,
                probs,
                credit,
            )
            if noise[0]:
                couple(tokens, probs, c, noise_key(noise[1], noise[2], noise[3] + depth))
            for i in range(c):
                if probs[i] < worth or pool >= len(pool_p):
                    continue
                p = path_p * scaled(scale, noise[0] * NUM_SOURCES + table[credit[i], NUMBER], probs[i])
                pool_p[pool] = p
                pool_ids[pool, 0] = tokens[i]
                pool_ids[pool, 1] = at - 1
                pool_ids[pool, 2] = credit[i]
                _push(heap, size, pool, pool_p, pool_ids)
                ranks[_rank(p)] += 1
                size += 1
                pool += 1
            cutoff = _cutoff(ranks, max_nodes)
        if size == 0 or n >= max_nodes:
            break
        top = heap[0]
        _pop(heap, size, pool_p, pool_ids)
        size -= 1
        path_p = pool_p[top]
        if len(cost) > 0 and not _best_possible(cost, n, gain, path_p, best_rate):
            break
        parent = pool_ids[top, 1]
        depth = 1 if parent < 0 else nodes[parent, 2] + 1
        nodes[n, 0] = pool_ids[top, 0]
        nodes[n, 1] = parent
        nodes[n, 2] = depth
        nodes[n, 3] = pool_ids[top, 2]
        node_p[n] = path_p
        n += 1
        gain += path_p
        if len(cost) == 0:
            best_n = n
        elif gain > best_rate * cost[n]:
            best_rate = gain / cost[n]
            best_n = n
        at = n
        token = np.int32(pool_ids[top, 0])
        tails[at, 0] = token
        for i in range(1, TAIL):
            tails[at, i] = tails[parent + 1, i - 1]
        for s in range(rows):
            if table[s, RESTING] == 1:
                continue
            advance_row(table, s, cursors, (parent + 1) * rows + s, token, cursors, at * rows + s)
    return best_n, n, stamp


@njit(cache=True, nogil=True)
def depth_first(
    nodes: NDArray[np.int64],
    node_p: NDArray[np.float32],
    numbers: NDArray[np.uint8],
    node_origin: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    log_p: NDArray[np.float32],
    sources: NDArray[np.uint8],
    origins: NDArray[np.int64],
) -> None:
    """Write the first nodes (best-first, parents first) in depth-first order, so that first branches are contiguous.

    Parameters
    ----------
    nodes, node_p
        Output of `expand`; as many nodes are written as the outputs hold.
    numbers
        (s,) uint8, number of each source row.
    node_origin
        Output of `find_origins`, or (0,) when it was not asked for.
    token_ids, parents, depths, log_p, sources, origins
        (n,) outputs: the fields of a `DraftTree`.
    """
    n = len(token_ids)
    first = np.full(n + 1, -1, np.int64)
    after = np.full(n, -1, np.int64)
    place = np.empty(n + 1, np.int32)
    stack = np.empty(n + 1, np.int64)
    for i in range(n - 1, -1, -1):
        parent = nodes[i, 1] + 1
        after[i] = first[parent]
        first[parent] = i
    place[0] = -1
    top = 0
    filled = 0
    at = first[0]
    while at >= 0 or top > 0:
        if at < 0:
            top -= 1
            at = after[stack[top]]
            continue
        token_ids[filled] = nodes[at, 0]
        parents[filled] = place[nodes[at, 1] + 1]
        depths[filled] = nodes[at, 2]
        log_p[filled] = np.log(node_p[at])
        sources[filled] = numbers[nodes[at, 3]]
        origins[filled] = node_origin[at] if len(node_origin) > 0 else -1
        place[at + 1] = filled
        filled += 1
        stack[top] = at
        top += 1
        at = first[at + 1]
    # Where a first branch can be read in one piece, say so: what stands before its end stands before its beginning.
    for i in range(n - 1, 0, -1):
        known = parents[i] == i - 1 and origins[i] >= 0 and origins[i - 1] >= 0
        if known and origins[i] >> ORIGIN_BITS == origins[i - 1] >> ORIGIN_BITS:
            origins[i - 1] = origins[i] - 1


@njit(cache=True, nogil=True)
def find_origins(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    first_row: int,
    num_exact: int,
    num_nodes: int,
    out: NDArray[np.int64],
) -> None:
    """Say where the path to each node stands in a store: longest match over the exact rows, -1 where none is long.

    Writes ``out[i] = segment << ORIGIN_BITS | token position`` for the i-th node in best-first order.
    """
    rows = len(table)
    for i in range(num_nodes):
        out[i] = -1
        longest = MIN_ORIGIN - 1
        for e in range(num_exact):
            s = first_row + e
            c = (i + 1) * rows + s
            if cursors[c, 2] > longest and cursors[c, 0] < cursors[c, 1]:
                longest = cursors[c, 2]
                position = np.int64(view_u32(table[s, 5], table[s, 6])[cursors[c, 0]]) + longest - 1
                out[i] = (table[s, 15] << ORIGIN_BITS) | position


@njit(cache=True, nogil=True)
def _share_of(
    table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int, handle: int, total: int, token: int
) -> tuple[float, float]:
    """(share of a level that goes to ``token`` by count, 1 if the token is its most recent continuation)."""
    if table[s, KIND] == AUTOMATON:
        states = states_of(table, s)
        edges = edges_of(table, s)
        count = automaton.count_of(states, edges, slots_of(table, s), handle, token)
        recent = 1.0 if automaton.most_recent(states, edges, handle) == token else 0.0
        return count / total, recent
    if table[s, KIND] == PREDICTION:
        hit = 1.0 if view_i32(table[s, 2], table[s, 3])[handle] == token else 0.0
        return hit, hit
    if table[s, KIND] == NGRAM:
        start = view_u32(table[s, 6], table[s, 3] + 1)
        for j in range(np.int64(start[handle]), np.int64(start[handle + 1])):
            if ngram_token(table, s, j) == token:
                return view_u32(table[s, 8], table[s, 9])[j] / total, 0.0
        return 0.0, 0.0
    if table[s, KIND] == EXACT:
        a, b = exact_narrow(table, s, cursors[c, 0], cursors[c, 1], cursors[c, 2], token)
        return (b - a) / total, 0.0
    k = table[s, 10]
    ids = view_i32(table[s, 6], table[s, 3] * k)
    p = view_f32(table[s, 8], table[s, 3] * k)
    for i in range(k):
        if ids[handle * k + i] == token:
            return np.float64(p[handle * k + i]), 0.0
    return 0.0, 0.0


@njit(cache=True, nogil=True)
def learn_weights(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    cells: NDArray[np.float32],
    levels: NDArray[np.int64],
    weights: NDArray[np.float32],
    num_levels: int,
    use: NDArray[np.float64],
    token: int,
) -> None:
    """One step of online expectation maximisation: which level explains the token that came.

    ``use`` (s,) is the running share of tokens that each source explained.

    The mass that no level took explains it with a small uniform probability, so a surprise lowers every weight.
    """
    joint = np.empty(MAX_LEVELS, np.float64)
    by_count = np.empty(MAX_LEVELS, np.float64)
    by_recency = np.empty(MAX_LEVELS, np.float64)
    mass = 1.0
    total = 0.0
    for i in range(num_levels):
        s = levels[i, 0]
        recency = recency_weight(cells, levels[i, 2]) if table[s, KIND] == AUTOMATON else 0.0
        share, recent = _share_of(table, s, cursors, s, levels[i, 1], levels[i, 3], token)
        by_count[i] = (1.0 - recency) * share
        by_recency[i] = recency * recent
        joint[i] = mass * weights[i] * (by_count[i] + by_recency[i])
        mass *= 1.0 - weights[i]
        total += joint[i]
    total += mass * 1e-4
    reached = 1.0
    for s in range(len(use)):
        use[s] *= 1.0 - 1.0 / USE_MEMORY
    for i in range(num_levels):
        cell = levels[i, 2]
        r = joint[i] / total
        use[levels[i, 0]] += r / USE_MEMORY
        seen = cells[cell, 1]
        keep = 1.0 if seen < CELL_MEMORY else 1.0 - reached / CELL_MEMORY
        cells[cell, 0] = cells[cell, 0] * keep + r
        cells[cell, 1] = cells[cell, 1] * keep + reached
        part = by_count[i] + by_recency[i]
        if part > 0:
            cells[cell, 2] = cells[cell, 2] * keep + r * by_recency[i] / part
            cells[cell, 3] = cells[cell, 3] * keep + r
        reached -= r
        if reached <= 1e-9:
            break


@njit(cache=True, nogil=True)
def learn_scale(
    scale: NDArray[np.float32],
    first: int,
    table: NDArray[np.int64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    credit: NDArray[np.int64],
    n: int,
    min_p: float,
    token: int,
) -> None:
    """Compare every candidate's probability with what came."""
    for i in range(n):
        if probs[i] < min_p:
            continue
        source = first + table[credit[i], NUMBER]
        b, f = _bin(probs[i])
        hit = 1.0 if tokens[i] == token else 0.0
        for j in range(2):
            w = (1.0 - f) if j == 0 else f
            cell = scale[source, b + j]
            if cell[1] > SCALE_MEMORY:
                cell[0] *= 0.999
                cell[1] *= 0.999
            cell[0] += w * hit
            cell[1] += w * probs[i]


@njit(cache=True, nogil=True)
def learn(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    tail: NDArray[np.int32],
    tail_len: int,
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    use: NDArray[np.float64],
    noise: NDArray[np.int64],
    min_p: float,
    emitted: NDArray[np.int32],
    slots: NDArray[np.int64],
    stamp: int,
) -> int:
    """Follow the emitted tokens with all cursors and learn at every position; cursors and tail end after the last.

    Returns
    -------
    int
        The new stamp.
    """
    tokens = np.empty(MAX_CANDIDATES, np.int32)
    probs = np.empty(MAX_CANDIDATES, np.float32)
    credit = np.empty(MAX_CANDIDATES, np.int64)
    levels = np.empty((MAX_LEVELS, 4), np.int64)
    weights = np.empty(MAX_LEVELS, np.float32)
    open_levels = np.empty((len(table), 2), np.int64)
    hashes = np.empty((2, TAIL), np.uint64)
    read_tokens = np.empty(READ_LIMIT, np.int32)
    read_counts = np.empty(READ_LIMIT, np.int32)
    read_p = np.empty(READ_LIMIT, np.float32)
    share = np.empty(MAX_CANDIDATES, np.float32)
    moved = np.empty((1, CURSOR), np.int64)
    for i in range(len(emitted)):
        token = emitted[i]
        k = collect_levels(
            table, cursors, 0, tail, 0, min(tail_len + i, TAIL), cells, MASS_FLOOR, open_levels, hashes, levels, weights
        )
        stamp += 1
        c = blend(
            table,
            cursors,
            0,
            cells,
            levels,
            weights,
            k,
            0.0,
            slots,
            stamp,
            read_tokens,
            read_counts,
            read_p,
            share,
            tokens,
            probs,
            credit,
        )
        if noise[0]:
            couple(tokens, probs, c, noise_key(noise[1], noise[2], noise[3] + i))
        learn_scale(scale, noise[0] * NUM_SOURCES, table, tokens, probs, credit, c, min_p, token)
        learn_weights(table, cursors, cells, levels, weights, k, use, token)
        for s in range(len(table)):
            moved[0] = cursors[s]
            advance_row(table, s, cursors, s, token, moved, 0)
            cursors[s] = moved[0]
        for j in range(TAIL - 1, 0, -1):
            tail[0, j] = tail[0, j - 1]
        tail[0, 0] = token
    return stamp


@njit(cache=True, nogil=True)
def node_tails(
    token_ids: NDArray[np.int32],
    parent: NDArray[np.int32],
    tail: NDArray[np.int32],
    tail_len: int,
    tails: NDArray[np.int32],
    lens: NDArray[np.int32],
) -> None:
    """Newest tokens of the context after the root (row 0) and after every node (row i + 1), newest first."""
    width = tails.shape[1]
    for j in range(width):
        tails[0, j] = tail[0, j]
    lens[0] = min(tail_len, width)
    for i in range(len(token_ids)):
        above = parent[i] + 1
        tails[i + 1, 0] = token_ids[i]
        for j in range(1, width):
            tails[i + 1, j] = tails[above, j - 1]
        lens[i + 1] = min(lens[above] + 1, width)


@njit(cache=True, nogil=True)
def follow_exact(
    table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int, window: NDArray[np.int32], fresh: int
) -> None:
    """Follow the newest tokens of the text with a store's longest-match cursor.

    Parameters
    ----------
    row
        An `EXACT` source.
    cursor
        (CURSOR,) int64 (lo, hi, depth) before the fresh tokens, modified in place.
    window
        (w,) int32 newest tokens of the text, oldest first, the fresh ones included.
    fresh
        How many of them are new.
    """
    local = np.empty(len(window), np.int64)
    to_local = view_i32(table[s, 7], table[s, 8])
    for i in range(len(window)):
        local[i] = to_local[window[i]] if 0 <= window[i] < table[s, 8] else 0
    sa = view_u32(table[s, 5], table[s, 6])
    top = view_u64(table[s, 12], table[s, 13])
    lo, hi, depth = cursors[c, 0], cursors[c, 1], cursors[c, 2]
    for i in range(len(window) - fresh, len(window)):
        if table[s, 4] == 2:
            tokens = view_u16(table[s, 2], table[s, 3])
            lo, hi, depth = sa_extend(tokens, sa, top, table[s, 14], lo, hi, depth, local, i + 1, MATCH)
        else:
            wide = view_u32(table[s, 2], table[s, 3])
            lo, hi, depth = sa_extend(wide, sa, top, table[s, 14], lo, hi, depth, local, i + 1, MATCH)
    cursors[c, 0], cursors[c, 1], cursors[c, 2] = lo, hi, depth
