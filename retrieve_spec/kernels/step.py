"""Step of drafting: learn from a pass, and grow the next draft tree, in one compiled call.

`propose` first learns from the last draft's acceptance. `observe` then learns from the emitted tokens, advances every
cursor over them, and stores the target's top tokens. Finally `propose` grows the tree and sorts it. All state is in the
records of the sources (`kernels/source_table.py`) and of the request (`kernels/request.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import calibration, hidden_states, levels, recycling, unigram
from retrieve_spec.kernels import request as state
from retrieve_spec.kernels.compiled_code import inlined, inner_with_arrays, kernel_with_arrays
from retrieve_spec.kernels.expand import expand
from retrieve_spec.kernels.learn import learn
from retrieve_spec.kernels.source_table import (
    CURSOR,
    KIND_DENSE,
    KIND_RECYCLING,
    KIND_STATES,
    ORIGIN_BITS,
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
from retrieve_spec.kernels.views import Record, view_f32, view_i8_rows, view_i64, view_i64_rows, view_rows, view_u8

MIN_ORIGIN = 8
"""Shortest match for which a drafted token's origin in a store is given."""


@inlined
def observe(
    request: Record,
    emitted: NDArray[np.int32],
    verified: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
    stores: int | None,
) -> int:
    """Advance every source over the emitted tokens, and learn at each token.

    Parameters
    ----------
    emitted
        (e,) int32 tokens.
    verified
        (BLOCK_ROWS, n) int32 verified tree (`write_tree`), read if top tokens are given.
    top_ids, top_logits
        (n + 1, k) int32 and float32 top tokens of the target after the root and every node, or (0, k).

    Returns
    -------
    int
        How many tokens the text's automaton had room for; the caller appends the others.
    """
    table = state.sources_of(request)
    contexts = len(top_ids)
    root = np.int64(state.newest_of(request)[0, 0])
    tails = np.empty((contexts, recycling.ORDERS), np.int32)
    lens = np.empty(contexts, np.int32)
    if contexts > 0:
        node_tails(verified[TOKENS], verified[PARENTS], state.newest_of(request), request.length, tails, lens)
    state.catch_up(request)
    roots = state.stored_cursors(request)
    request.position = request.length + request.position_offset
    unigram.prefetch_tokens(table[request.text_source + 1].unigram, emitted)
    state.enable_sources(request)
    learns_seldom = request.has_stores == 1 and request.tokens_learned >= state.FIRST_TOKENS
    learn(request, emitted, state.LATER_EVERY if learns_seldom else 1, stores)
    state.disable_sources(request)
    request.tokens_learned += len(emitted)
    request.length += len(emitted)
    window = state.follow_stores(request, emitted, roots, stores)
    if request.has_prediction == 1:
        recent = window[max(len(window) - state.LOOKBACK, 0) :]
        state.follow_expected(expected_text(table[0].prediction), state.expected_cursors(table[0]), emitted, recent)
    appended = state.grow_context(request, emitted, np.int64(1))
    if contexts > 0:  # last, since calibration must not see the answer
        _recycle(table, tails, lens, top_ids, top_logits)
    if stores is not None:  # noqa: SIM102 (Numba leaves out the outer branch alone)
        if request.states_source >= 0:
            _follow_states(request, root, emitted, verified, top_ids, top_logits)
    return appended


@inlined
def _follow_states(
    request: Record,
    root: int,
    emitted: NDArray[np.int32],
    verified: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
) -> None:
    """Learn the hidden states of a pass, and predict from that of the last accepted token; `root` preceded the pass."""
    known = state.sources_of(request)[request.states_source].states
    cursor = state.cursors_of(request)[request.states_source]
    cursor[0], cursor[1] = -1, 0
    if request.keys == 0:
        view_i64(known.meta, hidden_states.META)[hidden_states.LAST] = 0
        return
    keys = view_i8_rows(request.keys, len(top_ids), known.dims)
    tree = verified[TOKENS], verified[PARENTS]
    key = hidden_states.remember(known, root, *tree, emitted, keys, top_ids, top_logits)
    previous = root if len(emitted) == 1 else emitted[len(emitted) - 2]
    cursor[0] = hidden_states.predict(known, key, np.int64(previous), np.int64(emitted[len(emitted) - 1]))


@inlined
def _recycle(
    table: NDArray[Any],
    tails: NDArray[np.int32],
    lens: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
) -> None:
    for s in range(len(table)):
        if table[s].kind == KIND_RECYCLING:
            known = table[s].recycling
            entries = view_rows(known.entries, known.capacity, 2 * known.k)
            memory = view_i64(known.memory, recycling.MEMORY)
            recycling.learn_rows(recycling_sets(known), entries, tails, lens, top_ids, top_logits, memory)


@inlined
def _judge(request: Record, first: int) -> None:
    """Learn from the acceptance of the last draft, or, if none was made, whether its first token would be right."""
    counts = state.drafts_of(request, request.sampled)
    if request.num_verified > 0:
        calibration.learn_draft(counts, request.expected, request.num_accepted)
    elif request.first_p > 0:
        calibration.learn_first(counts, request.first_p, np.int64(first == request.first_token))
    request.first_p = 0.0


@inner_with_arrays
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
    """Write the first nodes (best-first, parents first) in depth-first order, in which first branches are contiguous.

    Parameters
    ----------
    nodes, node_p
        Output of `expand`; the size of the outputs is the number of nodes.
    numbers
        (s + 1,) uint8 number of each source row, and of forced tokens.
    node_origin
        Output of `find_origins`, or (0,) without origins.
    token_ids, parents, depths, log_p, sources, origins
        (n,) outputs, the fields of a `DraftTree`.
    """
    n = len(token_ids)
    first, after, stack = np.empty(n + 1, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    first[:] = -1
    place = np.empty(n + 1, np.int32)
    for i in range(n - 1, -1, -1):
        parent = nodes[i, state.NODE_PARENT] + 1
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
        token_ids[filled] = nodes[at, state.NODE_TOKEN]
        parents[filled] = place[nodes[at, state.NODE_PARENT] + 1]
        depths[filled] = nodes[at, state.NODE_DEPTH]
        log_p[filled] = np.log(node_p[at])
        sources[filled] = numbers[nodes[at, state.NODE_SOURCE]]
        origins[filled] = node_origin[at] if len(node_origin) > 0 else -1
        place[at + 1] = filled
        filled += 1
        stack[top] = at
        top += 1
        at = first[at + 1]
    # Along a first branch, give nodes consecutive origins if they are in one segment.
    for i in range(n - 1, 0, -1):
        known = parents[i] == i - 1 and origins[i] >= 0 and origins[i - 1] >= 0
        if known and origins[i] >> ORIGIN_BITS == origins[i - 1] >> ORIGIN_BITS:
            origins[i - 1] = origins[i] - 1


@inlined
def write_tree(
    table: NDArray[Any],
    nodes: NDArray[np.int64],
    node_p: NDArray[np.float32],
    node_origin: NDArray[np.int64],
    block: NDArray[np.int32],
) -> None:
    """Write the first nodes in depth-first order into a block (`BLOCK_ROWS`, n); arguments as for `depth_first`."""
    n, at = block.shape[1], np.int64(block.ctypes.data)
    if n == 0:
        return
    numbers = np.empty(len(table) + 1, np.uint8)
    for s in range(len(table)):
        numbers[s] = table[s].number
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


@inlined
def find_origins(request: Record, num_nodes: int, out: NDArray[np.int64]) -> None:
    """Find each node's origin: the longest match of its path with suffix arrays and neighbours.

    Writes ``out[i] = segment << ORIGIN_BITS | token position`` for the i-th node in best-first order, -1 if the match
    is shorter than `MIN_ORIGIN`.
    """
    table = state.sources_of(request)
    rows, first = len(table), request.first_exact
    num_rows = request.num_exact + (1 if request.dense_source >= 0 else 0)
    cursors = view_i64_rows(request.node_cursors, (num_nodes + 1) * rows, CURSOR)
    for i in range(num_nodes):
        out[i] = -1
        longest = MIN_ORIGIN - 1
        for s in range(first, first + num_rows):
            c = (i + 1) * rows + s
            lo, hi, depth = cursors[c, 0], cursors[c, 1], cursors[c, 2]
            if depth <= longest or lo >= hi:
                continue
            longest = depth
            if table[s].kind == KIND_DENSE:
                neighbours = table[s].dense
                out[i] = view_i64(neighbours.origins, neighbours.num_spans)[lo] + depth - 1
            else:
                segment = table[s].exact
                position = np.int64(suffixes_of(segment)[lo]) + depth - 1
                if position < segment.length:  # may be wrong in a damaged store
                    out[i] = (segment.segment << ORIGIN_BITS) | position


@kernel_with_arrays
def propose(
    address: int,
    cost: NDArray[np.float32],
    max_nodes: int,
    max_depth: int,
    chain: int,
    emitted: NDArray[np.int32],
    verified: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
    stores: int | None,
) -> tuple[int, float, NDArray[np.int32]]:
    """Learn from the last pass, then draft the next tree.

    Parameters
    ----------
    address
        Address of the request, whose `num_verified`, `num_accepted` and `expected` describe the last draft.
    cost, max_nodes, max_depth, chain
        As for `expand.expand`; with 0 nodes, nothing is drafted.
    emitted, verified, top_ids, top_logits
        As for `observe`; (0,) tokens if there is nothing to learn.
    stores
        As in `kernels/levels.py`.

    Returns
    -------
    room, expected, tree
        Return value of `observe`: if it is less than all tokens, the caller appends the rest, and nothing was drafted.
        Sum of the path probabilities of nodes that are not forced. The tree, as written by `write_tree`. The request's
        `nodes` and `node_p` hold the nodes in best-first order; `first_token` and `first_p` are the draft's first token
        and its probability, even if no draft pays. There is one array only, because making one takes microseconds when
        caches are cold.
    """
    request = state.request_at(address)
    room = np.int64(0)
    if len(emitted) > 0:
        _judge(request, emitted[0])
        room = observe(request, emitted, verified, top_ids, top_logits, stores)
    nodes, node_p = state.nodes_of(request, max_nodes), view_f32(request.node_p, max_nodes)
    n = np.int64(0)
    found = np.empty(0, np.int64)
    expected_accepted = 0.0
    if max_nodes > 0 and room == len(emitted):
        state.catch_up(request)
        request.position = request.length + request.position_offset
        acceptance = calibration.acceptance_ratio(state.drafts_of(request, request.sampled))
        n, _ = expand(request, cost, max_nodes, max_depth, acceptance, chain, stores)
        for i in range(request.num_forced, n):
            expected_accepted += np.float64(node_p[i])
        request.first_token = nodes[0, state.NODE_TOKEN]
        request.first_p = np.float64(node_p[0]) if request.num_forced == 0 else 0.0
        if stores is not None:  # noqa: SIM102 (Numba leaves out the outer branch alone)
            if request.find_origins == 1:
                found = np.empty(n, np.int64)
                find_origins(request, n, found)
    tree = np.empty((BLOCK_ROWS, n), np.int32)
    write_tree(state.sources_of(request), nodes, node_p, found, tree)
    return room, expected_accepted, tree


@kernel_with_arrays
def longest_match(address: int, stores: int | None) -> int:
    """Return the longest match length of any source at the text's end, except for similar hidden states."""
    request = state.request_at(address)
    state.catch_up(request)
    table, cursors = state.sources_of(request), state.cursors_of(request)
    hashes = np.full((2, TAIL), recycling.NO_CONTEXT, np.uint64)
    longest = np.int64(-1)
    for s in range(request.first_exact + request.num_exact):
        if table[s].kind == KIND_STATES:
            continue
        longest = max(longest, levels.open_row(table[s], cursors, s, hashes, np.int64(0), stores)[1])
    return longest
