"""Numba kernel of SuffixDecoding's rule: the best-scored tree behind a matched state of a suffix automaton."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.automaton import (
    COUNT,
    COUNTED,
    E_COUNT,
    E_NEXT,
    E_TARGET,
    E_TOKEN,
    LENGTH,
    LINK,
    TARGET,
    TOKEN,
)
from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.views import borrowed

F_STATE, F_TOKEN, F_PARENT, F_DEPTH, F_COUNT = range(5)


@njit(cache=True, nogil=True, inline="always")
def _push(
    front: NDArray[np.int64],
    front_p: NDArray[np.float64],
    n: int,
    state: int,
    token: int,
    parent: int,
    depth: int,
    count: int,
    p: float,
    min_p: float,
) -> int:
    if p < min_p or n == len(front):
        return n
    front[n, F_STATE] = state
    front[n, F_TOKEN] = token
    front[n, F_PARENT] = parent
    front[n, F_DEPTH] = depth
    front[n, F_COUNT] = count
    front_p[n] = p
    return n + 1


@inner
def grow(
    states: NDArray[np.int32],
    edges: NDArray[np.int32],
    start: int,
    ends: int,
    max_nodes: int,
    max_depth: int,
    min_p: float,
    nodes: NDArray[np.int32],
    node_p: NDArray[np.float64],
) -> tuple[int, float, int]:
    """Take the continuations of a state in the order of their path probability.

    A child's probability is its count over the occurrences of its parent; of equals the one found first goes first.

    Parameters
    ----------
    states, edges
        The automaton (`retrieve_spec.kernels.automaton`).
    start
        State of the match.
    ends
        Occurrences of the match at the end of the text, which nothing follows.
    max_nodes, max_depth, min_p
        Where to stop.
    nodes, node_p
        (≥ max_nodes, 2) tokens and parents and (≥ max_nodes,) path probabilities, filled.

    Returns
    -------
    tuple
        Number of nodes, the sum of their probabilities and the depth of the deepest.
    """
    front = np.empty((256, 5), np.int64)
    front_p = np.empty(256, np.float64)
    n_front = 0
    taken = 0
    deepest = np.int64(0)
    score = 0.0
    state = np.int64(start)
    occurrences = np.int64(states[state, COUNT]) + ends
    parent = np.int64(-1)
    depth = np.int64(0)
    p = 1.0
    while True:
        if depth < max_depth:
            first = states[state, TOKEN]
            if first >= 0:
                c = states[state, COUNT]
                share = p * c / occurrences
                n_front = _push(
                    front, front_p, n_front, states[state, TARGET], first, parent, depth + 1, c, share, min_p
                )
            elif first < -1:
                e = states[state, TARGET]
                while e >= 0:
                    c = edges[e, E_COUNT]
                    share = p * c / occurrences
                    n_front = _push(
                        front,
                        front_p,
                        n_front,
                        edges[e, E_TARGET],
                        edges[e, E_TOKEN],
                        parent,
                        depth + 1,
                        c,
                        share,
                        min_p,
                    )
                    e = edges[e, E_NEXT]
        if n_front == 0 or taken >= max_nodes:
            return taken, score, deepest
        best = 0
        for i in range(1, n_front):
            if front_p[i] > front_p[best]:
                best = i
        p = front_p[best]
        state = front[best, F_STATE]
        depth = front[best, F_DEPTH]
        nodes[taken, 0] = front[best, F_TOKEN]
        nodes[taken, 1] = front[best, F_PARENT]
        node_p[taken] = p
        score += p
        parent = taken
        taken += 1
        deepest = max(deepest, depth)
        # Contexts of at most COUNTED tokens are counted exactly; longer ones once per continuation.
        occurrences = np.int64(states[state, COUNT])
        if states[states[state, LINK], LENGTH] < COUNTED:
            occurrences = max(occurrences, front[best, F_COUNT])
        n_front -= 1
        for i in range(best, n_front):  # keeps the order in which they were found
            front[i] = front[i + 1]
            front_p[i] = front_p[i + 1]


@njit(cache=True, nogil=True)
def speculate(
    states: NDArray[np.int32],
    edges: NDArray[np.int32],
    state: int,
    matched: int,
    ends: int,
    factor: float,
    offset: float,
    max_nodes: int,
    max_depth: int,
    tree_depth: int,
    min_p: float,
    nodes: NDArray[np.int32],
    node_p: NDArray[np.float64],
) -> tuple[int, float]:
    """Draft from every suffix of the match and keep the tree of the highest score, of equals that of the longest.

    Parameters
    ----------
    state, matched
        Longest suffix of the text that occurred before.
    factor, offset
        A match of m tokens drafts at most ``factor · m + offset`` nodes.
    tree_depth
        Match and draft together are at most this long.
    nodes, node_p
        As in `grow`; hold the best tree on return.

    Returns
    -------
    tuple
        Number of nodes and score.
    """
    states, edges = borrowed(states), borrowed(edges)
    chain = np.empty(tree_depth, np.int64)
    longest = min(matched, tree_depth - 1)
    s = np.int64(state)
    for m in range(longest, 0, -1):
        while states[states[s, LINK], LENGTH] >= m:
            s = np.int64(states[s, LINK])
        chain[m] = s
    best_n = 0
    best = 0.0
    whole = np.int64(-1)  # state whose last tree no limit had cut, and how deep that was
    reach = np.int64(0)
    trial = np.empty((max_nodes, 2), np.int32)
    trial_p = np.empty(max_nodes, np.float64)
    for m in range(1, longest + 1):
        limit = np.int64(min(max_nodes, np.int64(factor * m + offset + 1e-6)))
        depth = np.int64(min(max_depth, tree_depth - m))
        if chain[m] == whole and reach < depth:
            continue
        n, score, reach = grow(states, edges, chain[m], ends, limit, depth, min_p, trial, trial_p)
        whole = chain[m] if n < limit and reach < depth else np.int64(-1)
        if score >= best:
            best = score
            best_n = n
            nodes[:n] = trial[:n]
            node_p[:n] = trial_p[:n]
    return best_n, best
