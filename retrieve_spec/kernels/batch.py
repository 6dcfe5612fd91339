"""Numba kernel for many requests at once: learn from each text, then draft a chain for each.

An engine that keeps its requests' texts passes their addresses. A request keeps its draft until the next step verifies
it, in the arrays in which it was grown (`kernels/request.py`). Addresses are only valid during the call; the caller
holds the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.kernels import calibration
from retrieve_spec.kernels import request as state
from retrieve_spec.kernels.compiled_code import inner, inner_with_arrays, kernel
from retrieve_spec.kernels.request import MATCH, request_at
from retrieve_spec.kernels.step import propose
from retrieve_spec.kernels.treemask import BLOCK_ROWS, PARENTS, TOKENS
from retrieve_spec.kernels.views import Record, record_at, records_at, view_f32, view_f32_rows, view_i32, view_rows

CALL = np.dtype([(name, np.int64) for name in ("request", "text", "place", "longest", "first", "seen")], align=True)
"""Record of a row: addresses of its request and of its text's first token (int32), index of the text's length in
`lengths`, and most tokens that the text may have. Written by the kernel: where its rows of `top_ids` begin, and how
many there are."""
PLAN = np.dtype(
    [
        (name, np.int64)
        for name in (
            # number of the step, the longest draft, tokens of the model
            *("now", "deepest", "vocabulary"),
            # written by the kernel: the longest text, and the row that has `DIVERGED`
            *("context", "diverged_row"),
            # counters: steps, rows, drafted tokens, accepted tokens, emitted tokens
            *("steps", "rows", "drafted", "accepted", "emitted"),
            # first row of a call, -1 for a new step; rows before it have drafted
            "begin",
        )
    ],
    align=True,
)
"""Record of an engine's step."""
calls_at, plan_at = records_at(CALL), record_at(PLAN)
COMPARED = 8
"""Number of newest tokens by which a text is recognised."""
FULL, DIVERGED = -1, -2
"""Results of a call that drafted nothing: some arrays were full; or a text does not continue the followed one, and
nothing was done."""


@inner_with_arrays
def _tokens_of(request: Record) -> NDArray[np.int64]:
    """Return the (MAX_NODES,) tokens of a request's chain."""
    return state.nodes_of(request, MAX_NODES)[:, state.NODE_TOKEN]


@inner
def _p_of(request: Record, n: int) -> float:
    """Return the path probability of a draft's n-th token, rounded as in a `DraftTree`; 0 after its end."""
    if n >= request.num_drafted:
        return 0.0
    return np.exp(np.float64(np.log(view_f32(request.node_p, MAX_NODES)[n])))


@inner
def _goes_on(request: Record, text: int, length: int) -> bool:
    """Whether a text continues the followed one."""
    known, kept = request.length, request.num_recent
    if length < known:
        return False
    compared, same = min(kept, np.int64(COMPARED)), True
    recent, before = view_i32(request.recent, MATCH), view_i32(text + 4 * (known - compared), compared)
    for i in range(compared):
        same &= recent[kept - compared + i] == before[i]
    return same


@inner
def _judge(request: Record, plan: Record, emitted: NDArray[np.int32]) -> None:
    """Learn how much of a request's draft was accepted; drafts for earlier steps were not verified."""
    drafted = request.num_drafted if request.step == plan.now - 1 else np.int64(0)
    tokens, accepted, expected = _tokens_of(request), np.int64(0), 0.0
    while accepted < min(drafted, len(emitted)) and tokens[accepted] == emitted[accepted]:
        accepted += 1
    for i in range(drafted):
        expected += _p_of(request, i)
    if drafted > 0:
        calibration.learn_draft(state.drafts_of(request, 0), expected, accepted)
    request.num_drafted = 0
    plan.accepted += accepted


@inner
def _keep(request: Record, emitted: NDArray[np.int32]) -> None:
    """Append generated tokens to the request's text."""
    said = view_i32(request.output, request.output_capacity)
    for i in range(len(emitted)):
        said[request.output_length + i] = emitted[i]
    request.output_length += len(emitted)


@inner
def _least_that_pays(rows: int, cost: NDArray[np.float32]) -> float:
    """Return the probability below which no node can raise tokens per second, where the cost curve is flattest."""
    if rows == 1 or len(cost) == 0:
        return 0.0
    least = np.float64(cost[1]) - np.float64(cost[0])
    for n in range(1, len(cost) - 1):
        least = min(least, np.float64(cost[n + 1]) - np.float64(cost[n]))
    return least * rows / np.float64(cost[0])


@inner_with_arrays
def share(calls: NDArray[Any], cost: NDArray[np.float32], total: int) -> None:
    """Keep the nodes, most probable first, with which all rows together get the most tokens per second."""
    rows = len(calls)
    taken, p, order = np.zeros(rows, np.int64), np.zeros(rows), np.empty(MAX_NODES, np.int64)
    for i in range(rows):
        p[i] = _p_of(request_at(calls[i].request), 0)
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
        p[best] = _p_of(request_at(calls[best].request), taken[best])
        if len(cost) > 0 and gain / np.float64(cost[n + 1]) > best_rate:
            best_rate, kept = gain / np.float64(cost[n + 1]), np.int64(n + 1)
    for i in range(rows):
        request_at(calls[i].request).num_drafted = 0
    for n in range(kept):
        request_at(calls[order[n]].request).num_drafted += 1


@inner
def _divide(plan: Record, calls: NDArray[Any], seen: int) -> None:
    """Note which of the `seen` rows of a pass are each request's; none if it did not verify the drafts."""
    first = np.int64(0)
    for i in range(len(calls)):
        request = request_at(calls[i].request)
        calls[i].first = first
        calls[i].seen = 1 + (request.num_drafted if request.step == plan.now - 1 else 0)
        first += calls[i].seen
    if first != seen:
        for i in range(len(calls)):
            calls[i].seen = 0


@inner_with_arrays
def _verified_chain(request: Record, rows: int) -> NDArray[np.int32]:
    """Return the chain that a pass over so many rows verified, as the block of a tree; kernels read no more of it."""
    tokens, block = _tokens_of(request), np.empty((BLOCK_ROWS, max(rows - 1, 0)), np.int32)
    for i in range(rows - 1):
        block[TOKENS, i], block[PARENTS, i] = tokens[i], i - 1
    return block


@inner_with_arrays
def _follow_and_grow(
    call: Record,
    plan: Record,
    emitted: NDArray[np.int32],
    most: int,
    least: float,
    cost: NDArray[np.float32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
    keys: NDArray[np.int8],
) -> bool:
    """Learn from a text, and draft a chain of at most `most` nodes; False if an automaton was full."""
    request, k = request_at(call.request), top_ids.shape[1]
    rows = call.seen if len(emitted) <= call.seen else np.int64(0)  # else more came than a pass gives
    verified = _verified_chain(request, rows)
    ids = view_rows(top_ids.ctypes.data + 4 * k * call.first, rows, k)
    logits = view_f32_rows(top_logits.ctypes.data + 4 * k * call.first, rows, k)
    request.keys = keys.ctypes.data + keys.shape[1] * call.first if rows > 0 and len(keys) > 0 else 0
    if len(emitted) > 0:
        _judge(request, plan, emitted)
        _keep(request, emitted)
    one = np.int64(1)  # not a literal, since each literal would compile the step again
    request.num_verified, request.least_p = 0, least  # judged above, since the engine verifies chains
    room, _, tree = propose(call.request, cost, most, most, one, emitted, verified, ids, logits, one)
    request.least_p = 0.0
    request.num_unread = len(emitted) - room
    request.num_drafted, request.step = 0, plan.now
    tokens = _tokens_of(request)
    while request.num_drafted < tree.shape[1] and tokens[request.num_drafted] < plan.vocabulary:
        request.num_drafted += 1
    return bool(request.num_unread == 0)


@inner
def _write(plan: Record, calls: NDArray[Any], judged: bool, out: NDArray[np.int32]) -> int:
    """Write the drafts of all rows; return how many nodes. A dropped draft's first token is still `judged`."""
    rows = len(calls)
    written = np.int64(rows)
    for i in range(rows):
        request = request_at(calls[i].request)
        tokens, n = _tokens_of(request), request.num_drafted
        if n > 0 or not judged or request.first_token >= plan.vocabulary:
            request.first_p = 0.0
        out[i] = n
        for j in range(n):
            out[written + j] = tokens[j]
        written += n
    return written - rows


@kernel
def step_chains(
    plan_address: int,
    calls_address: int,
    rows: int,
    lengths: NDArray[np.int32],
    cost: NDArray[np.float32],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
    keys: NDArray[np.int8],
    out: NDArray[np.int32],
) -> int:
    """Follow each text's new tokens with all its sources, learn from them, then draft a chain for each.

    Parameters
    ----------
    plan_address, calls_address, rows
        Addresses of a `PLAN` and of (r,) `CALL`, and r.
    lengths
        (≥ r,) int32 numbers of tokens of the texts.
    cost
        (MAX_NODES + 1,) float32 seconds of a pass over all rows with 0 … n nodes, or (0,) to draft as much as allowed.
    top_ids, top_logits, keys
        (n, k) int32 and float32 top tokens of the target after each text's last token and each node of its last draft,
        and (n, dims) int8 keys of its states there; (0, k) and (0, dims) if they are not known.
    out
        (≥ r + MAX_NODES,) int32 output: number of drafted tokens for each row, then the tokens.

    Returns
    -------
    int
        Number of drafted tokens, or `FULL` or `DIVERGED`: the caller makes room and calls again.
    """
    plan, calls = plan_at(plan_address), calls_at(calls_address, rows)
    longest, total, whole = np.int64(0), np.int64(0), True
    for i in range(rows):
        request, length = request_at(calls[i].request), np.int64(lengths[calls[i].place])
        if not _goes_on(request, calls[i].text, length):
            plan.diverged_row = i
            return DIVERGED
        whole &= request.output_length + length - request.length <= request.output_capacity
        longest = max(longest, length)
    if not whole:
        return FULL
    plan.context = longest
    least = _least_that_pays(rows, cost)
    if plan.begin < 0:
        _divide(plan, calls, np.int64(len(top_ids)))
        plan.begin = 0
    for i in range(plan.begin, rows):
        request, length = request_at(calls[i].request), np.int64(lengths[calls[i].place])
        known = request.length
        emitted = view_i32(calls[i].text + 4 * known, length - known)
        plan.emitted += len(emitted)
        most = max(min(plan.deepest, calls[i].longest - length - 1), np.int64(0))
        paid = cost[: most + 1] if rows == 1 else cost[:0]
        if not _follow_and_grow(calls[i], plan, emitted, most, least, paid, top_ids, top_logits, keys):
            plan.begin = i  # later rows learn in the same tables after it has drafted
            return FULL
    for i in range(rows):
        total += request_at(calls[i].request).num_drafted
    if rows > 1 and total > 0 and (len(cost) > 0 or total > MAX_NODES):
        share(calls, cost, total)
    drafted = _write(plan, calls, len(cost) > 0, out)
    plan.now += 1
    plan.steps += rows > 0
    plan.rows += rows
    plan.drafted += drafted
    return drafted
