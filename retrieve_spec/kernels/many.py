"""Numba kernels over many requests at once: the step of every row (`kernels/step.py`) in one call.

A call from Python costs what several rows cost. The addresses of the rows' tables are valid for the call alone: whoever
makes it holds the arrays.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels import request as state
from retrieve_spec.kernels import step
from retrieve_spec.kernels.chain import grow_chain
from retrieve_spec.kernels.source_table import CURSOR, ROW, TAIL
from retrieve_spec.kernels.views import view_i64, view_i64_rows, view_rows


@njit(cache=True, nogil=True)
def observe_many(
    rows: NDArray[np.int64],
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    min_p: float,
    emitted: NDArray[np.int32],
    ends: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Follow what each request was given with every one of its sources, and learn at each token, row by row.

    Parameters
    ----------
    rows
        (r, 3) int64: address of a request's table, how many sources it has, address of the request.
    cells, scale, min_p
        As for `step.observe`; one calibration for all rows.
    emitted, ends
        (t,) int32 tokens of all rows one behind the other, and (r,) where each row's end.

    Returns
    -------
    (r,) int64
        For how many tokens there was room in each text's automaton; the caller appends the others.
    """
    appended = np.empty(len(rows), np.int64)
    no_ids, no_top = np.empty(0, np.int32), np.empty((0, 1), np.int32)
    no_logits = np.empty((0, 1), np.float32)
    begins = 0
    for i in range(len(rows)):
        table, request = view_i64_rows(rows[i, 0], rows[i, 1], ROW), view_i64(rows[i, 2], state.REQUEST)
        said = emitted[begins : ends[i]]
        appended[i] = step.observe(table, request, cells, scale, min_p, said, no_ids, no_ids, no_top, no_logits)
        begins = ends[i]
    return appended


@njit(cache=True, nogil=True)
def propose_chains(
    rows: NDArray[np.int64],
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    cost: NDArray[np.float32],
    lengths: NDArray[np.int64],
    min_p: float,
    promise: float,
    token_ids: NDArray[np.int32],
    log_p: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Draft one branch for every request.

    Parameters
    ----------
    rows
        As for `observe_many`.
    cells, scale, cost, min_p, promise
        As for `chain.grow_chain`.
    lengths
        (r,) int64 nodes at most.
    token_ids, log_p, sources
        (r, m) outputs, m ≥ all lengths.

    Returns
    -------
    (r,) int64
        Nodes of each.
    """
    counts = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        size, most = rows[i, 1], lengths[i]
        table, request = view_i64_rows(rows[i, 0], size, ROW), view_i64(rows[i, 2], state.REQUEST)
        state.catch_up(table, request)
        counts[i] = grow_chain(
            table,
            state.cursors_of(request, size),
            state.newest_of(request),
            request[state.LENGTH],
            cells,
            scale,
            step.trust_of(request),
            cost,
            min_p,
            promise,
            view_i64_rows(request[state.NODE_CURSORS], (most + 1) * size, CURSOR),
            view_rows(request[state.NODE_TAILS], most + 1, TAIL),
            view_i64(request[state.SCRATCH], request[state.WORDS]),
            token_ids[i, :most],
            log_p[i, :most],
            sources[i, :most],
        )
    return counts
