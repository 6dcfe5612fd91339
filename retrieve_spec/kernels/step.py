"""Step of drafting: a pass is learned and the next draft tree grown in one compiled call.

`propose` first judges the last draft, lets `observe` learn from the emitted tokens, move every cursor over them and
keep the target's top tokens; then it grows the tree and puts it into order. What they read and write lies in the
sources' arrays (`kernels/source_table.py`) and in the request's (`kernels/request.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import calibration, recycling, unigram
from retrieve_spec.kernels import request as state
from retrieve_spec.kernels.compiled_code import making, making_door, part
from retrieve_spec.kernels.expand import expand
from retrieve_spec.kernels.learn import learn
from retrieve_spec.kernels.source_table import (
    CURSOR,
    DENSE,
    DENSE_NUM_SPANS,
    DENSE_ORIGINS,
    EXACT_LENGTH,
    EXACT_SEGMENT,
    KIND,
    NUMBER,
    ORIGIN_BITS,
    PREDICTION_CURSORS,
    RECYCLING,
    RECYCLING_CAPACITY,
    RECYCLING_ENTRIES,
    RECYCLING_K,
    RECYCLING_MEMORY,
    TAIL,
    expected_text,
    recycling_sets,
    suffixes_of,
)
from retrieve_spec.kernels.treemask import (
    BLOCK_ROWS,
    DEPTHS,
    LOG_P,
    ORIGINS,
    PARENTS,
    SOURCES,
    TOKENS,
    node_tails,
)
from retrieve_spec.kernels.views import view_f32, view_f64, view_i32, view_i64, view_i64_rows, view_rows, view_u8

MIN_ORIGIN = 8
"""Tokens that must match before a drafted token is said to stand in a store."""


@part
def observe(
    request: NDArray[np.int64],
    min_p: float,
    emitted: NDArray[np.int32],
    verified: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
    stores: int | None,
) -> int:
    """Follow the emitted tokens with every source, and learn at each.

    Parameters
    ----------
    min_p
        As for `learn.learn`.
    emitted
        (e,) int32 tokens.
    verified
        (BLOCK_ROWS, n) int32, the tree that was verified (`write_tree`), read where top tokens are given.
    top_ids, top_logits
        (n + 1, k) int32 and float32: the target's top tokens after the root and every node, or (0, k).

    Returns
    -------
    int
        How many tokens there was room for in the text's automaton; the caller appends the others.
    """
    table = state.table_of(request)
    rows = len(table)
    newest, noise = state.newest_of(request), state.noise_of(request)
    contexts = len(top_ids)
    tails = np.empty((contexts, recycling.ORDERS), np.int32)
    lens = np.empty(contexts, np.int32)
    if contexts > 0:
        node_tails(verified[TOKENS], verified[PARENTS], newest, request[state.LENGTH], tails, lens)
    state.catch_up(table, request)
    roots = state.stored_cursors(table, request)
    noise[3] = request[state.LENGTH] + request[state.OFFSET]
    unigram.ask_for(table, request[state.CONTEXT] + 1, emitted)
    state.wake(table, request)
    learn(
        table,
        state.cursors_of(request, rows),
        newest,
        request[state.LENGTH],
        state.cells_of(request),
        state.scale_of(request),
        state.trust_of(request),
        state.use_of(request, rows),
        noise,
        min_p,
        emitted,
        state.LATER_EVERY if request[state.SLOW] == 1 and request[state.LEARNED] >= state.FIRST_TOKENS else 1,
        view_i64(request[state.SCRATCH], request[state.WORDS]),
        stores,
    )
    state.choose_sources(table, request)
    request[state.LEARNED] += len(emitted)
    request[state.LENGTH] += len(emitted)
    window = state.follow_stores(table, request, emitted, roots, stores)
    if request[state.PREDICTED] == 1:
        kept = view_i64_rows(table[0, PREDICTION_CURSORS], state.HYPOTHESES, CURSOR)
        recent = window[max(len(window) - state.LOOKBACK, 0) :]
        state.follow_expected(expected_text(table, 0), kept, emitted, recent)
    appended = state.grow_context(table, request, emitted, np.int64(1))
    if contexts > 0:  # last: calibration must not see the answer
        _recycle(table, request, tails, lens, top_ids, top_logits)
    return appended


@part
def _recycle(
    table: NDArray[np.int64],
    request: NDArray[np.int64],
    tails: NDArray[np.int32],
    lens: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
) -> None:
    for s in range(len(table)):
        if table[s, KIND] == RECYCLING:
            entries = view_rows(table[s, RECYCLING_ENTRIES], table[s, RECYCLING_CAPACITY], 2 * table[s, RECYCLING_K])
            memory = view_i64(table[s, RECYCLING_MEMORY], recycling.MEMORY)
            recycling.learn_rows(recycling_sets(table, s), entries, tails, lens, top_ids, top_logits, memory)


@part
def _judge(request: NDArray[np.int64], first: int, size: int, accepted: int, expected: float) -> None:
    """Learn what became of a draft of so many nodes; where none was made, whether it would have begun rightly."""
    counts, first_p = state.drafts_of(request, state.noise_of(request)[0]), view_f64(request[state.FIRST_P], 1)
    if size > 0:
        calibration.learn_draft(counts, expected, accepted)
    elif first_p[0] > 0:
        calibration.learn_first(counts, first_p[0], np.int64(first == request[state.FIRST]))
    first_p[0] = 0.0


@making
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
        (s + 1,) uint8, number of each source row, and of what no source says.
    node_origin
        Output of `find_origins`, or (0,) when it was not asked for.
    token_ids, parents, depths, log_p, sources, origins
        (n,) outputs: the fields of a `DraftTree`.
    """
    n = len(token_ids)
    first, after, stack = np.empty(n + 1, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    first[:] = -1
    place = np.empty(n + 1, np.int32)
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


@part
def write_tree(
    table: NDArray[np.int64],
    nodes: NDArray[np.int64],
    node_p: NDArray[np.float32],
    node_origin: NDArray[np.int64],
    block: NDArray[np.int32],
) -> None:
    """Write the first nodes in depth-first order into a block (`BLOCK_ROWS`, n); the others as for `depth_first`."""
    n, at = block.shape[1], np.int64(block.ctypes.data)
    if n == 0:
        return
    numbers = np.empty(len(table) + 1, np.uint8)
    for s in range(len(table)):
        numbers[s] = table[s, NUMBER]
    numbers[len(table)] = calibration.FORCED
    depth_first(
        nodes,
        node_p,
        numbers,
        node_origin,
        block[TOKENS],
        block[PARENTS],
        block[DEPTHS],
        view_f32(at + 4 * LOG_P * n, n),
        view_u8(at + 4 * SOURCES * n, n),
        view_i64(at + 4 * ORIGINS * n, n),
    )


@part
def find_origins(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    first_row: int,
    num_rows: int,
    num_nodes: int,
    out: NDArray[np.int64],
) -> None:
    """Say where the path to each node stands in a store: longest match over the exact and dense rows, -1 if too short.

    Writes ``out[i] = segment << ORIGIN_BITS | token position`` for the i-th node in best-first order.
    """
    rows = len(table)
    for i in range(num_nodes):
        out[i] = -1
        longest = MIN_ORIGIN - 1
        for e in range(num_rows):
            s = first_row + e
            c = (i + 1) * rows + s
            if cursors[c, 2] <= longest or cursors[c, 0] >= cursors[c, 1]:
                continue
            longest = cursors[c, 2]
            if table[s, KIND] == DENSE:
                out[i] = view_i64(table[s, DENSE_ORIGINS], table[s, DENSE_NUM_SPANS])[cursors[c, 0]] + longest - 1
            else:
                position = np.int64(suffixes_of(table, s)[cursors[c, 0]]) + longest - 1
                if position < table[s, EXACT_LENGTH]:  # a damaged store can say else
                    out[i] = (table[s, EXACT_SEGMENT] << ORIGIN_BITS) | position


@making_door
def propose(
    request: NDArray[np.int64],
    cost: NDArray[np.float32],
    max_nodes: int,
    max_depth: int,
    min_p: float,
    origins: int,
    chain: int,
    least: float,
    emitted: NDArray[np.int32],
    size: int,
    accepted: int,
    expected: float,
    verified: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
    stores: int | None,
) -> tuple[int, float, NDArray[np.int32]]:
    """Take in what the last pass showed, then draft what follows the text.

    Parameters
    ----------
    cost, max_nodes, max_depth, min_p, chain, least
        As for `expand.expand`; with 0 nodes nothing is drafted.
    origins
        1 to say where nodes stand in a store.
    size, accepted, expected
        Nodes that were verified, how many tokens of them were accepted, and how many were expected to be.
    emitted, verified, top_ids, top_logits
        As for `observe`; (0,) tokens where there is nothing to take in.
    stores
        As in `kernels/levels.py`.

    Returns
    -------
    room, expected, tree
        What `observe` returns: where that is less than all, the caller appends the rest, and nothing was drafted yet.
        The sum of the path probabilities of nodes that were not given; the tree as `write_tree` writes it. The
        request's `NODES` and `NODE_P` hold the nodes in best-first order, `FIRST` and `FIRST_P` what the draft begins
        with, or would if it paid. One array only: where caches are empty each takes microseconds to make.
    """
    room = np.int64(0)
    if len(emitted) > 0:
        _judge(request, emitted[0], size, accepted, expected)
        room = observe(request, min_p, emitted, verified, top_ids, top_logits, stores)
    table = state.table_of(request)
    rows = len(table)
    nodes = view_i64_rows(request[state.NODES], max_nodes, 4)
    node_p = view_f32(request[state.NODE_P], max_nodes)
    n = np.int64(0)
    found = np.empty(0, np.int64)
    expected_accepted = 0.0
    if max_nodes > 0 and room == len(emitted):
        n = _grow(table, request, cost, max_depth, min_p, chain, least, nodes, node_p, stores)
        for i in range(request[state.AHEAD], n):
            expected_accepted += np.float64(node_p[i])
        first_p = np.float64(node_p[0]) if request[state.AHEAD] == 0 else 0.0
        request[state.FIRST], view_f64(request[state.FIRST_P], 1)[0] = nodes[0, 0], first_p
        if stores is not None:  # noqa: SIM102 (Numba leaves out the outer branch alone)
            if origins == 1:
                found = np.empty(n, np.int64)
                known = request[state.NUM_STORED] + (1 if request[state.DENSE_ROW] >= 0 else 0)
                cursors = view_i64_rows(request[state.NODE_CURSORS], (max_nodes + 1) * rows, CURSOR)
                find_origins(table, cursors, request[state.STORED], known, n, found)
    tree = np.empty((BLOCK_ROWS, n), np.int32)
    write_tree(table, nodes, node_p, found, tree)
    return room, expected_accepted, tree


@part
def _grow(
    table: NDArray[np.int64],
    request: NDArray[np.int64],
    cost: NDArray[np.float32],
    max_depth: int,
    min_p: float,
    chain: int,
    least: float,
    nodes: NDArray[np.int64],
    node_p: NDArray[np.float32],
    stores: int | None,
) -> int:
    """Write the nodes that are worth verifying, best first; returns how many."""
    rows, max_nodes, pool = len(table), len(nodes), request[state.POOL]
    state.catch_up(table, request)
    noise = state.noise_of(request)
    noise[3] = request[state.LENGTH] + request[state.OFFSET]
    n, _ = expand(
        table,
        state.cursors_of(request, rows),
        state.newest_of(request),
        request[state.LENGTH],
        state.cells_of(request),
        state.scale_of(request),
        state.trust_of(request),
        noise,
        cost,
        max_nodes,
        max_depth,
        min_p,
        calibration.acceptance_ratio(state.drafts_of(request, noise[0])),
        chain,
        least,
        request[state.AHEAD],
        view_i64_rows(request[state.NODE_CURSORS], (max_nodes + 1) * rows, CURSOR),
        view_rows(request[state.NODE_TAILS], max_nodes + 1, TAIL),
        view_f32(request[state.POOL_P], pool),
        view_rows(request[state.POOL_IDS], pool, 3),
        view_i32(request[state.HEAP], pool),
        view_i64(request[state.SCRATCH], request[state.WORDS]),
        nodes,
        node_p,
        stores,
    )
    return np.int64(n)
