"""Numba kernel over many requests at once: the step of every row (`kernels/step.py`) in one call.

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

TABLE, SOURCES, REQUEST, GIVEN, NODES, ROOM, WIDTH = range(7)
"""Columns of the rows: address of a request's table, how many sources it has, address of the request; how many tokens
it was given, nodes at most. Written by the kernel: how many nodes were drafted in place of the latter, and how many of
the tokens there was room for in the text's automaton."""


@njit(cache=True, nogil=True)
def step_chains(
    rows: NDArray[np.int64],
    cells: NDArray[np.float32],
    scale: NDArray[np.float32],
    min_p: float,
    emitted: NDArray[np.int32],
    cost: NDArray[np.float32],
    promise: float,
    token_ids: NDArray[np.int32],
    log_p: NDArray[np.float32],
    sources: NDArray[np.uint8],
) -> bool:
    """Follow what each request was given with all its sources, learn at each token, then draft one branch for each.

    Parameters
    ----------
    rows
        (r, WIDTH) int64, columns as above.
    cells, scale, min_p
        As for `step.observe`; one calibration for all rows.
    emitted
        (t,) int32 tokens of all rows one behind the other.
    cost, promise
        As for `chain.grow_chain`.
    token_ids, log_p, sources
        (r, m) outputs, m ≥ the nodes of each.

    Returns
    -------
    bool
        Whether there was room for all tokens. If not, nothing was drafted: the caller first appends the others.
    """
    no_ids, no_top = np.empty(0, np.int32), np.empty((0, 1), np.int32)
    no_logits = np.empty((0, 1), np.float32)
    begins = np.int64(0)
    whole = True
    for i in range(len(rows)):
        given = rows[i, GIVEN]
        if given > 0:
            table = view_i64_rows(rows[i, TABLE], rows[i, SOURCES], ROW)
            request = view_i64(rows[i, REQUEST], state.REQUEST)
            said = emitted[begins : begins + given]
            room = step.observe(table, request, cells, scale, min_p, said, no_ids, no_ids, no_top, no_logits)
            rows[i, ROOM] = room
            whole = whole and room == given
            begins += given
    if not whole:
        return False
    for i in range(len(rows)):
        size, most = rows[i, SOURCES], rows[i, NODES]
        if most == 0:
            continue
        table, request = view_i64_rows(rows[i, TABLE], size, ROW), view_i64(rows[i, REQUEST], state.REQUEST)
        state.catch_up(table, request)
        rows[i, NODES] = grow_chain(
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
    return True
