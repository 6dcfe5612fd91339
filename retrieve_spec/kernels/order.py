"""Numba kernels around a grown draft tree: its order, the contexts of its nodes, where they stand in a store."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, part
from retrieve_spec.kernels.source_table import (
    DENSE,
    EXACT_LENGTH,
    EXACT_SEGMENT,
    KIND,
    NUMBER,
    span_origins,
    suffixes_of,
)
from retrieve_spec.kernels.views import view_f32, view_i64, view_u8

ORIGIN_BITS = 40
"""An origin is ``segment << ORIGIN_BITS | token position``, segments counted over all open stores in order."""
MIN_ORIGIN = 8
"""Tokens that must match before a drafted token is said to stand in a store."""
ORIGINS, TOKENS, PARENTS, DEPTHS, LOG_P, SOURCES, BLOCK_ROWS = 0, 2, 3, 4, 5, 6, 7
"""Rows of the block (`BLOCK_ROWS`, n) int32 that a tree is handed over in: n int64 in the first two, n float32, n uint8
in the last, all others int32."""


@inner
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
    numbers = np.empty(len(table), np.uint8)
    for s in range(len(table)):
        numbers[s] = table[s, NUMBER]
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
                out[i] = span_origins(table, s)[cursors[c, 0]] + longest - 1
            else:
                position = np.int64(suffixes_of(table, s)[cursors[c, 0]]) + longest - 1
                if position < table[s, EXACT_LENGTH]:  # a damaged store can say else
                    out[i] = (table[s, EXACT_SEGMENT] << ORIGIN_BITS) | position


@part
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
