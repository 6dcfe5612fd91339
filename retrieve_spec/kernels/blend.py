"""Numba kernels that turn the cursors of all sources at one node into one distribution over next tokens.

Every source answers in *levels*: an order-k context that has been seen, with the tokens that followed and how often.
Levels of all sources are merged from the longest match to the shortest. Level k takes the share ``λ_k`` of the mass
that longer levels left over and spends it on its own continuations (prediction by partial matching, interpolated).
``λ`` is learned online per cell (source, match length, count, number of distinct continuations) by expectation
maximisation of the likelihood of the emitted tokens, starting from ``n / (n + a·d)``.

Source table: one int64 row per source, `KIND`, `NUMBER` (index into `SOURCE_NAMES`) and addresses of its arrays.
Cursors: (rows, `CURSOR`) int64 per node.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels import automaton, recycling
from retrieve_spec.kernels.ngram import MAX_ORDER, ngram_find, ngram_hash
from retrieve_spec.kernels.suffix_array import sa_narrow, sa_successors
from retrieve_spec.kernels.views import view_f32, view_i32, view_i64, view_rows, view_u16, view_u32, view_u64

KIND, NUMBER = 0, 1
AUTOMATON, RECYCLING, PREDICTION, NGRAM, EXACT = 0, 1, 2, 3, 4
ROW = 17
"""Integers per source row."""
RESTING = 16
"""Field of a source row that is 1 while the source is not asked, because it has explained next to nothing lately."""
CURSOR = 4
"""Integers per cursor."""
TAIL = 8
"""How many of the newest tokens every node knows."""

LENGTH_BUCKETS, COUNT_BUCKETS, DISTINCT_BUCKETS = 12, 8, 6
NUM_SOURCES = 8
CELLS = NUM_SOURCES * LENGTH_BUCKETS * COUNT_BUCKETS * DISTINCT_BUCKETS
PRIOR_WEIGHT = 6.0
"""Observations that the prior of a cell counts for."""
CELL_MEMORY = 400.0
"""Observations after which a cell forgets as fast as it learns."""
MAX_LEVELS = 24
MAX_CANDIDATES = 160
HASH = 512
READ_LIMIT = 32
"""Continuations read per level, most recent or most frequent first."""
MASS_FLOOR = 0.01
"""Mass below which learning stops reading levels."""


@njit(cache=True, nogil=True)
def length_bucket(n: int) -> int:
    """0 … 11 for match lengths 0, 1, 2, 3, 4, 5, 6–7, 8–11, 12–15, 16–23, 24–39, 40 and more."""
    if n <= 5:
        return n
    if n <= 7:
        return 6
    if n <= 11:
        return 7
    if n <= 15:
        return 8
    if n <= 23:
        return 9
    return 10 if n <= 39 else 11


@njit(cache=True, nogil=True)
def count_bucket(n: int) -> int:
    """0 … 7 for counts 1, 2, 3, 4–5, 6–8, 9–16, 17–64, 65 and more."""
    if n <= 3:
        return max(n, 1) - 1
    if n <= 5:
        return 3
    if n <= 8:
        return 4
    if n <= 16:
        return 5
    return 6 if n <= 64 else 7


@njit(cache=True, nogil=True)
def distinct_bucket(n: int) -> int:
    """0 … 5 for 1, 2, 3, 4–5, 6–8, 9 and more distinct continuations."""
    if n <= 3:
        return max(n, 1) - 1
    if n <= 5:
        return 3
    return 4 if n <= 8 else 5


@njit(cache=True, nogil=True)
def cell_of(source: int, length: int, total: int, distinct: int) -> int:
    """Row of the calibration table."""
    c = source * LENGTH_BUCKETS + length_bucket(length)
    return (c * COUNT_BUCKETS + count_bucket(total)) * DISTINCT_BUCKETS + distinct_bucket(distinct)


@njit(cache=True, nogil=True)
def level_weight(cells: NDArray[np.float32], cell: int, prior: float) -> float:
    """Share of the remaining mass that a level takes: learned, shrunk towards its prior."""
    return (cells[cell, 0] + PRIOR_WEIGHT * prior) / (cells[cell, 1] + PRIOR_WEIGHT)


@njit(cache=True, nogil=True)
def recency_weight(cells: NDArray[np.float32], cell: int) -> float:
    """Share of a level that goes to its most recent continuation, whatever its count."""
    return (cells[cell, 2] + 0.15 * PRIOR_WEIGHT) / (cells[cell, 3] + PRIOR_WEIGHT)


@njit(cache=True, nogil=True)
def states_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """State rows of an automaton source."""
    return view_rows(table[s, 2], table[s, 3], 5)


@njit(cache=True, nogil=True)
def edges_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """Edge rows of an automaton source."""
    return view_rows(table[s, 4], table[s, 5], 6)


@njit(cache=True, nogil=True)
def slots_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """Edge hash table of an automaton source."""
    return view_i32(table[s, 6], table[s, 7])


@njit(cache=True, nogil=True)
def _first_useful(states: NDArray[np.int32], state: int, length: int) -> tuple[int, int]:
    """The state, or the nearest one up its suffix links, that has a successor, and its match length (0: the root)."""
    while state > 0 and states[state, automaton.TOKEN] == -1:
        state = np.int64(states[state, automaton.LINK])
        length = np.int64(states[state, automaton.LENGTH])
    return (state, length) if states[state, automaton.TOKEN] != -1 else (np.int64(0), np.int64(-1))


@njit(cache=True, nogil=True)
def _open_row(
    table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int, hashes: NDArray[np.uint64], tail_len: int
) -> tuple[int, int]:
    """(handle, match length) of a source's longest level; length -1 when it has none."""
    if table[s, RESTING] == 1:
        return np.int64(0), np.int64(-1)
    if table[s, KIND] == AUTOMATON:
        return _first_useful(states_of(table, s), cursors[c, 0], cursors[c, 1])
    if table[s, KIND] == PREDICTION:
        inside = cursors[c, 1] >= 0 and cursors[c, 0] < table[s, 3]
        return cursors[c, 0], cursors[c, 1] if inside else np.int64(-1)
    if table[s, KIND] == NGRAM:
        return _ngram_level(table, s, hashes, min(tail_len, table[s, 10]))
    if table[s, KIND] == EXACT:
        found = cursors[c, 2] >= table[s, 10] and cursors[c, 0] < cursors[c, 1]
        return cursors[c, 0], cursors[c, 2] if found else np.int64(-1)
    return _recycling_level(table, s, hashes, min(tail_len, recycling.ORDERS))


@njit(cache=True, nogil=True)
def _recycling_level(table: NDArray[np.int64], s: int, hashes: NDArray[np.uint64], order: int) -> tuple[int, int]:
    keys = view_u64(table[s, 2], table[s, 3])
    while order > 0:
        e = recycling.find(keys, hashes[1, order - 1])
        if e >= 0:
            return np.int64(e), np.int64(order)
        order -= 1
    return np.int64(0), np.int64(-1)


@njit(cache=True, nogil=True)
def _ngram_level(table: NDArray[np.int64], s: int, hashes: NDArray[np.uint64], order: int) -> tuple[int, int]:
    """(slot, order) of the longest context of at most ``order`` tokens in an n-gram table."""
    keys = view_u32(table[s, 2], table[s, 3])
    while order > 0:
        slot = ngram_find(keys, hashes[0, order - 1])
        if slot >= 0:
            return np.int64(slot), np.int64(order)
        order -= 1
    return np.int64(0), np.int64(-1)


@njit(cache=True, nogil=True)
def ngram_token(table: NDArray[np.int64], s: int, i: int) -> int:
    """Token of one stored continuation of an n-gram table."""
    if table[s, 11] == 2:
        return np.int64(view_u16(table[s, 7], table[s, 9])[i])
    return np.int64(view_u32(table[s, 7], table[s, 9])[i])


@njit(cache=True, nogil=True)
def exact_narrow(table: NDArray[np.int64], s: int, lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """Suffix array interval of a store's segment after one more token of the model's vocabulary."""
    local = view_i32(table[s, 7], table[s, 8])[token] if 0 <= token < table[s, 8] else np.int32(0)
    sa = view_u32(table[s, 5], table[s, 6])
    if table[s, 4] == 2:
        a, b = sa_narrow(view_u16(table[s, 2], table[s, 3]), sa, lo, hi, depth, np.int64(local))
    else:
        a, b = sa_narrow(view_u32(table[s, 2], table[s, 3]), sa, lo, hi, depth, np.int64(local))
    return np.int64(a), np.int64(b)


@njit(cache=True, nogil=True)
def exact_successors(
    table: NDArray[np.int64],
    s: int,
    lo: int,
    hi: int,
    depth: int,
    out_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
) -> int:
    """Next tokens of an interval, as ids of the model's vocabulary, with counts; returns how many."""
    sa = view_u32(table[s, 5], table[s, 6])
    if table[s, 4] == 2:
        n, _ = sa_successors(view_u16(table[s, 2], table[s, 3]), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    else:
        n, _ = sa_successors(view_u32(table[s, 2], table[s, 3]), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    to_global = view_u32(table[s, 9], table[s, 11])
    known = 0
    for i in range(n):
        if out_tokens[i] < len(to_global):  # a damaged store can hold other ids
            out_tokens[known] = to_global[out_tokens[i]]
            out_counts[known] = out_counts[i]
            known += 1
    return np.int64(known)


@njit(cache=True, nogil=True)
def _exact_distinct(table: NDArray[np.int64], s: int, lo: int, hi: int, depth: int) -> int:
    """1 when all suffixes of a sorted interval go on alike, else a guess from its size (a read would cost more)."""
    sa = view_u32(table[s, 5], table[s, 6])
    first, last = np.int64(sa[lo]) + depth, np.int64(sa[hi - 1]) + depth
    if table[s, 4] == 2:
        tokens = view_u16(table[s, 2], table[s, 3])
        same = tokens[first] == tokens[last]
    else:
        wide = view_u32(table[s, 2], table[s, 3])
        same = wide[first] == wide[last]
    return 1 if same else min(hi - lo, 2 + (hi - lo) // 8)


@njit(cache=True, nogil=True)
def _next_level(
    table: NDArray[np.int64], s: int, handle: int, length: int, hashes: NDArray[np.uint64]
) -> tuple[int, int]:
    """(handle, match length) of the level after this one."""
    if table[s, KIND] == AUTOMATON:
        states = states_of(table, s)
        link = np.int64(states[handle, automaton.LINK])
        if link < 0:
            return np.int64(0), np.int64(-1)
        return _first_useful(states, link, np.int64(states[link, automaton.LENGTH]))
    if table[s, KIND] == RECYCLING:
        return _recycling_level(table, s, hashes, length - 1)
    if table[s, KIND] == NGRAM:
        return _ngram_level(table, s, hashes, length - 1)
    return np.int64(0), np.int64(-1)


@njit(cache=True, nogil=True)
def _evidence(table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int, handle: int) -> tuple[int, int]:
    """(total count, distinct continuations) of a level; for probabilities, how peaked they are stands for distinct."""
    if table[s, KIND] == AUTOMATON:
        states = states_of(table, s)
        return np.int64(states[handle, automaton.COUNT]), np.int64(automaton.degree(states, handle))
    if table[s, KIND] == RECYCLING:
        k = table[s, 10]
        top = view_f32(table[s, 8], table[s, 3] * k)[handle * k]
        seen = view_i64(table[s, 4], table[s, 3] * 2)[handle * 2]
        distinct = 1 if top > 0.9 else (2 if top > 0.7 else (3 if top > 0.5 else (5 if top > 0.3 else 9)))
        return seen, np.int64(distinct)
    if table[s, KIND] == NGRAM:
        return np.int64(view_u32(table[s, 4], table[s, 3])[handle]), np.int64(
            view_u16(table[s, 5], table[s, 3])[handle]
        )
    if table[s, KIND] == EXACT:
        return cursors[c, 1] - cursors[c, 0], np.int64(
            _exact_distinct(table, s, cursors[c, 0], cursors[c, 1], cursors[c, 2])
        )
    return np.int64(1), np.int64(1)


@njit(cache=True, nogil=True)
def prior_weight(source: int, length: int, total: int, distinct: int) -> float:
    """Weight of a level before anything was learned: n / (n + a·d), with a falling in the match length."""
    if source == 3:  # recycling: the target's own probabilities
        return 0.75 if length >= 2 else 0.6
    if source == 2:  # prediction: one continuation, trusted by how long it has been right
        return 1.0 - 0.6 / (1.0 + length)
    if length == 0:
        a = 20.0
    elif length <= 1:
        a = 6.0 if source == 0 else 4.0
    elif length == 2:
        a = 2.5
    elif length == 3:
        a = 1.5
    elif length == 4:
        a = 1.0
    else:
        a = max(0.15, 3.5 / length)
    if source > 3:
        a = 1.0
    return total / (total + a * distinct)


@njit(cache=True, nogil=True)
def context_hashes(tails: NDArray[np.int32], at: int, tail_len: int, out: NDArray[np.uint64]) -> None:
    """Hashes of the last 1, 2, … tokens: row 0 as n-gram tables are keyed, row 1 as the recycling table is."""
    h = np.uint64(0)
    g = np.uint64(0)
    for i in range(min(tail_len, MAX_ORDER)):
        h = ngram_hash(h, tails[at, i])
        out[0, i] = h
        if i < recycling.ORDERS:
            g = recycling.mix(g, tails[at, i])
            out[1, i] = g


@njit(cache=True, nogil=True)
def collect_levels(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    base: int,
    tails: NDArray[np.int32],
    at: int,
    tail_len: int,
    cells: NDArray[np.float32],
    mass_floor: float,
    open_levels: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    levels: NDArray[np.int64],
    weights: NDArray[np.float32],
) -> int:
    """Merge the levels of all sources, longest match first.

    Parameters
    ----------
    table
        (s, ROW) int64 sources.
    cursors, base
        (m, CURSOR) int64; the node's cursors are rows base … base + s - 1. Indices are passed instead of slices, which
        would cost more than the work done with them.
    tails, at, tail_len
        (m, TAIL) int32, the node's row: newest tokens, newest first, and how many are valid.
    cells
        (CELLS, 4) float32 calibration.
    mass_floor
        Levels that would share less than this mass are not read.
    open_levels, hashes
        (s, 2) int64 and (2, TAIL) uint64 scratch.
    levels, weights
        (MAX_LEVELS, 4) int64 and (MAX_LEVELS,) float32, filled: source row, handle, cell, total; weight λ.

    Returns
    -------
    int
        Number of levels.
    """
    rows = len(table)
    context_hashes(tails, at, tail_len, hashes)
    for s in range(rows):
        open_levels[s, 0], open_levels[s, 1] = _open_row(table, s, cursors, base + s, hashes, tail_len)
    n = 0
    mass = 1.0
    while n < MAX_LEVELS and mass > mass_floor:
        best = -1
        length = np.int64(-1)
        for s in range(rows):
            if open_levels[s, 1] > length:
                best = s
                length = open_levels[s, 1]
        if best < 0:
            break
        handle = open_levels[best, 0]
        total, distinct = _evidence(table, best, cursors, base + best, handle)
        source = table[best, NUMBER]
        cell = cell_of(source, length, total, distinct)
        weight = level_weight(cells, cell, prior_weight(source, length, total, distinct))
        levels[n, 0] = best
        levels[n, 1] = handle
        levels[n, 2] = cell
        levels[n, 3] = total
        weights[n] = weight
        mass *= 1.0 - weight
        n += 1
        open_levels[best, 0], open_levels[best, 1] = _next_level(table, best, handle, length, hashes)
    return n


@njit(cache=True, nogil=True)
def read_level(
    table: NDArray[np.int64],
    s: int,
    cursors: NDArray[np.int64],
    c: int,
    handle: int,
    total: int,
    recency: float,
    out_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
    out_p: NDArray[np.float32],
) -> int:
    """Continuations of one level and their shares of it; returns how many were written."""
    if table[s, KIND] == AUTOMATON:
        n = automaton.successors(states_of(table, s), edges_of(table, s), handle, READ_LIMIT, out_tokens, out_counts)
        for i in range(n):
            out_p[i] = (1.0 - recency) * out_counts[i] / total
        if n > 0:
            out_p[0] += recency
        return n
    if table[s, KIND] == RECYCLING:
        k = table[s, 10]
        ids = view_i32(table[s, 6], table[s, 3] * k)
        p = view_f32(table[s, 8], table[s, 3] * k)
        n = 0
        while n < k and ids[handle * k + n] >= 0:
            out_tokens[n] = ids[handle * k + n]
            out_p[n] = p[handle * k + n]
            n += 1
        return n
    if table[s, KIND] == NGRAM:
        start = view_u32(table[s, 6], table[s, 3] + 1)
        counts = view_u32(table[s, 8], table[s, 9])
        first = np.int64(start[handle])
        n = min(np.int64(start[handle + 1]) - first, READ_LIMIT)
        for i in range(n):
            out_tokens[i] = ngram_token(table, s, first + i)
            out_p[i] = counts[first + i] / total
        return n
    if table[s, KIND] == EXACT:
        n = exact_successors(table, s, cursors[c, 0], cursors[c, 1], cursors[c, 2], out_tokens, out_counts)
        for i in range(n):
            out_p[i] = out_counts[i] / total
        return n
    out_tokens[0] = view_i32(table[s, 2], table[s, 3])[handle]
    out_p[0] = 1.0
    return 1


@njit(cache=True, nogil=True)
def blend(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    base: int,
    cells: NDArray[np.float32],
    levels: NDArray[np.int64],
    weights: NDArray[np.float32],
    num_levels: int,
    floor: float,
    slots: NDArray[np.int64],
    stamp: int,
    read_tokens: NDArray[np.int32],
    read_counts: NDArray[np.int32],
    read_p: NDArray[np.float32],
    share: NDArray[np.float32],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    credit: NDArray[np.int64],
) -> int:
    """Spend the mass of all levels on their continuations.

    Parameters
    ----------
    floor
        Shares below this probability are left out.
    slots, stamp
        (HASH,) int64 scratch and a number not used with it before: token → candidate without clearing.
    read_tokens, read_counts, read_p, share
        (READ_LIMIT,) int32, int32, float32 and (MAX_CANDIDATES,) float32 scratch.
    tokens, probs, credit
        (MAX_CANDIDATES,) outputs: candidates, their probabilities, and the source row that gave the largest share.

    Returns
    -------
    int
        Number of candidates, in no particular but deterministic order.
    """
    n = 0
    mass = 1.0
    for level in range(num_levels):
        row = levels[level, 0]
        recency = recency_weight(cells, levels[level, 2])
        m = read_level(
            table,
            row,
            cursors,
            base + row,
            levels[level, 1],
            levels[level, 3],
            recency,
            read_tokens,
            read_counts,
            read_p,
        )
        spend = mass * weights[level]
        mass -= spend
        for i in range(m):
            p = spend * read_p[i]
            if p < floor:
                continue
            h = (np.int64(read_tokens[i]) * 0x9E3779B1 >> 7) & (HASH - 1)
            while True:
                entry = slots[h]
                if entry >> 16 != stamp:
                    break
                if tokens[entry & 0xFFFF] == read_tokens[i]:
                    break
                h = (h + 1) & (HASH - 1)
            if entry >> 16 == stamp:
                c = entry & 0xFFFF
                probs[c] += p
                if p > share[c]:
                    share[c] = p
                    credit[c] = row
            elif n < MAX_CANDIDATES:
                slots[h] = (np.int64(stamp) << 16) | n
                tokens[n] = read_tokens[i]
                probs[n] = p
                share[n] = p
                credit[n] = row
                n += 1
    return n


@njit(cache=True, nogil=True)
def advance_row(
    table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int, token: int, out: NDArray[np.int64], o: int
) -> None:
    """Cursor of one source after one more token."""
    if table[s, KIND] == AUTOMATON:
        out[o, 0], out[o, 1] = automaton.advance(
            states_of(table, s), edges_of(table, s), slots_of(table, s), cursors[c, 0], cursors[c, 1], token
        )
    elif table[s, KIND] == PREDICTION:
        out[o, 0], out[o, 1] = cursors[c, 0], np.int64(-1)
        if (
            cursors[c, 1] >= 0
            and cursors[c, 0] < table[s, 3]
            and view_i32(table[s, 2], table[s, 3])[cursors[c, 0]] == token
        ):
            out[o, 0], out[o, 1] = cursors[c, 0] + 1, cursors[c, 1] + 1
    elif table[s, KIND] == EXACT:
        out[o, 0], out[o, 1], out[o, 2] = np.int64(0), np.int64(0), np.int64(-1)
        if cursors[c, 2] >= 0 and cursors[c, 0] < cursors[c, 1]:
            out[o, 0], out[o, 1] = exact_narrow(table, s, cursors[c, 0], cursors[c, 1], cursors[c, 2], token)
            out[o, 2] = cursors[c, 2] + 1
