"""Numba kernel of published copy rules: where the end of a text occurred first."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def earliest_end(text: NDArray[np.int32], length: int) -> int:
    """Where the first occurrence of the last `length` tokens goes on, at most ``len(text)`` (no earlier occurrence)."""
    n = len(text)
    for end in range(length, n):
        i = 1
        while i <= length and text[end - i] == text[n - i]:
            i += 1
        if i > length:
            return end
    return n
