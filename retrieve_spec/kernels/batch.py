"""Numba kernel over many requests at once: what each text says is learned, then a branch is drafted for each.

An engine that keeps the texts of its requests hands over where they lie. A request keeps its draft until the next step
verifies it, in the arrays that it was grown in (`kernels/request.py`). Addresses are valid for the call alone: whoever
makes it holds the arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.kernels import calibration
from retrieve_spec.kernels import request as state
from retrieve_spec.kernels.compiled_code import door, inner, making
from retrieve_spec.kernels.request import MATCH
from retrieve_spec.kernels.step import propose
from retrieve_spec.kernels.views import view_f32, view_f64, view_i32, view_i64, view_i64_rows

ADDRESS, TEXT, PLACE, LONGEST = 0, 1, 2, 3
"""Columns of a call's rows: addresses of the request and of the text's first token (int32), which of the lengths is the
text's, tokens that it may have at most."""
CALL = 4
COMPARED = 8
"""Newest tokens by which a text is known again."""

NOW, DEEPEST, VOCABULARY, CONTEXT, WHO = 0, 1, 2, 3, 4
"""Columns of a plan: number of the step, the longest draft, tokens of the model; written by the kernel: the longest
text, the row that has `DIVERGED`."""
STEPS, ROWS, MADE, ACCEPTED, EMITTED = 5, 6, 7, 8, 9
"""Counters: steps, their rows, tokens drafted, of these the right ones, tokens that came."""
BEGIN = 10
"""Column of a plan: the row that a call begins with, 0 for a new step; those before it have drafted."""
PLAN = 11
FULL, DIVERGED = -1, -2
"""What came of a call that drafted nothing: some arrays had no room for what texts say; nothing was done, as a text
does not go on from what was followed."""


@making
def _nodes_of(request: NDArray[np.int64]) -> NDArray[np.int64]:
    return view_i64_rows(request[state.NODES], MAX_NODES, 4)


@inner
def _p_of(request: NDArray[np.int64], n: int) -> float:
    """Path probability of the n-th token of a draft, 0 behind its end; rounded as in a `DraftTree`."""
    if n >= request[state.DRAFTED]:
        return 0.0
    return np.exp(np.float64(np.log(view_f32(request[state.NODE_P], MAX_NODES)[n])))


@inner
def _goes_on(request: NDArray[np.int64], text: int, length: int) -> bool:
    """Whether a text goes on from what was followed."""
    known, kept = request[state.LENGTH], request[state.KEPT]
    if length < known:
        return False
    compared, same = min(kept, np.int64(COMPARED)), True
    recent, before = view_i32(request[state.RECENT], MATCH), view_i32(text + 4 * (known - compared), compared)
    for i in range(compared):
        same &= recent[kept - compared + i] == before[i]
    return same


@inner
def _judge(request: NDArray[np.int64], plan: NDArray[np.int64], emitted: NDArray[np.int32]) -> None:
    """Learn what became of a request's draft; one that was made for an earlier step was not verified."""
    drafted = request[state.DRAFTED] if request[state.STEP] == plan[NOW] - 1 else np.int64(0)
    nodes, accepted, expected = _nodes_of(request), np.int64(0), 0.0
    while accepted < min(drafted, len(emitted)) and nodes[accepted, 0] == emitted[accepted]:
        accepted += 1
    for i in range(drafted):
        expected += _p_of(request, i)
    if drafted > 0:
        calibration.learn_draft(state.drafts_of(request, 0), expected, accepted)
    request[state.DRAFTED] = 0
    plan[ACCEPTED] += accepted


@inner
def _keep(request: NDArray[np.int64], emitted: NDArray[np.int32]) -> None:
    """Keep what was generated."""
    said = view_i32(request[state.SAID], request[state.SAID_ROOM])
    for i in range(len(emitted)):
        said[request[state.NUM_SAID] + i] = emitted[i]
    request[state.NUM_SAID] += len(emitted)


@inner
def _least_that_pays(rows: int, cost: NDArray[np.float32]) -> float:
    """Probability below which no node can raise tokens per second, wherever others stop: by the flattest piece."""
    if rows == 1 or len(cost) == 0:
        return 0.0
    least = np.float64(cost[1]) - np.float64(cost[0])
    for n in range(1, len(cost) - 1):
        least = min(least, np.float64(cost[n + 1]) - np.float64(cost[n]))
    return least * rows / np.float64(cost[0])


@making
def share(calls: NDArray[np.int64], cost: NDArray[np.float32], total: int) -> None:
    """Keep the nodes of all rows that give the most tokens per second together, the most probable ones first."""
    rows = len(calls)
    taken, p, order = np.zeros(rows, np.int64), np.zeros(rows), np.empty(MAX_NODES, np.int64)
    for i in range(rows):
        p[i] = _p_of(view_i64(calls[i, ADDRESS], state.REQUEST), 0)
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
        p[best] = _p_of(view_i64(calls[best, ADDRESS], state.REQUEST), taken[best])
        if len(cost) > 0 and gain / np.float64(cost[n + 1]) > best_rate:
            best_rate, kept = gain / np.float64(cost[n + 1]), np.int64(n + 1)
    for i in range(rows):
        view_i64(calls[i, ADDRESS], state.REQUEST)[state.DRAFTED] = 0
    for n in range(kept):
        view_i64(calls[order[n], ADDRESS], state.REQUEST)[state.DRAFTED] += 1


@making
def _follow_and_grow(
    request: NDArray[np.int64],
    plan: NDArray[np.int64],
    emitted: NDArray[np.int32],
    most: int,
    min_p: float,
    least: float,
    cost: NDArray[np.float32],
) -> bool:
    """Learn what a text says and draft a branch of so many nodes at most; False where an automaton had no room."""
    no_block, no_top, no_logits = np.empty((0, 0), np.int32), np.empty((0, 1), np.int32), np.empty((0, 1), np.float32)
    if len(emitted) > 0:
        _judge(request, plan, emitted)
        _keep(request, emitted)
    zero, one = np.int64(0), np.int64(1)  # not literals: for each of those the step would be compiled once more
    room, _, tree = propose(
        request, cost, most, most, min_p, zero, one, least, emitted, zero, zero, 0.0, no_block, no_top, no_logits, one
    )
    request[state.LEFT] = len(emitted) - room
    request[state.DRAFTED], request[state.STEP] = 0, plan[NOW]
    nodes = _nodes_of(request)
    while request[state.DRAFTED] < tree.shape[1] and nodes[request[state.DRAFTED], 0] < plan[VOCABULARY]:
        request[state.DRAFTED] += 1
    return bool(request[state.LEFT] == 0)


@inner
def _write(plan: NDArray[np.int64], calls: NDArray[np.int64], judged: bool, out: NDArray[np.int32]) -> int:
    """Write the drafts of all rows; returns how many nodes. Of dropped drafts the first token is still `judged`."""
    rows = len(calls)
    written = np.int64(rows)
    for i in range(rows):
        request = view_i64(calls[i, ADDRESS], state.REQUEST)
        nodes, n = _nodes_of(request), request[state.DRAFTED]
        if n > 0 or not judged or request[state.FIRST] >= plan[VOCABULARY]:
            view_f64(request[state.FIRST_P], 1)[0] = 0.0
        out[i] = n
        for j in range(n):
            out[written + j] = nodes[j, 0]
        written += n
    return written - rows


@door
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
        How many in all, or `FULL` or `DIVERGED`: the caller makes room and calls again.
    """
    rows, longest, total, whole = len(calls), np.int64(0), np.int64(0), True
    for i in range(rows):
        request, length = view_i64(calls[i, ADDRESS], state.REQUEST), np.int64(lengths[calls[i, PLACE]])
        if not _goes_on(request, calls[i, TEXT], length):
            plan[WHO] = i
            return DIVERGED
        whole &= request[state.NUM_SAID] + length - request[state.LENGTH] <= request[state.SAID_ROOM]
        longest = max(longest, length)
    if not whole:
        return FULL
    plan[CONTEXT] = longest
    least = _least_that_pays(rows, cost)
    for i in range(plan[BEGIN], rows):
        request, length = view_i64(calls[i, ADDRESS], state.REQUEST), np.int64(lengths[calls[i, PLACE]])
        known = request[state.LENGTH]
        emitted = view_i32(calls[i, TEXT] + 4 * known, length - known)
        plan[EMITTED] += len(emitted)
        most = max(min(plan[DEEPEST], calls[i, LONGEST] - length - 1), np.int64(0))
        paid = cost[: most + 1] if rows == 1 else cost[:0]
        if not _follow_and_grow(request, plan, emitted, most, min_p, least, paid):
            plan[BEGIN] = i  # the rows behind it learn from the same tables once it has drafted
            return FULL
    for i in range(rows):
        total += view_i64(calls[i, ADDRESS], state.REQUEST)[state.DRAFTED]
    if rows > 1 and total > 0 and (len(cost) > 0 or total > MAX_NODES):
        share(calls, cost, total)
    drafted = _write(plan, calls, len(cost) > 0, out)
    plan[NOW] += 1
    plan[STEPS] += rows > 0
    plan[ROWS] += rows
    plan[MADE] += drafted
    return drafted
