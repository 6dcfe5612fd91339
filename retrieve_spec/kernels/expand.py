"""Numba kernels that grow a draft tree best-first from the sources' cursors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import recycling
from retrieve_spec.kernels.blend import (
    CANDIDATES,
    CREDIT,
    HASH,
    MASS_FLOOR,
    MAX_CANDIDATES,
    SHARES,
    SLOTS,
    blend,
    collect_levels,
)
from retrieve_spec.kernels.calibration import CERTAIN, NUM_SOURCES, scaled
from retrieve_spec.kernels.compiled_code import inner, making
from retrieve_spec.kernels.levels import advance_row
from retrieve_spec.kernels.sampling import noise_key, uniform
from retrieve_spec.kernels.source_table import (
    BIGRAMS,
    CURSOR,
    KIND,
    NUMBER,
    PHRASES,
    RECYCLING,
    RECYCLING_CAPACITY,
    RECYCLING_ENTRIES,
    RECYCLING_K,
    RESTING,
    TAIL,
    recycling_sets,
)
from retrieve_spec.kernels.views import prefetch, view_f32, view_i32, view_i64

NEGLIGIBLE = 0.2
"""Part of the smallest useful probability below which a single share is not worth adding up."""
RANKS = 72
"""Bins of the candidates' probabilities, for pruning."""


@inner
def _before(pool_p: NDArray[np.float32], pool_ids: NDArray[np.int32], a: int, b: int) -> bool:
    """Heap order: higher probability, then lower token id, then earlier candidate."""
    if pool_p[a] != pool_p[b]:
        return bool(pool_p[a] > pool_p[b])
    if pool_ids[a, 0] != pool_ids[b, 0]:
        return bool(pool_ids[a, 0] < pool_ids[b, 0])
    return a < b


@inner
def _push(
    heap: NDArray[np.int32], size: int, item: int, pool_p: NDArray[np.float32], pool_ids: NDArray[np.int32]
) -> None:
    i = size
    while i > 0:
        above = (i - 1) >> 1
        if not _before(pool_p, pool_ids, item, heap[above]):
            break
        heap[i] = heap[above]
        i = above
    heap[i] = item


@inner
def _pop(heap: NDArray[np.int32], size: int, pool_p: NDArray[np.float32], pool_ids: NDArray[np.int32]) -> None:
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


@inner
def couple(tokens: NDArray[np.int32], probs: NDArray[np.float32], n: int, key: np.uint64) -> None:
    """Turn probabilities into probabilities given the noise that the sample will be drawn with.

    The target's token is the argmax of ``p_i / E_i`` where the exponential ``E_i`` is known (Gumbel-max sampling with
    counted noise) and only ``p_i`` is estimated. So the candidates' scores are known up to the error of the estimate,
    and the chance to win is taken in proportion to them (exponents of 1.5 and 2.5 were no better, and worse
    calibrated); the mass of all others competes with its median noise, ln 2.
    """
    others = 1.0
    for i in range(n):
        others -= np.float64(probs[i])
    total = max(others, 0.0) / 0.6931
    for i in range(n):
        score = np.float64(probs[i]) / -np.log(uniform(key, tokens[i]))
        probs[i] = score
        total += score
    for i in range(n):
        probs[i] = np.float64(probs[i]) / total


@inner
def best_possible(cost: NDArray[np.float32], n: int, gain: float, p: float, rate: float) -> bool:
    """Whether adding more nodes of probability at most ``p`` can still raise tokens per second above ``rate``."""
    for m in range(n + 1, len(cost)):  # noqa: SIM110 (Numba compiles the loop, not any())
        if (gain + (m - n) * p) > rate * np.float64(cost[m]):
            return True
    return False


@inner
def _rank(p: float) -> int:
    """Bin of a path probability, six per halving."""
    return min(int(-6.0 * np.log2(max(p, 1e-9))), RANKS - 1)


@inner
def _cutoff(ranks: NDArray[np.int64], max_nodes: int) -> float:
    """A probability below which no further candidate can be among the ``max_nodes`` best."""
    above = 0
    for i in range(RANKS - 1):  # the last bin has no lower end
        above += ranks[i]
        if above >= max_nodes:
            return np.float64(2.0 ** (-(i + 1) / 6.0))
    return 0.0


@inner
def follow(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    tails: NDArray[np.int32],
    above: int,
    at: int,
    token: int,
    stores: int | None,
) -> None:
    """Make the newest tokens and the cursors at place ``at`` those at place ``above`` after one more token."""
    tails[at, 0] = token
    for i in range(1, TAIL):
        tails[at, i] = tails[above, i - 1]
    rows = len(table)
    for s in range(rows):
        if table[s, KIND] == RECYCLING or table[s, KIND] == PHRASES:
            recycling.ask_for(recycling_sets(table, s), tails, at)  # looked up when the automata have been followed
        elif table[s, KIND] == BIGRAMS:
            prefetch(table[s, RECYCLING_ENTRIES] + 8 * table[s, RECYCLING_K] * min(token, table[s, RECYCLING_CAPACITY]))
    for s in range(rows):
        if table[s, RESTING] == 1:
            continue
        advance_row(table, s, cursors, above * rows + s, token, cursors, at * rows + s, stores)


@making
def expand(
    table: NDArray[np.int64],
    root_cursors: NDArray[np.int64],
    tail: NDArray[np.int32],
    tail_len: int,
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    trust: NDArray[np.float64],
    noise: NDArray[np.int64],
    cost: NDArray[np.float32],
    max_nodes: int,
    max_depth: int,
    min_p: float,
    acceptance: float,
    chain: int,
    least: float,
    ahead: int,
    cursors: NDArray[np.int64],
    tails: NDArray[np.int32],
    pool_p: NDArray[np.float32],
    pool_ids: NDArray[np.int32],
    heap: NDArray[np.int32],
    memory: NDArray[np.int64],
    nodes: NDArray[np.int64],
    node_p: NDArray[np.float32],
    stores: int | None,
) -> tuple[int, int]:
    """Take the nodes of highest path probability, as long as they pay.

    Parameters
    ----------
    table, tail, tail_len, cells, trust
        As for `blend.collect_levels`; the tail (1, TAIL) is that of the text.
    root_cursors
        (s, CURSOR) int64, where every source stands after the text.
    scale
        As for `calibration.scaled`.
    min_p
        Least path probability of a node.
    noise
        (4,) int64: 1 if tokens are sampled with known noise (else 0), seed, row, position of the next token.
    cost
        (max_nodes + 1,) float32 seconds of a pass over n nodes, or (0,) to fill the budget.
    acceptance
        What all path probabilities are multiplied by (`calibration.acceptance_ratio`).
    chain
        1 to follow the most probable token at every node alone, 0 for a tree.
    least
        Probability of a path below which no node pays.
    ahead
        Tokens that the draft begins with: the first so many of `nodes` and `node_p` hold them as a chain, which is
        taken as it is.
    cursors, tails
        ((max_nodes + 1) · s, CURSOR) int64 and (max_nodes + 1, TAIL) int32 scratch; the root's come first.
    pool_p, pool_ids, heap
        (c,) float32, (c, 3) int32 (token, parent, source row), (c,) int32 scratch for candidates.
    memory
        `blend.scratch_memory` of the table's rows.
    nodes, node_p
        Output: (max_nodes, 4) int64 (token, parent, depth, source row) in best-first order, (max_nodes,) float32. The
        first behind `ahead` is there also where it does not pay; its probability is 0 where there is none.

    Returns
    -------
    n, grown
        Nodes worth verifying (a prefix of those grown), nodes grown.
    """
    rows = len(table)
    scratch = np.int64(memory.ctypes.data)
    tokens, probs = view_i32(scratch + CANDIDATES, MAX_CANDIDATES), view_f32(scratch + SHARES, MAX_CANDIDATES)
    credit = view_i64(scratch + CREDIT, MAX_CANDIDATES)
    view_i64(scratch + SLOTS, HASH)[:] = 0
    for s in range(rows):
        for j in range(CURSOR):
            cursors[s, j] = root_cursors[s, j]
    for j in range(TAIL):
        tails[0, j] = tail[0, j]
    if ahead < max_nodes:
        node_p[ahead] = 0.0
    ranks = np.zeros(RANKS, np.int64)
    cutoff = 0.0
    pool = size = np.int64(0)  # candidates found, candidates waiting
    n = best_n = np.int64(ahead)
    gain = 1.0
    depth = n
    path_p = min(acceptance, 1.0) * np.float64(node_p[n - 1]) if n > 0 else acceptance  # never above its parent's
    for i in range(ahead):
        gain += np.float64(node_p[i])
        follow(table, cursors, tails, i, i + 1, np.int32(nodes[i, 0]), stores)
    best_rate = gain / np.float64(cost[n]) if len(cost) > 0 else 0.0
    while True:  # the root, then every node as it is taken: the n-th stands at place n of cursors and tails
        if depth < max_depth and n < max_nodes:
            valid = min(tail_len + depth, TAIL)
            # No candidate below `cutoff` can be among the best: levels with too little mass to make one are not read.
            worth = max(min_p, cutoff) / path_p
            mass = MASS_FLOOR if noise[0] else max(worth, MASS_FLOOR)
            negligible = 0.0 if noise[0] else NEGLIGIBLE * worth  # known noise can make a small share the largest
            k = collect_levels(table, cursors, n * rows, tails, n, valid, cells, trust, mass, memory, stores)
            c = blend(table, cursors, n * rows, cells, k, negligible, n + 1, memory, stores)
            if noise[0]:
                couple(tokens, probs, c, noise_key(noise[1], noise[2], noise[3] + depth))
            for i in range(c):
                if probs[i] < worth or pool >= len(pool_p):
                    continue
                p = path_p * scaled(scale, noise[0] * NUM_SOURCES + table[credit[i], NUMBER], np.float64(probs[i]))
                p = min(p, CERTAIN)
                if p < cutoff:
                    continue
                pool_p[pool] = p
                pool_ids[pool, 0] = tokens[i]
                pool_ids[pool, 1] = n - 1
                pool_ids[pool, 2] = credit[i]
                _push(heap, size, pool, pool_p, pool_ids)
                ranks[_rank(p)] += 1
                size += 1
                pool += 1
            if chain == 1:
                size = min(size, np.int64(1))
            elif pool >= max_nodes:
                cutoff = _cutoff(ranks, max_nodes)
        if size == 0 or n >= max_nodes:
            break
        top = heap[0]
        _pop(heap, size, pool_p, pool_ids)
        size -= 1
        path_p = np.float64(pool_p[top])
        parent = pool_ids[top, 1]
        depth = 1 if parent < 0 else nodes[parent, 2] + 1
        nodes[n, 0] = pool_ids[top, 0]
        nodes[n, 1] = parent
        nodes[n, 2] = depth
        nodes[n, 3] = pool_ids[top, 2]
        node_p[n] = path_p
        if path_p < least or (len(cost) > 0 and not best_possible(cost, n, gain, path_p, best_rate)):
            break
        n += 1
        gain += path_p
        if len(cost) == 0:
            best_n = n
        elif gain > best_rate * np.float64(cost[n]):
            best_rate = gain / np.float64(cost[n])
            best_n = n
        follow(table, cursors, tails, parent + 1, n, np.int32(pool_ids[top, 0]), stores)
    return best_n, n
