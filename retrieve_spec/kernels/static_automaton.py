"""Static suffix automaton of a segment's text: a compact cursor machine that answers as its suffix array does.

State i ≤ n stands for the first i tokens of the text (state 0 for none), the states above for shorter strings that
occur in several contexts. So the edge from state i by ``tokens[i]`` to i + 1 is never stored, nor is the length of the
first n + 1 states; all other edges lie in compressed rows, sorted by token. A state's count says how often its strings
occur in documents that can be drafted from, and a state whose count is 0 is not there.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from retrieve_spec.kernels.compiled_code import inner

_NONE = np.int64(-1)


@inner
def _slot(keys, key):  # type: ignore[no-untyped-def]
    """Slot of an edge (state << 32 | token), or the free slot where it belongs."""
    mask = len(keys) - 1
    at = ((key >> 29) ^ (key * 40503) ^ (key >> 7)) & mask
    while keys[at] != _NONE and keys[at] != key:
        at = (at + 1) & mask
    return at


@njit(cache=True, nogil=True)
def automaton_states(tokens, link, length, keys, targets, heads, next_edge):  # type: ignore[no-untyped-def]
    """Build the automaton of a text (Blumer et al., 1985), token by token.

    Parameters
    ----------
    tokens
        (n,) local ids, separators included.
    link, length, heads
        (2n + 2,) int64, filled for each state: suffix link, longest string, first slot of its list of edges.
    keys, targets, next_edge
        (a power of two ≥ 6n + 8,) int64, hash table of edges, with the list of each state's slots.

    Returns
    -------
    int
        Number of states.
    """
    keys[:] = _NONE
    heads[:] = _NONE
    link[0] = -1
    length[0] = 0
    states = len(tokens) + 1
    for i in range(len(tokens)):
        token = np.int64(tokens[i])
        new = i + 1
        length[new] = new
        at = np.int64(i)
        slot = _slot(keys, (at << 32) | token)
        while at >= 0 and keys[slot] == _NONE:
            _add(keys, targets, heads, next_edge, slot, at, token, new)
            at = link[at]
            if at >= 0:
                slot = _slot(keys, (at << 32) | token)
        if at < 0:
            link[new] = 0
            continue
        target = targets[slot]
        if length[target] == length[at] + 1:
            link[new] = target
            continue
        clone = np.int64(states)
        states += 1
        length[clone] = length[at] + 1
        link[clone] = link[target]
        edge = heads[target]
        while edge >= 0:
            copied = keys[edge] & 0xFFFFFFFF
            free = _slot(keys, (clone << 32) | copied)
            _add(keys, targets, heads, next_edge, free, clone, copied, targets[edge])
            edge = next_edge[edge]
        while at >= 0:
            slot = _slot(keys, (at << 32) | token)
            if targets[slot] != target:
                break
            targets[slot] = clone
            at = link[at]
        link[target] = clone
        link[new] = clone
    return states


@inner
def _add(keys, targets, heads, next_edge, slot, state, token, target):  # type: ignore[no-untyped-def]
    keys[slot] = (state << 32) | token
    targets[slot] = target
    next_edge[slot] = heads[state]
    heads[state] = slot


@njit(cache=True, nogil=True)
def count_states(link, length, counts):  # type: ignore[no-untyped-def]
    """Add the count of every state to those of its links, longest first: in place, (states,) int64."""
    longest = 0
    for s in range(len(length)):
        longest = max(longest, length[s])
    begin = np.zeros(longest + 2, np.int64)
    for s in range(len(length)):
        begin[length[s] + 1] += 1
    for i in range(longest + 1):
        begin[i + 1] += begin[i]
    order = np.empty(len(length), np.int64)
    for s in range(len(length)):
        order[begin[length[s]]] = s
        begin[length[s]] += 1
    for i in range(len(order) - 1, 0, -1):
        counts[link[order[i]]] += counts[order[i]]


@inner
def automaton_length(n, clone_lengths, state):  # type: ignore[no-untyped-def]
    """Length of the longest string of a state."""
    return np.int64(state) if state <= n else np.int64(clone_lengths[state - n - 1])


@njit(cache=True, nogil=True)
def automaton_follow(tokens, counts, first, edge_tokens, edge_targets, state, token):  # type: ignore[no-untyped-def]
    """State after one more token, or -1 where the string does not occur."""
    if state < len(tokens) and tokens[state] == token:
        return np.int64(state + 1) if counts[state + 1] else _NONE
    lo = np.int64(first[state])
    hi = np.int64(first[state + 1])
    end = hi
    while lo < hi:
        mid = (lo + hi) >> 1
        if edge_tokens[mid] < token:
            lo = mid + 1
        else:
            hi = mid
    if lo < end and edge_tokens[lo] == token and counts[edge_targets[lo]]:
        return np.int64(edge_targets[lo])
    return _NONE


@njit(cache=True, nogil=True)
def automaton_extend(  # type: ignore[no-untyped-def]
    tokens, counts, link, clone_lengths, first, edge_tokens, edge_targets, state, depth, token
):
    """Follow one more token of the text, keeping the longest end that occurs (amortised constant time).

    Parameters
    ----------
    tokens, counts, link, clone_lengths, first, edge_tokens, edge_targets
        The automaton (`retrieve_spec.datastore.indexes.StaticAutomaton`).
    state, depth
        Match of the text without the token; ``(0, 0)`` for none.
    token
        Local id; 0 or less matches nothing.

    Returns
    -------
    tuple of int
        ``(state, depth)`` of the text with the token.
    """
    if token <= 0:
        return np.int64(0), np.int64(0)
    while True:
        target = automaton_follow(tokens, counts, first, edge_tokens, edge_targets, state, token)
        if target >= 0:
            return target, np.int64(depth + 1)
        if state == 0:
            return np.int64(0), np.int64(0)
        state = np.int64(link[state])
        depth = automaton_length(len(tokens), clone_lengths, state)


@njit(cache=True, nogil=True)
def automaton_successors(  # type: ignore[no-untyped-def]
    tokens, counts, first, edge_tokens, edge_targets, state, out_tokens, out_counts
):
    """Count the tokens that follow a state's strings, in the order of local ids, as `sa_successors` does.

    Returns
    -------
    tuple of int
        Number of distinct tokens written (at most as many as the outputs hold), and the count of the state.
    """
    primary = np.int64(tokens[state]) if state < len(tokens) else np.int64(0)
    pending = primary > 0 and counts[state + 1] > 0
    n = 0
    for e in range(np.int64(first[state]), np.int64(first[state + 1])):
        token = np.int64(edge_tokens[e])
        if pending and primary < token and n < len(out_tokens):
            out_tokens[n] = primary
            out_counts[n] = counts[state + 1]
            n += 1
            pending = False
        if token > 0 and counts[edge_targets[e]] > 0 and n < len(out_tokens):
            out_tokens[n] = token
            out_counts[n] = counts[edge_targets[e]]
            n += 1
    if pending and n < len(out_tokens):
        out_tokens[n] = primary
        out_counts[n] = counts[state + 1]
        n += 1
    return n, np.int64(counts[state])
