"""Suffix sorting: from a segment's local ids to its suffix array."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydivsufsort import divsufsort

from retrieve_spec.forks import survive_forks


@njit(cache=True, nogil=True)
def _keep_tokens(tokens, byte_positions, width, out):  # type: ignore[no-untyped-def]
    """Keep the byte positions at which a token begins, as token positions, separators left out; returns how many."""
    n = 0
    for i in range(len(byte_positions)):
        at = np.int64(byte_positions[i])
        if at % width == 0 and tokens[at // width] != 0:
            out[n] = at // width
            n += 1
    return n


def suffix_array(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    """Sort the suffixes of a segment.

    Tokens are written as big-endian bytes, as few as the largest needs, so that libdivsufsort's order of bytes is the
    order of tokens; positions inside a token and separators are dropped afterwards. Takes about
    ``(5 * width + 8) * n`` bytes of memory (``9 * width`` above 2^31 bytes).

    Parameters
    ----------
    tokens
        (n,) uint16 or uint32 local ids, n ≤ 2^30.

    Returns
    -------
    numpy.ndarray
        (m,) uint32 positions of tokens, m ≤ n, in the order of the text that starts there.
    """
    survive_forks()
    highest = int(tokens.max(initial=0))
    width = max(1, (highest.bit_length() + 7) // 8)
    content = np.empty((len(tokens), width), np.uint8)
    for i in range(width):
        content[:, i] = (tokens >> (8 * (width - 1 - i))) & 0xFF
    positions = divsufsort(content.reshape(-1)) if len(tokens) else np.empty(0, np.int32)
    del content
    out = np.empty(len(tokens), np.uint32)
    kept = _keep_tokens(tokens, positions, width, out)
    return out[:kept]
