"""Numba kernels that turn the cursors of all sources at one node into one distribution over next tokens.

Every source answers in *levels*: an order-k context that has been seen, with the tokens that followed and how often.
Levels of all sources are merged from the longest match to the shortest. Level k takes the share ``λ_k`` of the mass that
longer levels left over and spends it on its own continuations (prediction by partial matching, interpolated). ``λ`` is
learned online per cell (source, match length, count, number of distinct continuations) by expectation maximisation of
the likelihood of the emitted tokens, starting from ``n / (n + a·d)``.

Source table: one int64 row per source, `KIND`, `NUMBER` (index into `SOURCE_NAMES`) and addresses of its arrays. Cursors:
(rows, `CURSOR`) int64 per node.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels import automaton, recycling
from retrieve_spec.kernels.ngram import ngram_find, ngram_hash
from retrieve_spec.kernels.suffix_array import sa_narrow, sa_successors
from retrieve_spec.kernels.views import view_f32, view_i32, view_i64, view_u16, view_u32

KIND, NUMBER = 0, 1
AUTOMATON, RECYCLING, PREDICTION, NGRAM, EXACT = 0, 1, 2, 3, 4
ROW = 16
"""Integers per source row."""
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
READ_LIMIT = 48
"""Continuations read per level, most recent or most frequent first."""
MASS_FLOOR = 0.01
"""Levels that would share less than this mass are not read."""


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
def states_of(row: NDArray[np.int64]) -> NDArray[np.int32]:
    """State rows of an automaton source."""
    return view_i32(row[2], row[3] * 5).reshape((row[3], 5))


@njit(cache=True, nogil=True)
def edges_of(row: NDArray[np.int64]) -> NDArray[np.int32]:
    """Edge rows of an automaton source."""
    return view_i32(row[4], row[5] * 6).reshape((row[5], 6))


@njit(cache=True, nogil=True)
def slots_of(row: NDArray[np.int64]) -> NDArray[np.int32]:
    """Edge hash table of an automaton source."""
    return view_i32(row[6], row[7])


@njit(cache=True, nogil=True)
def _first_useful(states: NDArray[np.int32], state: int, length: int) -> tuple[int, int]:
    """The state, or the nearest one up its suffix links, that has a successor, and its match length (0: the root)."""
    while state > 0 and states[state, automaton.TOKEN] == -1:
        state = np.int64(states[state, automaton.LINK])
        length = np.int64(states[state, automaton.LENGTH])
    return (state, length) if states[state, automaton.TOKEN] != -1 else (np.int64(0), np.int64(-1))


@njit(cache=True, nogil=True)
def _open_row(
    row: NDArray[np.int64], cursor: NDArray[np.int64], tail: NDArray[np.int32], tail_len: int
) -> tuple[int, int]:
    """(handle, match length) of a source's longest level; length -1 when it has none."""
    if row[KIND] == AUTOMATON:
        return _first_useful(states_of(row), cursor[0], cursor[1])
    if row[KIND] == PREDICTION:
        inside = cursor[1] >= 0 and cursor[0] < row[3]
        return cursor[0], cursor[1] if inside else np.int64(-1)
    if row[KIND] == NGRAM:
        return _ngram_level(row, tail, min(tail_len, row[10]))
    if row[KIND] == EXACT:
        found = cursor[2] >= row[10] and cursor[0] < cursor[1]
        return cursor[0], cursor[2] if found else np.int64(-1)
    return _recycling_level(row, tail, min(tail_len, recycling.ORDERS))


@njit(cache=True, nogil=True)
def _recycling_level(row: NDArray[np.int64], tail: NDArray[np.int32], order: int) -> tuple[int, int]:
    keys = view_i64(row[2], row[3]).view(np.uint64)
    while order > 0:
        h = np.uint64(0)
        for i in range(order):
            h = recycling.mix(h, tail[i])
        e = recycling.find(keys, h)
        if e >= 0:
            return np.int64(e), np.int64(order)
        order -= 1
    return np.int64(0), np.int64(-1)


@njit(cache=True, nogil=True)
def _ngram_level(row: NDArray[np.int64], tail: NDArray[np.int32], order: int) -> tuple[int, int]:
    """(slot, order) of the longest context of at most ``order`` tokens in an n-gram table."""
    keys = view_u32(row[2], row[3])
    while order > 0:
        h = np.uint64(0)
        for i in range(order):
            h = ngram_hash(h, tail[i])
        slot = ngram_find(keys, h)
        if slot >= 0:
            return np.int64(slot), np.int64(order)
        order -= 1
    return np.int64(0), np.int64(-1)


@njit(cache=True, nogil=True)
def ngram_token(row: NDArray[np.int64], i: int) -> int:
    """Token of one stored continuation of an n-gram table."""
    if row[11] == 2:
        return np.int64(view_u16(row[7], row[9])[i])
    return np.int64(view_u32(row[7], row[9])[i])


@njit(cache=True, nogil=True)
def exact_narrow(row: NDArray[np.int64], lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """Suffix array interval of a store's segment after one more token of the model's vocabulary."""
    local = view_i32(row[7], row[8])[token] if 0 <= token < row[8] else np.int32(0)
    sa = view_u32(row[5], row[6])
    if row[4] == 2:
        a, b = sa_narrow(view_u16(row[2], row[3]), sa, lo, hi, depth, np.int64(local))
    else:
        a, b = sa_narrow(view_u32(row[2], row[3]), sa, lo, hi, depth, np.int64(local))
    return np.int64(a), np.int64(b)


@njit(cache=True, nogil=True)
def exact_successors(
    row: NDArray[np.int64], lo: int, hi: int, depth: int, out_tokens: NDArray[np.int32], out_counts: NDArray[np.int32]
) -> int:
    """Next tokens of an interval, as ids of the model's vocabulary, with counts; returns how many."""
    sa = view_u32(row[5], row[6])
    if row[4] == 2:
        n, _ = sa_successors(view_u16(row[2], row[3]), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    else:
        n, _ = sa_successors(view_u32(row[2], row[3]), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    to_global = view_u32(row[9], row[11])
    for i in range(n):
        out_tokens[i] = to_global[out_tokens[i]]
    return np.int64(n)


@njit(cache=True, nogil=True)
def _exact_distinct(row: NDArray[np.int64], lo: int, hi: int, depth: int) -> int:
    """1 when all suffixes of a sorted interval go on alike, otherwise a guess from its size (a read would cost more)."""
    sa = view_u32(row[5], row[6])
    first, last = np.int64(sa[lo]) + depth, np.int64(sa[hi - 1]) + depth
    if row[4] == 2:
        tokens = view_u16(row[2], row[3])
        same = tokens[first] == tokens[last]
    else:
        wide = view_u32(row[2], row[3])
        same = wide[first] == wide[last]
    return 1 if same else min(hi - lo, 2 + (hi - lo) // 8)


@njit(cache=True, nogil=True)
def _next_level(row: NDArray[np.int64], handle: int, length: int, tail: NDArray[np.int32]) -> tuple[int, int]:
    """(handle, match length) of the level after this one."""
    if row[KIND] == AUTOMATON:
        states = states_of(row)
        link = np.int64(states[handle, automaton.LINK])
        if link < 0:
            return np.int64(0), np.int64(-1)
        return _first_useful(states, link, np.int64(states[link, automaton.LENGTH]))
    if row[KIND] == RECYCLING:
        return _recycling_level(row, tail, length - 1)
    if row[KIND] == NGRAM:
        return _ngram_level(row, tail, length - 1)
    return np.int64(0), np.int64(-1)


@njit(cache=True, nogil=True)
def _evidence(row: NDArray[np.int64], cursor: NDArray[np.int64], handle: int) -> tuple[int, int]:
    """(total count, distinct continuations) of a level; for probabilities, how peaked they are stands for distinct."""
    if row[KIND] == AUTOMATON:
        states = states_of(row)
        return np.int64(states[handle, automaton.COUNT]), np.int64(automaton.degree(states, handle))
    if row[KIND] == RECYCLING:
        k = row[10]
        top = view_f32(row[8], row[3] * k)[handle * k]
        seen = view_i64(row[4], row[3] * 2)[handle * 2]
        distinct = 1 if top > 0.9 else (2 if top > 0.7 else (3 if top > 0.5 else (5 if top > 0.3 else 9)))
        return seen, np.int64(distinct)
    if row[KIND] == NGRAM:
        return np.int64(view_u32(row[4], row[3])[handle]), np.int64(view_u16(row[5], row[3])[handle])
    if row[KIND] == EXACT:
        return cursor[1] - cursor[0], np.int64(_exact_distinct(row, cursor[0], cursor[1], cursor[2]))
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
def collect_levels(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    tail: NDArray[np.int32],
    tail_len: int,
    cells: NDArray[np.float32],
    levels: NDArray[np.int64],
    weights: NDArray[np.float32],
) -> int:
    """Merge the levels of all sources, longest match first.

    Parameters
    ----------
    table, cursors
        (s, ROW) int64 sources and (s, CURSOR) int64 cursors.
    tail, tail_len
        (TAIL,) int32 newest tokens, newest first, and how many are valid.
    cells
        (CELLS, 4) float32 calibration.
    levels, weights
        (MAX_LEVELS, 4) int64 and (MAX_LEVELS,) float32, filled: source row, handle, cell, total; weight λ.

    Returns
    -------
    int
        Number of levels.
    """
    rows = len(table)
    handle = np.empty(rows, np.int64)
    length = np.empty(rows, np.int64)
    for s in range(rows):
        handle[s], length[s] = _open_row(table[s], cursors[s], tail, tail_len)
    n = 0
    mass = 1.0
    while n < MAX_LEVELS and mass > MASS_FLOOR:
        best = -1
        for s in range(rows):
            if length[s] >= 0 and (best < 0 or length[s] > length[best]):
                best = s
        if best < 0:
            break
        total, distinct = _evidence(table[best], cursors[best], handle[best])
        source = table[best, NUMBER]
        cell = cell_of(source, length[best], total, distinct)
        weight = level_weight(cells, cell, prior_weight(source, length[best], total, distinct))
        levels[n, 0] = best
        levels[n, 1] = handle[best]
        levels[n, 2] = cell
        levels[n, 3] = total
        weights[n] = weight
        mass *= 1.0 - weight
        n += 1
        handle[best], length[best] = _next_level(table[best], handle[best], length[best], tail)
    return n


@njit(cache=True, nogil=True)
def read_level(
    row: NDArray[np.int64],
    cursor: NDArray[np.int64],
    handle: int,
    total: int,
    recency: float,
    out_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
    out_p: NDArray[np.float32],
) -> int:
    """Continuations of one level and their shares of it; returns how many were written."""
    if row[KIND] == AUTOMATON:
        n = automaton.successors(states_of(row), edges_of(row), handle, READ_LIMIT, out_tokens, out_counts)
        for i in range(n):
            out_p[i] = (1.0 - recency) * out_counts[i] / total
        if n > 0:
            out_p[0] += recency
        return n
    if row[KIND] == RECYCLING:
        k = row[10]
        ids = view_i32(row[6], row[3] * k)
        p = view_f32(row[8], row[3] * k)
        n = 0
        while n < k and ids[handle * k + n] >= 0:
            out_tokens[n] = ids[handle * k + n]
            out_p[n] = p[handle * k + n]
            n += 1
        return n
    if row[KIND] == NGRAM:
        start = view_u32(row[6], row[3] + 1)
        counts = view_u32(row[8], row[9])
        first = np.int64(start[handle])
        n = min(np.int64(start[handle + 1]) - first, READ_LIMIT)
        for i in range(n):
            out_tokens[i] = ngram_token(row, first + i)
            out_p[i] = counts[first + i] / total
        return n
    if row[KIND] == EXACT:
        n = exact_successors(row, cursor[0], cursor[1], cursor[2], out_tokens, out_counts)
        for i in range(n):
            out_p[i] = out_counts[i] / total
        return n
    out_tokens[0] = view_i32(row[2], row[3])[handle]
    out_p[0] = 1.0
    return 1


@njit(cache=True, nogil=True)
def blend(
    table: NDArray[np.int64],
    cursors: NDArray[np.int64],
    cells: NDArray[np.float32],
    levels: NDArray[np.int64],
    weights: NDArray[np.float32],
    num_levels: int,
    slots: NDArray[np.int64],
    stamp: int,
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    credit: NDArray[np.int64],
) -> int:
    """Spend the mass of all levels on their continuations.

    Parameters
    ----------
    slots, stamp
        (HASH,) int64 scratch and a number not used with it before: token → candidate without clearing.
    tokens, probs, credit
        (MAX_CANDIDATES,) outputs: candidates, their probabilities, and the source row that gave the largest share.

    Returns
    -------
    int
        Number of candidates, in no particular but deterministic order.
    """
    out_tokens = np.empty(READ_LIMIT, np.int32)
    out_counts = np.empty(READ_LIMIT, np.int32)
    out_p = np.empty(READ_LIMIT, np.float32)
    share = np.empty(MAX_CANDIDATES, np.float32)
    n = 0
    mass = 1.0
    for level in range(num_levels):
        row = levels[level, 0]
        recency = recency_weight(cells, levels[level, 2])
        m = read_level(table[row], cursors[row], levels[level, 1], levels[level, 3], recency, out_tokens, out_counts, out_p)
        spend = mass * weights[level]
        mass -= spend
        for i in range(m):
            h = (np.int64(out_tokens[i]) * 0x9E3779B1 >> 7) & (HASH - 1)
            while True:
                entry = slots[h]
                if entry >> 16 != stamp:
                    break
                if tokens[entry & 0xFFFF] == out_tokens[i]:
                    break
                h = (h + 1) & (HASH - 1)
            p = spend * out_p[i]
            if entry >> 16 == stamp:
                c = entry & 0xFFFF
                probs[c] += p
                if p > share[c]:
                    share[c] = p
                    credit[c] = row
            elif n < MAX_CANDIDATES:
                slots[h] = (np.int64(stamp) << 16) | n
                tokens[n] = out_tokens[i]
                probs[n] = p
                share[n] = p
                credit[n] = row
                n += 1
    return n


@njit(cache=True, nogil=True)
def advance_row(row: NDArray[np.int64], cursor: NDArray[np.int64], token: int, out: NDArray[np.int64]) -> None:
    """Cursor of one source after one more token."""
    if row[KIND] == AUTOMATON:
        out[0], out[1] = automaton.advance(states_of(row), edges_of(row), slots_of(row), cursor[0], cursor[1], token)
    elif row[KIND] == PREDICTION:
        out[0], out[1] = cursor[0], np.int64(-1)
        if cursor[1] >= 0 and cursor[0] < row[3] and view_i32(row[2], row[3])[cursor[0]] == token:
            out[0], out[1] = cursor[0] + 1, cursor[1] + 1
    elif row[KIND] == EXACT:
        out[0], out[1], out[2] = np.int64(0), np.int64(0), np.int64(-1)
        if cursor[2] >= 0 and cursor[0] < cursor[1]:
            out[0], out[1] = exact_narrow(row, cursor[0], cursor[1], cursor[2], token)
            out[2] = cursor[2] + 1
