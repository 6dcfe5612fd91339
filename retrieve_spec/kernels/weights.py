"""Numba kernels that say how much of the mass a level takes: learned over all requests, corrected within one.

Over all requests a weight is ``explained / reached`` of its cell (source, match length, count, distinct continuations),
shrunk towards a prior. Within a request its odds are multiplied by two factors that begin at one: one per source, one
per source and length class. They are random effects of a logistic model, followed by a Kalman filter with one variance
per factor, so a request that does not follow what others followed is noticed within a few tokens.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner

LENGTH_BUCKETS, COUNT_BUCKETS, DISTINCT_BUCKETS = 12, 8, 6
NUM_SOURCES = 10
_CONTEXT, _PREDICTION, _RECYCLING, _DENSE, _PHRASES, _ALIGNMENT = 0, 2, 3, 6, 8, 9
"""How many `retrieve_spec.sources.SOURCE_NAMES` there are, and the places of some of them."""
CELLS = NUM_SOURCES * LENGTH_BUCKETS * COUNT_BUCKETS * DISTINCT_BUCKETS
PRIOR_WEIGHT = 6.0
"""Observations that the prior of a cell counts for."""
CELL_MEMORY = 400.0
"""Observations after which a cell forgets as fast as it learns."""
LENGTH_CLASSES = 3
"""Classes of match length (up to 3 tokens, up to 11, more) that are corrected within a request."""
_CELLS_PER_CLASS = LENGTH_BUCKETS // LENGTH_CLASSES * COUNT_BUCKETS * DISTINCT_BUCKETS
REQUEST_VARIANCE = 1.0
"""Variance of the logarithm of either factor between requests."""
_FURTHEST = 500.0
"""A factor's largest distance from one."""


@njit(cache=True, nogil=True)
def length_bucket(n: int) -> int:
    """0 … 11 for match lengths 0, 1, 2, 3, 4, 5, 6–7, 8–11, 12–15, 16–23, 24–39, 40 and more."""
    if n <= 5:
        return n
    if n <= 7:
        return 6
    if n <= 11:
        return 7
    if n <= 15:
        return 8
    if n <= 23:
        return 9
    return 10 if n <= 39 else 11


@inner
def count_bucket(n: int) -> int:
    """0 … 7 for counts 1, 2, 3, 4–5, 6–8, 9–16, 17–64, 65 and more."""
    if n <= 3:
        return max(n, 1) - 1
    if n <= 5:
        return 3
    if n <= 8:
        return 4
    if n <= 16:
        return 5
    return 6 if n <= 64 else 7


@inner
def distinct_bucket(n: int) -> int:
    """0 … 5 for 1, 2, 3, 4–5, 6–8, 9 and more distinct continuations."""
    if n <= 3:
        return max(n, 1) - 1
    if n <= 5:
        return 3
    return 4 if n <= 8 else 5


@inner
def cell_of(source: int, length: int, total: int, distinct: int) -> int:
    """Row of the calibration table."""
    c = source * LENGTH_BUCKETS + length_bucket(length)
    return (c * COUNT_BUCKETS + count_bucket(total)) * DISTINCT_BUCKETS + distinct_bucket(distinct)


@inner
def level_weight(cells: NDArray[np.float32], cell: int, prior: float) -> float:
    """Share of the remaining mass that a level takes: learned, shrunk towards its prior."""
    return (np.float64(cells[cell, 0]) + PRIOR_WEIGHT * prior) / (np.float64(cells[cell, 1]) + PRIOR_WEIGHT)


@inner
def recency_weight(cells: NDArray[np.float32], cell: int) -> float:
    """Share of a level that goes to its most recent continuation, whatever its count."""
    return (np.float64(cells[cell, 2]) + 0.15 * PRIOR_WEIGHT) / (np.float64(cells[cell, 3]) + PRIOR_WEIGHT)


@inner
def prior_weight(source: int, length: int, total: int, distinct: int) -> float:
    """Weight of a level before anything was learned: n / (n + a·d), with a falling in the match length."""
    if source == _RECYCLING:  # the target's own probabilities
        return 0.75 if length >= 2 else 0.6
    if source == _PHRASES:  # said to others, often by other subjects
        return 0.75 * total / (total + 10.0)
    if source == _ALIGNMENT:  # the length is how many of its last predictions came true
        return 0.1 + 0.06 * length
    if source == _PREDICTION:  # one continuation, trusted by how long it has been right
        return 0.9 - 0.5 / (1.0 + length)
    if length == 0:
        a = 20.0
    elif length <= 1:
        a = 6.0 if source == _CONTEXT else 4.0
    elif length == 2:
        a = 2.5
    elif length == 3:
        a = 1.5
    elif length == 4:
        a = 1.0
    else:
        a = max(0.15, 3.5 / length)
    if source > _RECYCLING:  # a store
        a = 3.0 if source == _DENSE and length < 6 else 1.0  # a similar state says less than the same text
    return total / (total + a * distinct)


def begin_request(trust: NDArray[np.float64]) -> None:
    """Put all factors to one: ``trust`` (NUM_SOURCES, 1 + LENGTH_CLASSES, 2) holds factors and their variances."""
    trust[:, :, 0] = 1.0
    trust[:, :, 1] = REQUEST_VARIANCE


@inner
def odds_of(trust: NDArray[np.float64], cell: int) -> float:
    """What the odds of a cell's weight are multiplied by in this request."""
    at = cell // _CELLS_PER_CLASS
    return trust[at // LENGTH_CLASSES, 0, 0] * trust[at // LENGTH_CLASSES, 1 + at % LENGTH_CLASSES, 0]


@inner
def multiplied(weight: float, odds: float) -> float:
    """A weight with its odds multiplied."""
    return weight * odds / (1.0 - weight + weight * odds)


@inner
def adapt(trust: NDArray[np.float64], cell: int, weight: float, explained: float, reached: float) -> None:
    """Move the two factors of a cell: the level was reached and explained the token with these probabilities."""
    at = cell // _CELLS_PER_CLASS
    for i in (0, 1 + at % LENGTH_CLASSES):
        factor = trust[at // LENGTH_CLASSES, i]
        factor[1] /= 1.0 + factor[1] * weight * (1.0 - weight) * reached
        moved = factor[0] * np.exp(factor[1] * (explained - weight * reached))
        factor[0] = min(max(moved, 1.0 / _FURTHEST), _FURTHEST)
