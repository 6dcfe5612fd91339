"""Numba kernels that grow a draft tree best-first from the sources' cursors."""

from __future__ import annotations

from typing import Any

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
from retrieve_spec.kernels.compiled_code import inlined, inner, inner_with_arrays
from retrieve_spec.kernels.levels import advance_row
from retrieve_spec.kernels.request import (
    NODE_DEPTH,
    NODE_PARENT,
    NODE_SOURCE,
    NODE_TOKEN,
    cursors_of,
    newest_of,
    nodes_of,
    scale_of,
    sources_of,
)
from retrieve_spec.kernels.sampling import noise_key, uniform
from retrieve_spec.kernels.source_table import (
    CURSOR,
    KIND_BIGRAMS,
    KIND_DISTILLED,
    KIND_PHRASES,
    KIND_RECYCLING,
    TAIL,
    recycling_sets,
)
from retrieve_spec.kernels.views import Record, prefetch, view_f32, view_i32, view_i64, view_i64_rows, view_rows

NEGLIGIBLE = 0.2
"""Shares below this part of the smallest useful probability are not added up."""
POOL_TOKEN, POOL_PARENT, POOL_SOURCE, POOL_COLUMNS = 0, 1, 2, 3
"""Columns of the candidates that were found so far (m, `POOL_COLUMNS`) int32."""
RANKS = 72
"""Number of bins of candidates' probabilities, for pruning."""


@inner
def _before(pool_p: NDArray[np.float32], pool_ids: NDArray[np.int32], a: int, b: int) -> bool:
    """Whether a candidate precedes another: higher probability, then lower token id, then earlier."""
    if pool_p[a] != pool_p[b]:
        return bool(pool_p[a] > pool_p[b])
    if pool_ids[a, POOL_TOKEN] != pool_ids[b, POOL_TOKEN]:
        return bool(pool_ids[a, POOL_TOKEN] < pool_ids[b, POOL_TOKEN])
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
    """Turn probabilities into probabilities given the noise with which the sample will be drawn.

    The target's token is the argmax of ``p_i / E_i``, where the exponential ``E_i`` is known (Gumbel-max sampling with
    counter-based noise) and only ``p_i`` is estimated. The less the estimates know, the less the noise says: a target
    that is sure of its token draws it with any noise. So the chance to win is taken as proportional to
    ``p_i / sqrt(E_i)`` (docs/drafting.md compares exponents). The mass of all other tokens competes with its median
    noise, ln 2.
    """
    others = 1.0
    for i in range(n):
        others -= np.float64(probs[i])
    total = max(others, 0.0) / np.sqrt(0.6931)
    for i in range(n):
        score = np.float64(probs[i]) / np.sqrt(-np.log(uniform(key, tokens[i])))
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
    """Return the bin of a path probability; there are six per factor of two."""
    return min(int(-6.0 * np.log2(max(p, 1e-9))), RANKS - 1)


@inner
def _cutoff(ranks: NDArray[np.int64], max_nodes: int) -> float:
    """Return a probability below which no further candidate can be among the ``max_nodes`` best."""
    above = 0
    for i in range(RANKS - 1):  # the last bin has no lower end
        above += ranks[i]
        if above >= max_nodes:
            return np.float64(2.0 ** (-(i + 1) / 6.0))
    return 0.0


@inner
def follow(
    table: NDArray[Any],
    cursors: NDArray[np.int64],
    tails: NDArray[np.int32],
    above: int,
    at: int,
    token: int,
    stores: int | None,
) -> None:
    """Advance the newest tokens and cursors of place ``above`` by a token, and write them to place ``at``."""
    tails[at, 0] = token
    for i in range(1, TAIL):
        tails[at, i] = tails[above, i - 1]
    rows = len(table)
    for s in range(rows):
        source = table[s]
        if source.kind == KIND_RECYCLING or source.kind == KIND_PHRASES or source.kind == KIND_DISTILLED:
            # Read only after the automata have advanced.
            recycling.prefetch_contexts(recycling_sets(source.recycling), tails, at)
        elif source.kind == KIND_BIGRAMS:
            known = source.recycling
            prefetch(known.entries + 8 * known.k * min(token, known.capacity))
    for s in range(rows):
        if table[s].disabled == 0:
            advance_row(table[s], cursors, above * rows + s, token, cursors, at * rows + s, stores)


@inlined
def _start(request: Record, cursors: NDArray[np.int64], tails: NDArray[np.int32]) -> None:
    """Copy the text's cursors and newest tokens to the root's place, and discard candidates of earlier trees."""
    view_i64(request.scratch + SLOTS, HASH)[:] = 0
    root, newest = cursors_of(request), newest_of(request)
    for s in range(len(root)):
        for j in range(CURSOR):
            cursors[s, j] = root[s, j]
    for j in range(TAIL):
        tails[0, j] = newest[0, j]


@inlined
def _add_candidates(
    request: Record,
    count: int,
    path_p: float,
    parent: int,
    least: float,
    cutoff: float,
    ranks: NDArray[np.int64],
    pool: int,
    waiting: int,
) -> tuple[int, int]:
    """Add a node's candidate children to the pool and the heap.

    Parameters
    ----------
    count
        Candidates in the scratch.
    path_p, parent
        Path probability and number of the node; -1 for the root.
    least, cutoff
        Smallest probability of a candidate, and of its path.
    ranks
        (RANKS,) int64 numbers of added candidates by path probability; updated.
    pool, waiting
        Numbers of candidates in the pool, and of these in the heap.

    Returns
    -------
    pool, waiting
        The new numbers.
    """
    table, scale, room = sources_of(request), scale_of(request), request.pool_size
    tokens, probs = view_i32(request.scratch + CANDIDATES, count), view_f32(request.scratch + SHARES, count)
    credit = view_i64(request.scratch + CREDIT, count)
    pool_p, pool_ids = view_f32(request.pool_p, room), view_rows(request.pool_ids, room, POOL_COLUMNS)
    heap = view_i32(request.heap, room)
    for i in range(count):
        if probs[i] < least or pool >= room:
            continue
        number = request.sampled * NUM_SOURCES + table[credit[i]].number
        p = min(path_p * scaled(scale, number, np.float64(probs[i])), CERTAIN)
        if p < cutoff:
            continue
        pool_p[pool] = p
        pool_ids[pool, POOL_TOKEN] = tokens[i]
        pool_ids[pool, POOL_PARENT] = parent
        pool_ids[pool, POOL_SOURCE] = credit[i]
        _push(heap, waiting, pool, pool_p, pool_ids)
        ranks[_rank(p)] += 1
        waiting += 1
        pool += 1
    return pool, waiting


@inlined
def _take_best(request: Record, waiting: int, nodes: NDArray[np.int64], n: int) -> float:
    """Write the most probable waiting candidate as the n-th node; return its path probability."""
    room = request.pool_size
    pool_p, pool_ids = view_f32(request.pool_p, room), view_rows(request.pool_ids, room, POOL_COLUMNS)
    heap = view_i32(request.heap, room)
    top = heap[0]
    _pop(heap, waiting, pool_p, pool_ids)
    parent = pool_ids[top, POOL_PARENT]
    nodes[n, NODE_TOKEN] = pool_ids[top, POOL_TOKEN]
    nodes[n, NODE_PARENT] = parent
    nodes[n, NODE_DEPTH] = 1 if parent < 0 else nodes[parent, NODE_DEPTH] + 1
    nodes[n, NODE_SOURCE] = pool_ids[top, POOL_SOURCE]
    return np.float64(pool_p[top])


@inner_with_arrays
def expand(
    request: Record,
    cost: NDArray[np.float32],
    max_nodes: int,
    max_depth: int,
    acceptance: float,
    chain: int,
    stores: int | None,
) -> tuple[int, int]:
    """Grow the tree by the nodes of highest path probability, as long as they pay.

    Parameters
    ----------
    request
        The text's request. Its `nodes` (`nodes_of`) and `node_p` (max_nodes,) float32 are written, best first. They
        begin with a given chain of `num_forced` nodes. The node after that is written even if it does not pay; its
        probability is 0 if there is none.
    cost
        (max_nodes + 1,) float32 seconds of a pass over n nodes, or (0,) to fill the budget.
    acceptance
        Factor of all path probabilities (`calibration.acceptance_ratio`).
    chain
        1 to follow only the most probable token at every node, 0 for a tree.

    Returns
    -------
    n, grown
        Numbers of nodes worth verifying (a prefix), and of all written nodes.
    """
    table = sources_of(request)
    rows = len(table)
    cursors = view_i64_rows(request.node_cursors, (max_nodes + 1) * rows, CURSOR)
    tails = view_rows(request.node_tails, max_nodes + 1, TAIL)
    nodes, node_p = nodes_of(request, max_nodes), view_f32(request.node_p, max_nodes)
    tokens, probs = (
        view_i32(request.scratch + CANDIDATES, MAX_CANDIDATES),
        view_f32(request.scratch + SHARES, MAX_CANDIDATES),
    )
    _start(request, cursors, tails)
    forced, sampled = request.num_forced, request.sampled
    if forced < max_nodes:
        node_p[forced] = 0.0
    ranks = np.zeros(RANKS, np.int64)
    cutoff = 0.0
    pool = waiting = np.int64(0)
    n = best_n = np.int64(forced)
    gain = 1.0
    depth = n
    path_p = min(acceptance, 1.0) * np.float64(node_p[n - 1]) if n > 0 else acceptance  # never above its parent's
    for i in range(forced):
        gain += np.float64(node_p[i])
        follow(table, cursors, tails, i, i + 1, np.int32(nodes[i, NODE_TOKEN]), stores)
    best_rate = gain / np.float64(cost[n]) if len(cost) > 0 else 0.0
    while True:  # the root, then every node in order; the n-th has row n of cursors and tails
        if depth < max_depth and n < max_nodes:
            valid = min(request.length + depth, TAIL)
            # No candidate below `cutoff` can be among the best, so levels with too little mass for one are not read.
            least = max(request.min_p, cutoff) / path_p
            mass = MASS_FLOOR if sampled else max(least, MASS_FLOOR)
            negligible = 0.0 if sampled else NEGLIGIBLE * least  # with known noise, a small share can win
            k = collect_levels(request, cursors, n * rows, tails, n, valid, mass, stores)
            c = blend(request, cursors, n * rows, k, negligible, n + 1, stores)
            if sampled:
                couple(tokens, probs, c, noise_key(request.seed, request.row, request.position + depth))
            pool, waiting = _add_candidates(request, c, path_p, n - 1, least, cutoff, ranks, pool, waiting)
            if chain == 1:
                waiting = min(waiting, np.int64(1))
            elif pool >= max_nodes:
                cutoff = _cutoff(ranks, max_nodes)
        if waiting == 0 or n >= max_nodes:
            break
        path_p = node_p[n] = _take_best(request, waiting, nodes, n)
        waiting -= 1
        depth = nodes[n, NODE_DEPTH]
        if path_p < request.least_p or (len(cost) > 0 and not best_possible(cost, n, gain, path_p, best_rate)):
            break
        n += 1
        gain += path_p
        if len(cost) == 0:
            best_n = n
        elif gain > best_rate * np.float64(cost[n]):
            best_rate = gain / np.float64(cost[n])
            best_n = n
        above, token = nodes[n - 1, NODE_PARENT] + 1, np.int32(nodes[n - 1, NODE_TOKEN])
        follow(table, cursors, tails, above, n, token, stores)
    return best_n, n
