"""Thinning of dense keys: the positions at which exact matching does not say what comes next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.segment import Segment
from retrieve_spec.datastore.sort import suffix_array

LONGEST = 16
"""Tokens of context that are compared; longer matches count as this long."""


def hard_positions(segment: Segment) -> NDArray[np.bool_]:
    """Positions whose longest match elsewhere in the segment is not followed by the same token.

    Sorting the text read backwards puts every position next to those that share its longest contexts, so the longest
    match elsewhere is that of one of the two neighbours; where both are as long, one that is right suffices.

    Returns
    -------
    numpy.ndarray
        (n,) bool over the segment's token array; True also where nothing matches.
    """
    tokens = np.asarray(segment.tokens)
    last = len(tokens) - 1
    order = last - suffix_array(tokens[::-1].copy()).astype(np.int64)  # by the text that ends there
    follow = np.append(tokens, np.zeros(1, tokens.dtype))[order + 1]
    shared = np.zeros(len(order) + 1, np.int64)  # with the entry before; none before the first and behind the last
    left, right = order[:-1], order[1:]
    alive = np.ones(len(left), np.bool_)
    for back in range(LONGEST):
        alive &= (left >= back) & (right >= back)
        a, b = tokens[np.maximum(left - back, 0)], tokens[np.maximum(right - back, 0)]
        alive &= (a == b) & (a != 0)
        shared[1:-1] += alive
    same = np.zeros(len(order) + 1, np.bool_)
    same[1:-1] = follow[:-1] == follow[1:]
    before, behind = shared[:-1], shared[1:]
    longest = np.maximum(before, behind)
    right_before, right_behind = same[:-1] & (before == longest), same[1:] & (behind == longest)
    predicted = (longest > 0) & (right_before | right_behind)
    hard = np.ones(len(tokens), np.bool_)
    hard[order[predicted]] = False
    return hard
