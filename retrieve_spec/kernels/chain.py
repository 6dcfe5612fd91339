"""Numba kernel that grows one branch from the sources' cursors: at every place the most probable next token alone.

For engines that verify chains: what a tree spends on other branches is not looked up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.blend import MASS_FLOOR, blend, collect_levels, open_scratch
from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.expand import NEGLIGIBLE, begin, best_possible, follow
from retrieve_spec.kernels.scale import CERTAIN, scaled
from retrieve_spec.kernels.source_table import NUMBER, TAIL


@inner
def grow_chain(
    table: NDArray[np.int64],
    root_cursors: NDArray[np.int64],
    tail: NDArray[np.int32],
    tail_len: int,
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    trust: NDArray[np.float64],
    cost: NDArray[np.float32],
    min_p: float,
    promise: float,
    least: float,
    cursors: NDArray[np.int64],
    tails: NDArray[np.int32],
    memory: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    log_p: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> int:
    """Take the most probable next token again and again, as long as that pays.

    Parameters
    ----------
    table, root_cursors, tail, tail_len, cells, scale, trust, min_p, promise, memory
        As for `expand.expand`.
    cost
        (m,) float32 seconds of a pass over n nodes, m > the longest chain, or (0,) to go on to the end.
    least
        Probability of a path below which no node pays.
    cursors, tails
        As for `expand.expand`, with room for the longest chain.
    token_ids, log_p, sources
        Output, as long as the longest chain: token, logarithm of the path's probability, number of the source. The
        first is there also where it does not pay; its logarithm is -inf where there is none.

    Returns
    -------
    int
        Nodes worth verifying.
    """
    rows = len(table)
    scratch = open_scratch(memory, rows)
    tokens, probs, credit = scratch.tokens, scratch.probs, scratch.credit
    begin(root_cursors, tail, cursors, tails)
    n = best_n = 0
    gain = 1.0
    best_rate = 1.0 / np.float64(cost[0]) if len(cost) > 0 else 0.0
    path_p = promise
    if len(log_p) > 0:
        log_p[0] = -np.inf
    while n < len(token_ids):
        worth = min_p / path_p
        mass = max(worth, MASS_FLOOR)
        k = collect_levels(table, cursors, n * rows, tails, n, min(tail_len + n, TAIL), cells, trust, mass, memory)
        c = blend(table, cursors, n * rows, cells, k, NEGLIGIBLE * worth, n + 1, memory)
        best = -1
        best_p = np.float32(0.0)
        for i in range(c):
            if probs[i] < worth:
                continue
            p = np.float32(min(path_p * scaled(scale, table[credit[i], NUMBER], np.float64(probs[i])), CERTAIN))
            if best < 0 or p > best_p or (p == best_p and tokens[i] < tokens[best]):
                best, best_p = i, p
        if best < 0:
            break
        path_p = np.float64(best_p)
        token = np.int32(tokens[best])
        token_ids[n] = token
        log_p[n] = np.log(best_p)
        sources[n] = table[credit[best], NUMBER]
        if path_p < least or (len(cost) > 0 and not best_possible(cost, n, gain, path_p, best_rate)):
            break
        n += 1
        gain += path_p
        if len(cost) == 0:
            best_n = n
        elif gain > best_rate * np.float64(cost[n]):
            best_rate = gain / np.float64(cost[n])
            best_n = n
        if n < len(token_ids):
            follow(table, cursors, tails, n - 1, n, token)
    return best_n
