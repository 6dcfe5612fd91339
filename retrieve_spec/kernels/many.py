"""Numba kernel over many requests at once: the step of every row (`kernels/step.py`) in one call.

Between two passes of a model no cache holds anything, and a line of Python takes longer than a token does here. So a
request keeps all that its next step needs in a record of integers, among them the draft that waits to be verified, and
the kernel is handed little but addresses of records. They are valid for the call alone: whoever makes it holds the
arrays.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.kernels import promise as promises
from retrieve_spec.kernels import request as state
from retrieve_spec.kernels import step
from retrieve_spec.kernels.chain import grow_chain
from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.source_table import CURSOR, TAIL
from retrieve_spec.kernels.views import (
    view_f32,
    view_i32,
    view_i64,
    view_i64_rows,
    view_rows,
    view_u8,
)

REQUEST, LENGTH, SAID, SAID_ROOM = 0, 1, 2, 3
"""Columns of a record: address of the request; tokens of the text that are followed; address of what was generated
(int32), and how many tokens it has room for."""
NUM_SAID, GIVEN, ROOM, DRAFTED, HOPED, STEP = 4, 5, 6, 7, 8, 9
"""Tokens generated; how many were followed last, and for how many of them the text's automaton had room; nodes of the
draft, or 1 where none was made and its first token is only hoped for; the step that it was made for."""
END, COMPARED = 10, 8
"""The text's last `COMPARED` tokens, int32."""
IDS = END + COMPARED // 2
LOG_P, SOURCE = IDS + MAX_NODES // 2, IDS + MAX_NODES
"""Where the draft begins: token ids (int32), logarithms of path probabilities (float32), numbers of sources (uint8)."""
RECORD = SOURCE + MAX_NODES // 8
"""Integers of a record."""

ADDRESS, TEXT, PLACE, LONGEST = 0, 1, 2, 3
"""Columns of a call's rows: addresses of the record and of the text's first token (int32), which of the lengths is the
text's, tokens that it may have at most."""
CALL = 4

NOW, DEEPEST, VOCABULARY, CONTEXT, WHO = 0, 1, 2, 3, 4
"""Columns of a plan: number of the step (below 0: texts are not compared, nor drafts judged), the longest draft (below
0: none are made), tokens of the model; written by the kernel: the longest text, the row of which `ELSEWHERE` and
`UNHELD` are said."""
STEPS, ROWS, MADE, ACCEPTED, EMITTED = 5, 6, 7, 8, 9
"""Counters: steps, their rows, tokens drafted, of these the right ones, tokens that came."""
PLAN = 10
FULL, ELSEWHERE, UNHELD = -1, -2, -3
"""What came of a call that drafted nothing: tokens were followed for which automata had no room; nothing was done, as a
text does not go on from what was followed, or there is no room to keep what it says."""


@inner
def _stands(record: NDArray[np.int64], address: int, text: int, length: int, compared: int) -> int:
    """Whether a text goes on from what was followed and can be kept: 0, or what is in the way."""
    known = record[LENGTH]
    if length < known:
        return ELSEWHERE
    end, before = view_i32(address + 8 * END, COMPARED), view_i32(text + 4 * (known - compared), compared)
    for i in range(compared):
        if end[COMPARED - compared + i] != before[i]:
            return ELSEWHERE
    return 0 if record[NUM_SAID] + length - known <= record[SAID_ROOM] else UNHELD


@inner
def _judge(record: NDArray[np.int64], address: int, plan: NDArray[np.int64], emitted: NDArray[np.int32]) -> None:
    """Learn what became of a record's draft; one that was made for an earlier step was not verified."""
    counts = state.promises_of(view_i64(record[REQUEST], state.REQUEST), 0)
    ids, log_p = view_i32(address + 8 * IDS, MAX_NODES), _log_p_of(address)
    drafted = record[DRAFTED] if record[STEP] == plan[NOW] - 1 else np.int64(0)
    accepted = np.int64(0)
    while accepted < min(drafted, len(emitted)) and ids[accepted] == emitted[accepted]:
        accepted += 1
    if drafted > 0:
        expected = 0.0
        for i in range(drafted):
            expected += np.exp(np.float64(log_p[i]))
        promises.drafted(counts, expected, accepted)
    if record[HOPED] == 1:
        promises.hoped(counts, np.exp(np.float64(log_p[0])), np.int64(ids[0] == emitted[0]))
    record[DRAFTED] = record[HOPED] = 0
    plan[ACCEPTED] += accepted


@inner
def _follow(record: NDArray[np.int64], address: int, min_p: float, emitted: NDArray[np.int32]) -> bool:
    """Follow with all sources, and learn from, what a text says, and keep it; whether its automaton had room."""
    no_block, no_top, no_logits = np.empty((0, 0), np.int32), np.empty((0, 1), np.int32), np.empty((0, 1), np.float32)
    given = record[GIVEN] = len(emitted)
    record[ROOM] = step.observe(view_i64(record[REQUEST], state.REQUEST), min_p, emitted, no_block, no_top, no_logits)
    said, end = view_i32(record[SAID], record[SAID_ROOM]), view_i32(address + 8 * END, COMPARED)
    for i in range(given):
        said[record[NUM_SAID] + i] = emitted[i]
    for i in range(COMPARED):
        end[i] = end[i + given] if i + given < COMPARED else emitted[i + given - COMPARED]
    record[NUM_SAID] += given
    record[LENGTH] += given
    return bool(record[ROOM] == given)


@inner
def _log_p_of(address: int) -> NDArray[np.float32]:
    return view_f32(address + 8 * LOG_P, MAX_NODES)


@inner
def _grow(
    record: NDArray[np.int64], address: int, most: int, min_p: float, least: float, cost: NDArray[np.float32]
) -> int:
    """Draft a branch of so many nodes at most into a record; returns how many."""
    request = view_i64(record[REQUEST], state.REQUEST)
    table = state.table_of(request)
    size = len(table)
    state.catch_up(table, request)
    return grow_chain(
        table,
        state.cursors_of(request, size),
        state.newest_of(request),
        request[state.LENGTH],
        state.cells_of(request),
        state.scale_of(request),
        state.trust_of(request),
        cost,
        min_p,
        promises.promise(state.promises_of(request, 0)),
        least,
        view_i64_rows(request[state.NODE_CURSORS], (most + 1) * size, CURSOR),
        view_rows(request[state.NODE_TAILS], most + 1, TAIL),
        view_i64(request[state.SCRATCH], request[state.WORDS]),
        view_i32(address + 8 * IDS, most),
        view_f32(address + 8 * LOG_P, most),
        view_u8(address + 8 * SOURCE, most),
    )


@inner
def _least_that_pays(rows: int, cost: NDArray[np.float32]) -> float:
    """Probability below which no node can raise tokens per second, wherever others stop: by the flattest piece."""
    if len(cost) == 0:
        return 0.0
    least = np.float64(cost[1]) - np.float64(cost[0])
    for n in range(1, len(cost) - 1):
        least = min(least, np.float64(cost[n + 1]) - np.float64(cost[n]))
    return least * rows / np.float64(cost[0])


@njit(cache=True, nogil=True)
def share(calls: NDArray[np.int64], cost: NDArray[np.float32], total: int) -> None:
    """Keep the nodes of all rows that give the most tokens per second together, the most probable ones first."""
    rows = len(calls)
    taken, p, order = np.zeros(rows, np.int64), np.zeros(rows), np.empty(MAX_NODES, np.int64)
    for i in range(rows):
        if view_i64(calls[i, ADDRESS], RECORD)[DRAFTED] > 0:
            p[i] = np.exp(np.float64(_log_p_of(calls[i, ADDRESS])[0]))
    gain, count = np.float64(rows), np.int64(min(total, MAX_NODES))
    best_rate, kept = (gain / np.float64(cost[0]), np.int64(0)) if len(cost) > 0 else (0.0, count)
    for n in range(count):
        best = np.int64(0)
        for i in range(1, rows):
            if p[i] > p[best]:
                best = i
        order[n] = best
        gain += p[best]
        taken[best] += 1
        drafted = view_i64(calls[best, ADDRESS], RECORD)[DRAFTED]
        p[best] = np.exp(np.float64(_log_p_of(calls[best, ADDRESS])[taken[best]])) if taken[best] < drafted else 0.0
        if len(cost) > 0 and gain / np.float64(cost[n + 1]) > best_rate:
            best_rate, kept = gain / np.float64(cost[n + 1]), np.int64(n + 1)
    for i in range(rows):
        view_i64(calls[i, ADDRESS], RECORD)[DRAFTED] = 0
    for n in range(kept):
        view_i64(calls[order[n], ADDRESS], RECORD)[DRAFTED] += 1


@inner
def _draft(
    plan: NDArray[np.int64], calls: NDArray[np.int64], min_p: float, cost: NDArray[np.float32], out: NDArray[np.int32]
) -> int:
    """Draft for all rows within one budget; returns how many nodes."""
    rows, total = len(calls), np.int64(0)
    least = _least_that_pays(rows, cost) if rows > 1 else 0.0
    for i in range(rows):
        address = calls[i, ADDRESS]
        record = view_i64(address, RECORD)
        most = min(plan[DEEPEST], calls[i, LONGEST] - record[LENGTH] - 1)
        record[DRAFTED], record[HOPED], record[STEP] = 0, 0, plan[NOW]
        _log_p_of(address)[0] = -np.inf
        if most <= 0:
            continue
        n = _grow(record, address, most, min_p, least, cost[: most + 1] if rows == 1 else cost[:0])
        ids = view_i32(address + 8 * IDS, MAX_NODES)
        while record[DRAFTED] < n and ids[record[DRAFTED]] < plan[VOCABULARY]:
            record[DRAFTED] += 1
        total += record[DRAFTED]
    if rows > 1 and total > 0 and (len(cost) > 0 or total > MAX_NODES):
        share(calls, cost, total)
    written = np.int64(rows)
    for i in range(rows):
        record, ids = view_i64(calls[i, ADDRESS], RECORD), view_i32(calls[i, ADDRESS] + 8 * IDS, MAX_NODES)
        n = record[DRAFTED]
        if n == 0 and len(cost) > 0 and _log_p_of(calls[i, ADDRESS])[0] > -np.inf and ids[0] < plan[VOCABULARY]:
            record[HOPED] = 1
        out[i] = n
        for j in range(n):
            out[written + j] = ids[j]
        written += n
    return written - rows


@njit(cache=True, nogil=True)
def step_chains(
    plan: NDArray[np.int64],
    calls: NDArray[np.int64],
    lengths: NDArray[np.int32],
    min_p: float,
    cost: NDArray[np.float32],
    out: NDArray[np.int32],
) -> int:
    """Follow what each text says since the last call with all its sources, learn from it, then draft a branch for each.

    Parameters
    ----------
    plan, calls, lengths
        (PLAN,) int64 and (r, CALL) int64, columns as above; (≥ r,) int32 tokens of each text.
    min_p
        Probability of a path below which nothing is drafted.
    cost
        (MAX_NODES + 1,) float32 seconds of a pass over all rows and 0 … n nodes, or (0,) to draft all there may be.
    out
        (≥ r + MAX_NODES,) int32, output: how many tokens are drafted for each row, then these.

    Returns
    -------
    int
        How many in all, or `FULL`, `ELSEWHERE` or `UNHELD`: the caller makes room and calls again.
    """
    rows, longest = len(calls), np.int64(0)
    for i in range(rows):
        record, length = view_i64(calls[i, ADDRESS], RECORD), np.int64(lengths[calls[i, PLACE]])
        compared = min(record[LENGTH], np.int64(COMPARED)) if plan[NOW] >= 0 else np.int64(0)
        stands = _stands(record, calls[i, ADDRESS], calls[i, TEXT], length, compared)
        if stands < 0:
            plan[WHO] = i
            return stands
        longest = max(longest, length)
    plan[CONTEXT] = longest
    whole = True
    for i in range(rows):
        address = calls[i, ADDRESS]
        record = view_i64(address, RECORD)
        given = np.int64(lengths[calls[i, PLACE]]) - record[LENGTH]
        if given > 0:
            emitted = view_i32(calls[i, TEXT] + 4 * record[LENGTH], given)
            if plan[NOW] >= 0:
                _judge(record, address, plan, emitted)
            plan[EMITTED] += given
            whole = _follow(record, address, min_p, emitted) and whole
    if not whole:
        return FULL
    if plan[DEEPEST] < 0:
        return np.int64(0)
    drafted = _draft(plan, calls, min_p, cost, out)
    plan[NOW] += 1
    plan[STEPS] += rows > 0
    plan[ROWS] += rows
    plan[MADE] += drafted
    return drafted
