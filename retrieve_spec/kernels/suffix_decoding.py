"""Numba kernel of SuffixDecoding's rule: the best-scored tree after a matched state of a suffix automaton."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.automaton import COUNT, COUNTED, LENGTH, LINK, degree, step, successors
from retrieve_spec.kernels.compiled_code import inner_with_arrays, kernel_with_arrays

_WAITING = 256
"""Most waiting continuations."""
F_STATE, F_TOKEN, F_PARENT, F_DEPTH, F_COUNT = range(5)


@inner_with_arrays
def _grow(
    states: NDArray[np.int32],
    edges: NDArray[np.int32],
    slots: NDArray[np.int32],
    start: int,
    max_nodes: int,
    max_depth: int,
    min_p: float,
    nodes: NDArray[np.int32],
    node_p: NDArray[np.float64],
) -> tuple[int, float, int]:
    """Draft from a state in order of path probability; return number of nodes, score, and largest depth.

    A child's probability is its count over the occurrences of its parent, including the end of the text; of equals, the
    one found first comes first.
    """
    front, front_p = np.empty((_WAITING, 5), np.int64), np.empty(_WAITING, np.float64)
    waiting = taken = 0
    parent, depth, deepest = np.int64(-1), np.int64(0), np.int64(0)
    p, score = 1.0, 0.0
    state = np.int64(start)
    occurrences = np.int64(states[state, COUNT]) + 1
    while True:
        size = degree(states, state) if depth < max_depth else 0
        tokens, counts = np.empty(size, np.int32), np.empty(size, np.int32)
        n = successors(states, edges, state, size, 0.0, tokens, counts) if size > 0 else 0
        for i in range(n):
            share = p * counts[i] / occurrences
            if share < min_p or waiting == _WAITING:
                continue
            front[waiting, F_STATE] = step(states, edges, slots, state, tokens[i])
            front[waiting, F_TOKEN], front[waiting, F_COUNT] = tokens[i], counts[i]
            front[waiting, F_PARENT], front[waiting, F_DEPTH] = parent, depth + 1
            front_p[waiting] = share
            waiting += 1
        if waiting == 0 or taken >= max_nodes:
            return taken, score, deepest
        best = 0
        for i in range(1, waiting):
            if front_p[i] > front_p[best]:
                best = i
        p, state, depth = front_p[best], front[best, F_STATE], front[best, F_DEPTH]
        nodes[taken, 0], nodes[taken, 1] = front[best, F_TOKEN], front[best, F_PARENT]
        node_p[taken] = p
        score += p
        parent = np.int64(taken)
        taken += 1
        deepest = max(deepest, depth)
        # Contexts of at most COUNTED tokens are counted exactly; longer ones once per continuation.
        occurrences = np.int64(states[state, COUNT])
        if states[states[state, LINK], LENGTH] < COUNTED:
            occurrences = max(occurrences, front[best, F_COUNT])
        waiting -= 1
        for i in range(best, waiting):  # keeps the order of discovery
            front_p[i] = front_p[i + 1]
            for j in range(5):
                front[i, j] = front[i + 1, j]


@kernel_with_arrays
def speculate(
    states: NDArray[np.int32],
    edges: NDArray[np.int32],
    slots: NDArray[np.int32],
    cursor: tuple[int, int],
    factor: float,
    max_depth: int,
    tree_depth: int,
    min_p: float,
    nodes: NDArray[np.int32],
    node_p: NDArray[np.float64],
) -> tuple[int, float]:
    """Draft from every suffix of the match, and keep the tree with the highest score; ties go to the longest suffix.

    Parameters
    ----------
    states, edges, slots
        The automaton (`retrieve_spec.kernels.automaton`).
    cursor
        State and length of the longest suffix of the text that occurred before.
    factor
        A match of m tokens drafts at most ``factor · m`` nodes.
    max_depth, min_p
        Limits of depth and path probability.
    tree_depth
        Limit of match length plus depth.
    nodes, node_p
        (n, 2) tokens and parents, and (n,) path probabilities, of the best tree of at most n nodes; outputs.

    Returns
    -------
    tuple
        Number of nodes and score.
    """
    state, matched = cursor
    max_nodes = len(nodes)
    chain = np.empty(tree_depth, np.int64)
    longest = min(matched, tree_depth - 1)
    s = np.int64(state)
    for m in range(longest, 0, -1):
        while states[states[s, LINK], LENGTH] >= m:
            s = np.int64(states[s, LINK])
        chain[m] = s
    best_n, best = 0, 0.0
    whole, reach = np.int64(-1), np.int64(0)  # last state whose tree was not cut by a limit, and the tree's depth
    trial, trial_p = np.empty((max_nodes, 2), np.int32), np.empty(max_nodes, np.float64)
    for m in range(1, longest + 1):
        limit = np.int64(min(max_nodes, np.int64(factor * m + 1e-6)))
        depth = np.int64(min(max_depth, tree_depth - m))
        if chain[m] == whole and reach < depth:
            continue
        n, score, reach = _grow(states, edges, slots, chain[m], limit, depth, min_p, trial, trial_p)
        whole = chain[m] if n < limit and reach < depth else np.int64(-1)
        if score >= best:
            best_n, best = n, score
            nodes[:n] = trial[:n]
            node_p[:n] = trial_p[:n]
    return best_n, best
