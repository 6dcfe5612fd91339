"""Numba kernels that keep a position in a text the user expects, and find it again after the output left it."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

LOOKBACK = 32
"""Longest match used to find the place again."""


@njit(cache=True, nogil=True)
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
