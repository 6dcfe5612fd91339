"""Numba kernels of a suffix automaton: transitions, successors and counts of a state, and appending tokens.

State row, (5,) int32: suffix link, length, then three fields whose meaning depends on the third. ``TOKEN >= 0``: the
only successor, followed by its target state and count (most states). ``TOKEN = -1``: no successor. ``TOKEN <= -2``:
``-TOKEN`` successors in a list, followed by the list's head and the total count.

Edge row, (6,) int32: owner state, token, target state, count, next and previous edge of the owner's list. ``slots`` is
an open-addressing hash table over (owner, token) that holds edge indices, -1 when free.

``meta``, (`META`,) int64: number of states, number of edges, the state of the whole text, the state of its longest
suffix of at most `COUNTED` tokens, that suffix's length, tokens appended, how counts are kept.

Contexts of at most `COUNTED` tokens are counted in one of two ways. `COUNT_ALL`: how often a token followed; lists are
most recent first. `COUNT_EXCLUDING`: how often it followed where no longer context contained it (update exclusion of
prediction by partial matching), because shorter contexts are not asked for what a longer one contains; lists begin with
the most recent successor, followed by up to `RANKED` others, most frequent first. Longer contexts count a continuation
once. This bounds the work per token on periodic text, where the chain of suffix links is as long as the text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, kernel

LINK, LENGTH, TOKEN, TARGET, COUNT = range(5)
E_OWNER, E_TOKEN, E_TARGET, E_COUNT, E_NEXT, E_PREV = range(6)
M_STATES, M_EDGES, M_LAST, M_UPD, M_UPD_LEN, M_TOKENS, M_COUNTS = range(7)
META = 7
COUNT_ALL, COUNT_EXCLUDING = 0, 1
COUNTED = 32
"""Longest context whose repeated continuations are counted."""
RANKED = 32
"""Number of successors in a list that are sorted by count."""

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@inner
def slot_of(owner: int, token: int, mask: int) -> int:
    """Return the first slot to probe for an edge."""
    h = np.uint64(owner) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    h ^= h >> np.uint64(29)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    return np.int64(h & np.uint64(mask))


@inner
def find_edge(edges: I32, slots: I32, owner: int, token: int) -> int:
    """Return the index of the listed edge (owner, token), or -1."""
    mask = len(slots) - 1
    i = slot_of(owner, token, mask)
    while True:
        e = slots[i]
        if e < 0:
            return -1
        if edges[e, E_OWNER] == owner and edges[e, E_TOKEN] == token:
            return e
        i = (i + 1) & mask


@kernel
def step(states: I32, edges: I32, slots: I32, state: int, token: int) -> int:
    """Return the state after following ``token`` from ``state``, or -1."""
    first = states[state, TOKEN]
    if first >= -1:
        return np.int64(states[state, TARGET]) if first == token else np.int64(-1)
    e = find_edge(edges, slots, state, token)
    return np.int64(edges[e, E_TARGET]) if e >= 0 else np.int64(-1)


@kernel
def advance(states: I32, edges: I32, slots: I32, state: int, matched: int, token: int) -> tuple[int, int]:
    """Follow ``token`` from the longest suffix with that transition; return (state, matched length)."""
    s = np.int64(state)
    length = np.int64(matched)
    while s >= 0:
        t = step(states, edges, slots, s, token)
        if t >= 0:
            return np.int64(t), length + 1
        s = np.int64(states[s, LINK])
        if s >= 0:
            length = np.int64(states[s, LENGTH])
    return np.int64(0), np.int64(0)


@kernel
def successors(states: I32, edges: I32, state: int, limit: int, fewest: float, out_tokens: I32, out_counts: I32) -> int:
    """Write up to ``limit`` successors, most recent first; return how many.

    After the first, it stops at a successor with a count below ``fewest``.
    """
    first = states[state, TOKEN]
    if first >= 0:
        out_tokens[0] = first
        out_counts[0] = states[state, COUNT]
        return 1
    n = 0
    if first < -1:
        e = states[state, TARGET]
        while e >= 0 and n < limit and (n == 0 or edges[e, E_COUNT] >= fewest):
            out_tokens[n] = edges[e, E_TOKEN]
            out_counts[n] = edges[e, E_COUNT]
            n += 1
            e = edges[e, E_NEXT]
    return n


@inner
def degree(states: I32, state: int) -> int:
    """Return the number of distinct tokens that have followed."""
    first = states[state, TOKEN]
    return 1 if first >= 0 else (0 if first == -1 else -first)


@inner
def count_of(states: I32, edges: I32, slots: I32, state: int, token: int) -> int:
    """Return how often ``token`` has followed."""
    first = states[state, TOKEN]
    if first >= -1:
        return states[state, COUNT] if first == token else 0
    e = find_edge(edges, slots, state, token)
    return edges[e, E_COUNT] if e >= 0 else 0


@inner
def most_recent(states: I32, edges: I32, state: int) -> int:
    """Return the token that followed last, or -1."""
    first = states[state, TOKEN]
    return first if first >= -1 else edges[states[state, TARGET], E_TOKEN]


@inner
def _insert_slot(edges: I32, slots: I32, e: int) -> None:
    mask = len(slots) - 1
    i = slot_of(edges[e, E_OWNER], edges[e, E_TOKEN], mask)
    while slots[i] >= 0:
        i = (i + 1) & mask
    slots[i] = e


@kernel
def rehash(edges: I32, slots: I32, num_edges: int) -> None:
    """Fill an empty table with all edges."""
    for e in range(num_edges):
        _insert_slot(edges, slots, e)


@inner
def _list_edge(states: I32, edges: I32, slots: I32, meta: I64, state: int, token: int, target: int, count: int) -> None:
    """Insert a successor at the front of the state's list."""
    e = meta[M_EDGES]
    meta[M_EDGES] += 1
    head = states[state, TARGET]
    edges[e, E_OWNER] = state
    edges[e, E_TOKEN] = token
    edges[e, E_TARGET] = target
    edges[e, E_COUNT] = count
    edges[e, E_NEXT] = head
    edges[e, E_PREV] = -1
    if head >= 0:
        edges[head, E_PREV] = e
    states[state, TARGET] = e
    _insert_slot(edges, slots, e)


@inner
def _add_edge(states: I32, edges: I32, slots: I32, meta: I64, state: int, token: int, target: int) -> None:
    """Add a new successor to ``state`` as its most recent one."""
    first = states[state, TOKEN]
    if first == -1:
        states[state, TOKEN] = token
        states[state, TARGET] = target
        states[state, COUNT] = 1
        return
    if first >= 0:
        only = np.int64(states[state, TARGET])
        states[state, TARGET] = -1
        states[state, TOKEN] = -1
        _list_edge(states, edges, slots, meta, state, first, only, np.int64(states[state, COUNT]))
    states[state, TOKEN] = min(states[state, TOKEN] - 1, -2)
    states[state, COUNT] += 1
    _list_edge(states, edges, slots, meta, state, token, target, np.int64(1))
    if meta[M_COUNTS] == COUNT_EXCLUDING:
        _rank(states, edges, state)


@inner
def _rank(states: I32, edges: I32, state: int) -> None:
    """Move the second of a list, until now the most recent one, after more frequent ones."""
    e = edges[states[state, TARGET], E_NEXT]
    at = e
    for _ in range(RANKED):
        nxt = edges[at, E_NEXT]
        if nxt < 0 or edges[nxt, E_COUNT] <= edges[e, E_COUNT]:
            break
        at = nxt
    if at == e:
        return
    prev, nxt, after = edges[e, E_PREV], edges[e, E_NEXT], edges[at, E_NEXT]
    edges[prev, E_NEXT] = nxt
    edges[nxt, E_PREV] = prev
    edges[at, E_NEXT] = e
    edges[e, E_PREV] = at
    edges[e, E_NEXT] = after
    if after >= 0:
        edges[after, E_PREV] = e


@inner
def _touch(states: I32, edges: I32, slots: I32, meta: I64, state: int, token: int, more: int) -> None:
    """Add ``more`` to the count of an existing successor, and make it the most recent one."""
    states[state, COUNT] += more
    if states[state, TOKEN] >= 0:
        return
    e = find_edge(edges, slots, state, token)
    edges[e, E_COUNT] += more
    prev = edges[e, E_PREV]
    if prev < 0:
        return
    nxt = edges[e, E_NEXT]
    edges[prev, E_NEXT] = nxt
    if nxt >= 0:
        edges[nxt, E_PREV] = prev
    head = states[state, TARGET]
    edges[head, E_PREV] = e
    edges[e, E_NEXT] = head
    edges[e, E_PREV] = -1
    states[state, TARGET] = e
    if meta[M_COUNTS] == COUNT_EXCLUDING:
        _rank(states, edges, state)


@inner
def _redirect(states: I32, edges: I32, slots: I32, state: int, token: int, target: int) -> None:
    if states[state, TOKEN] == token:
        states[state, TARGET] = target
    else:
        edges[find_edge(edges, slots, state, token), E_TARGET] = target


@inner
def _new_state(states: I32, meta: I64, length: int, link: int) -> int:
    s = meta[M_STATES]
    meta[M_STATES] += 1
    states[s, LINK] = link
    states[s, LENGTH] = length
    states[s, TOKEN] = -1
    states[s, TARGET] = -1
    states[s, COUNT] = 0
    return s


@kernel
def reset(states: I32, slots: I32, meta: I64) -> None:
    """Reset the automaton to its root; the way of counting does not change."""
    slots[:] = -1
    meta[:M_COUNTS] = 0
    _new_state(states, meta, np.int64(0), np.int64(-1))


@inner
def _clone(states: I32, edges: I32, slots: I32, meta: I64, p: int, token: int, q: int) -> int:
    """Split off the strings of ``q`` that also end at the newest token into a new state."""
    c = _new_state(states, meta, np.int64(states[p, LENGTH] + 1), np.int64(states[q, LINK]))
    states[c, TOKEN] = states[q, TOKEN]
    states[c, COUNT] = states[q, COUNT]
    if states[q, TOKEN] >= -1:
        states[c, TARGET] = states[q, TARGET]
    else:
        e = states[q, TARGET]
        last = e
        while e >= 0:
            last = e
            e = edges[e, E_NEXT]
        while last >= 0:  # oldest first, so that the copy has the same order
            target, count = np.int64(edges[last, E_TARGET]), np.int64(edges[last, E_COUNT])
            _list_edge(states, edges, slots, meta, c, edges[last, E_TOKEN], target, count)
            last = edges[last, E_PREV]
    states[q, LINK] = c
    while p >= 0 and step(states, edges, slots, p, token) == q:
        _redirect(states, edges, slots, p, token, c)
        p = np.int64(states[p, LINK])
    return c


@inner
def _room(states: I32, edges: I32, slots: I32, meta: I64, token: int) -> bool:
    """Whether there is room to append ``token``."""
    if meta[M_STATES] + 2 > len(states):
        return False
    need = np.int64(0)
    p = meta[M_LAST]
    q = np.int64(-1)
    while p >= 0:
        q = step(states, edges, slots, p, token)
        if q >= 0:
            break
        need += 2
        p = np.int64(states[p, LINK])
    if q >= 0:
        need += max(0, -states[q, TOKEN])
    after = meta[M_EDGES] + need
    return after <= len(edges) and 4 * after <= 3 * len(slots)


@inner
def _append(states: I32, edges: I32, slots: I32, meta: I64, token: int) -> None:
    """Append one token: standard online construction, then counts along the bounded suffix chain."""
    last = meta[M_LAST]
    upd = meta[M_UPD]
    upd_len = meta[M_UPD_LEN]
    while upd > 0 and states[states[upd, LINK], LENGTH] >= upd_len:
        upd = np.int64(states[upd, LINK])
    # From the counted suffix upwards, count existing successors.
    more = np.int64(1)
    p = upd
    while p >= 0:
        if step(states, edges, slots, p, token) >= 0:
            _touch(states, edges, slots, meta, p, token, more)
            if meta[M_COUNTS] == COUNT_EXCLUDING:
                more = np.int64(0)
        p = np.int64(states[p, LINK])
    q = step(states, edges, slots, last, token)
    if q >= 0:
        # Only after a boundary: the text so far occurred before.
        if states[q, LENGTH] != states[last, LENGTH] + 1:
            q = _clone(states, edges, slots, meta, last, token, q)
        meta[M_LAST] = q
    else:
        cur = _new_state(states, meta, np.int64(states[last, LENGTH] + 1), np.int64(0))
        p = last
        while p >= 0 and step(states, edges, slots, p, token) < 0:
            _add_edge(states, edges, slots, meta, p, token, cur)
            p = np.int64(states[p, LINK])
        if p >= 0:
            q = step(states, edges, slots, p, token)
            if states[q, LENGTH] != states[p, LENGTH] + 1:
                q = _clone(states, edges, slots, meta, p, token, q)
            states[cur, LINK] = q
        meta[M_LAST] = cur
    upd = step(states, edges, slots, upd, token)
    meta[M_UPD] = upd
    meta[M_UPD_LEN] = min(upd_len + 1, COUNTED)
    meta[M_TOKENS] += 1


@kernel
def extend(states: I32, edges: I32, slots: I32, meta: I64, token_ids: I32) -> int:
    """Append tokens while there is room; return how many were appended. A negative id begins a new document."""
    for i in range(len(token_ids)):
        if token_ids[i] < 0:
            meta[M_LAST] = meta[M_UPD] = meta[M_UPD_LEN] = 0
            continue
        if not _room(states, edges, slots, meta, token_ids[i]):
            return i
        _append(states, edges, slots, meta, token_ids[i])
    return len(token_ids)
