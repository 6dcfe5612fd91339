"""Suffix sorting: the suffix array of a segment's local ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.induced_sort import sort_suffixes


def suffix_array(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    """Sort the suffixes of a segment.

    Parameters
    ----------
    tokens
        (n,) uint16 or uint32 local ids, n < 2^31; small numbers, since every one below the largest takes memory.

    Returns
    -------
    numpy.ndarray
        (m,) uint32 positions of tokens, m ≤ n, in the order of the text that starts there; separators, which would
        come first, are left out.
    """
    found = sort_suffixes(tokens, int(tokens.max(initial=0)) + 1)
    return found[len(tokens) - np.count_nonzero(tokens) :].view(np.uint32)
