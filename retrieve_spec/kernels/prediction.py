"""Numba kernels that keep a position in a text the user expects, and find it again after the output left it."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner

LOOKBACK = 32
"""Longest match used to find the place again."""


@inner
def anchor(text: NDArray[np.int32], recent: NDArray[np.int32], near: int) -> tuple[int, int]:
    """Where in ``text`` the output stands now.

    Parameters
    ----------
    text
        (n,) int32 expected text.
    recent
        (m,) int32 newest emitted tokens, oldest first.
    near
        Position expected if the output went on in parallel; ties in match length go to the nearest place.

    Returns
    -------
    position, matched
        Next expected token's index and how many of the newest tokens precede it there; (0, 0) when none does.
    """
    best, best_len = 0, 0
    m = len(recent)
    if m == 0:
        return best, best_len
    newest = recent[m - 1]
    for i in range(len(text)):
        if text[i] != newest:
            continue
        length = 1
        while length < min(m, LOOKBACK) and length <= i and text[i - length] == recent[m - 1 - length]:
            length += 1
        closer = length == best_len and abs(i + 1 - near) < abs(best - near)
        if length > best_len or closer:
            best, best_len = i + 1, length
    return best, best_len


@njit(cache=True, nogil=True)
def follow(
    text: NDArray[np.int32], cursors: NDArray[np.int64], emitted: NDArray[np.int32], recent: NDArray[np.int32]
) -> None:
    """Move the cursors (3, 4) of an expected text over emitted tokens; see `sources.prediction.Prediction`.

    Parameters
    ----------
    recent
        (m,) int32 newest tokens of the text so far, the emitted ones included, oldest first.
    """
    for token in emitted:
        hit = -1
        for c in range(2, -1, -1):
            if cursors[c, 1] >= 0 and cursors[c, 0] < len(text) and text[cursors[c, 0]] == token:
                hit = c
        if hit >= 0:
            cursors[0, 0], cursors[0, 1] = cursors[hit, 0] + 1, cursors[hit, 1] + 1
            cursors[1, 1] = -1
            cursors[2, 1] = -1
        else:
            if cursors[0, 1] > 0:
                cursors[1, 0], cursors[1, 1] = cursors[0, 0] + 1, 0
                cursors[2, 0], cursors[2, 1] = cursors[0, 0], 0
            cursors[0, 1] = -1
    if cursors[0, 1] <= 0 and len(emitted) > 0:
        position, matched = anchor(text, recent, cursors[0, 0])
        if matched > 0:  # otherwise the place last known stays the one to look near
            cursors[0, 0], cursors[0, 1] = position, matched
            for c in range(1, 3):
                if cursors[c, 0] == position:
                    cursors[c, 1] = -1
