"""Numba kernels of calibration: weights of levels, scale of probabilities, acceptance of drafts, cost of passes.

Weights: the share of the mass that a level takes. Over all requests, a weight is ``explained / reached`` of its cell
(source, match length, count, distinct continuations), shrunk towards a prior. Within a request, its odds are multiplied
by two factors that start at one: per source, and per source and length class. They are random effects of a logistic
model, estimated by a Kalman filter with one variance per factor, so that a request that differs from others is noticed
within a few tokens.

Scale: blended probabilities are corrected by the outcomes of earlier ones, per source and log-odds bin.

Acceptance: a token's probability is calibrated at places that the text reached, but a path's is a product over places
that it may never reach. So the ratio of accepted to expected tokens of whole drafts is learned as two counts, by the
kernels that make the next draft (`kernels/step.py`, `kernels/batch.py`), or for other drafts by
`retrieve_spec.drafting.calibration.Calibration`.

Cost: a Kalman filter of the logarithm of a pass's time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, kernel, kernel_with_arrays

LENGTH_BUCKETS, COUNT_BUCKETS, DISTINCT_BUCKETS = 12, 8, 6
NUM_SOURCES = 13
_CONTEXT, _PREDICTION, _RECYCLING, _DENSE = 0, 2, 3, 6
_PHRASES, _ALIGNMENT, _BIGRAMS, _DISTILLED, _STATES = 8, 9, 10, 11, 12
"""Number of `retrieve_spec.sources.SOURCE_NAMES` with calibrated probabilities, and indices of some of them."""
FORCED = NUM_SOURCES
"""Index for forced tokens, which need no source."""
CELLS = NUM_SOURCES * LENGTH_BUCKETS * COUNT_BUCKETS * DISTINCT_BUCKETS
PRIOR_WEIGHT = 6.0
"""Weight of a cell's prior in observations."""
CELL_MEMORY = 400.0
"""Number of observations after which a cell forgets as fast as it learns."""
LENGTH_CLASSES = 3
"""Number of match-length classes (up to 3 tokens, up to 11, more) with corrections within a request."""
_CELLS_PER_CLASS = LENGTH_BUCKETS // LENGTH_CLASSES * COUNT_BUCKETS * DISTINCT_BUCKETS
REQUEST_VARIANCE = 1.0
"""Variance of the logarithm of each factor between requests."""
_FURTHEST = 500.0
"""Largest factor; the smallest is its inverse."""


@kernel
def length_bucket(n: int) -> int:
    """Return 0 … 11 for match lengths 0, 1, 2, 3, 4, 5, 6–7, 8–11, 12–15, 16–23, 24–39, 40 and more."""
    # A sum, since branches would be unpredictable; it starts with an int, since NumPy's booleans add up to a boolean.
    short = 0 + (n >= 1) + (n >= 2) + (n >= 3) + (n >= 4) + (n >= 5) + (n >= 6)
    return short + (n >= 8) + (n >= 12) + (n >= 16) + (n >= 24) + (n >= 40)


@inner
def count_bucket(n: int) -> int:
    """Return 0 … 7 for counts 1, 2, 3, 4–5, 6–8, 9–16, 17–64, 65 and more."""
    return 0 + (n >= 2) + (n >= 3) + (n >= 4) + (n >= 6) + (n >= 9) + (n >= 17) + (n >= 65)


@inner
def distinct_bucket(n: int) -> int:
    """Return 0 … 5 for 1, 2, 3, 4–5, 6–8, 9 and more distinct continuations."""
    return 0 + (n >= 2) + (n >= 3) + (n >= 4) + (n >= 6) + (n >= 9)


@inner
def cell_of(source: int, length: int, total: int, distinct: int) -> int:
    """Return the row of a cell in the calibration table."""
    c = source * LENGTH_BUCKETS + length_bucket(length)
    return (c * COUNT_BUCKETS + count_bucket(total)) * DISTINCT_BUCKETS + distinct_bucket(distinct)


@inner
def recency_weight(cells: NDArray[np.float32], cell: int) -> float:
    """Return the share of a level that goes to its most recent continuation regardless of its count."""
    return (np.float64(cells[cell, 2]) + 0.15 * PRIOR_WEIGHT) / (np.float64(cells[cell, 3]) + PRIOR_WEIGHT)


@inner
def prior_weight(source: int, length: int, total: int, distinct: int) -> float:
    """Return a level's prior weight: n / (n + a·d), where a decreases with the match length."""
    if source == _RECYCLING or source == _DISTILLED:  # the target's own probabilities
        return 0.75 if length >= 2 else 0.6 if length == 1 else 0.3  # 0: a skip-gram
    if source == _STATES:  # the target's, after texts that are alike
        return 0.6 if length <= 3 else 0.75
    if source == _BIGRAMS:  # the target's, regardless of earlier tokens
        return 0.5
    if source == _PHRASES:  # from other requests, often on other subjects
        return 0.75 * total / (total + 10.0)
    if source == _ALIGNMENT:  # the length is the number of its recent right predictions
        return 0.1 + 0.06 * length
    if source == _PREDICTION:  # one continuation; trust depends on how long it has been right
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
        a = 3.0 if source == _DENSE and length < 6 else 1.0  # similar states predict less than equal text
    return total / (total + a * distinct)


def begin_request(trust: NDArray[np.float64]) -> None:
    """Reset all factors to one; ``trust`` (NUM_SOURCES, 1 + LENGTH_CLASSES, 2) holds factors and variances."""
    trust[:, :, 0] = 1.0
    trust[:, :, 1] = REQUEST_VARIANCE


@inner
def odds_of(trust: NDArray[np.float64], cell: int) -> float:
    """Return the factor by which this request multiplies the odds of a cell's weight."""
    at = cell // _CELLS_PER_CLASS
    return trust[at // LENGTH_CLASSES, 0, 0] * trust[at // LENGTH_CLASSES, 1 + at % LENGTH_CLASSES, 0]


@inner
def multiplied(weight: float, odds: float) -> float:
    """Multiply the odds of a weight."""
    return weight * odds / (1.0 - weight + weight * odds)


@inner
def adapt(trust: NDArray[np.float64], cell: int, weight: float, explained: float, reached: float) -> None:
    """Update a cell's two factors: its level was reached, and explained the token, with these probabilities."""
    at = cell // _CELLS_PER_CLASS
    for i in (0, 1 + at % LENGTH_CLASSES):
        factor = trust[at // LENGTH_CLASSES, i]
        factor[1] /= 1.0 + factor[1] * weight * (1.0 - weight) * reached
        moved = factor[0] * np.exp(factor[1] * (explained - weight * reached))
        factor[0] = min(max(moved, 1.0 / _FURTHEST), _FURTHEST)


SCALE_BINS = 33
"""Number of bins over log-odds -8 … 8; a probability is shared by the two nearest bins."""
SCALE_PRIOR = 8.0
"""Weight of a bin's prior (no correction) in summed probability."""
SCALE_MEMORY = 1000.0
"""Summed probability after which a bin forgets as fast as it learns."""
CERTAIN = 0.9999
"""Largest probability of a node."""


@inner
def scale_bin(p: float) -> tuple[int, float]:
    """Return the lower bin of a probability on the log-odds scale, and the fractional part."""
    p = min(max(p, 1e-6), 1.0 - 1e-6)
    x = (min(max(np.log(p / (1.0 - p)), -7.999), 7.999) + 8.0) * 2.0
    i = int(x)
    return i, x - i


@inner
def scaled(scale: NDArray[np.float32], row: int, p: float) -> float:
    """Correct a probability by a row of ``scale`` (`Calibration.scale`)."""
    i, f = scale_bin(p)
    low = (np.float64(scale[row, i, 0]) + SCALE_PRIOR) / (np.float64(scale[row, i, 1]) + SCALE_PRIOR)
    high = (np.float64(scale[row, i + 1, 0]) + SCALE_PRIOR) / (np.float64(scale[row, i + 1, 1]) + SCALE_PRIOR)
    return min(p * ((1.0 - f) * low + f * high), CERTAIN)


DRAFT_PRIOR, DRAFT_MEMORY = 10.0, 300.0
"""Weight of a new drafter's ratio in accepted tokens, and number after which the oldest fade."""
FIRST_MEMORY = 12.0
"""Number of unmade drafts, judged by their first tokens, after which counts of made drafts have faded to a third."""
LEAST, MOST = 0.3, 1.3
"""Bounds of the ratio."""


@kernel
def acceptance_ratio(counts: NDArray[np.float64]) -> float:
    """Return accepted tokens per expected token from ``counts`` (2,): accepted and expected."""
    return min(max((counts[0] + DRAFT_PRIOR) / (counts[1] + DRAFT_PRIOR), LEAST), MOST)


@kernel
def learn_draft(counts: NDArray[np.float64], expected: float, accepted: int) -> None:
    """Learn from a verified draft: its expected tokens (which include the ratio) and accepted tokens."""
    total = counts[1] + expected / acceptance_ratio(counts)
    fade = min(DRAFT_MEMORY / total, 1.0)
    counts[0] = (counts[0] + accepted) * fade
    counts[1] = total * fade


@inner
def learn_first(counts: NDArray[np.float64], p: float, right: int) -> None:
    """Learn whether the first token of an unmade draft came (1) or not (0); its probability was `p`.

    Otherwise, drafts that are not made for lack of trust could never regain it.
    """
    fade = 1.0 - p / acceptance_ratio(counts) / FIRST_MEMORY
    counts[0] *= fade
    counts[1] *= fade
    learn_draft(counts, p, right)


@kernel_with_arrays
def learn_passes(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
    noise: NDArray[np.float64],
    knots: NDArray[np.int64],
    usual: NDArray[np.float64],
    memory: float,
    growth: NDArray[np.float64],
    noise_rule: NDArray[np.float64],
    nodes: NDArray[np.int64],
    seconds: NDArray[np.float64],
) -> None:
    """Learn from passes in order; `mean`, `covariance` and `noise` are updated in place.

    Parameters
    ----------
    mean, covariance
        (k,) and (k, k) of log T(0), then of the increments of log T between knots.
    noise
        (1,) variance of the logarithm of a single pass's time.
    knots
        (k,) numbers of nodes of the knots.
    usual, memory
        (k - 1,) increments to which the mean returns, and the share of what was learned that is kept from pass to pass.
    growth
        (k, k) increase of the covariance from pass to pass.
    noise_rule
        (3,) learning rate of the noise, its minimum, and the number of standard deviations to which slow passes are
        clipped.
    nodes, seconds
        (n,) each: nodes and times of the passes.
    """
    size = len(knots)
    slope, gains = np.empty(size), np.empty(size)
    for i in range(len(nodes)):
        for k in range(1, size):
            mean[k] = usual[k - 1] + memory * (mean[k] - usual[k - 1])
        right = 0
        while right < size - 1 and knots[right] < nodes[i]:
            right += 1
        expected = 0.0
        for k in range(size):
            slope[k] = 1.0 if k < max(right, 1) else 0.0
            expected += slope[k] * mean[k]
        if right > 0:
            share = (nodes[i] - knots[right - 1]) / (knots[right] - knots[right - 1])
            step = np.exp(mean[right])
            between = 1.0 + share * (step - 1.0)
            expected += np.log(between)
            slope[right] = share * step / between
        variance = noise[0]
        for k in range(size):
            gains[k] = 0.0
            for j in range(size):
                decay = (memory if k else 1.0) * (memory if j else 1.0)  # log T(0) itself does not fade
                covariance[k, j] = covariance[k, j] * decay + growth[k, j]
                gains[k] += covariance[k, j] * slope[j]
            variance += slope[k] * gains[k]
        surprise = min(np.log(max(seconds[i], 1e-9)) - expected, noise_rule[2] * np.sqrt(variance))
        for k in range(size):
            mean[k] += gains[k] * surprise / variance
            for j in range(size):
                covariance[k, j] -= gains[k] * gains[j] / variance
        rate = noise_rule[0] * noise[0] / variance  # the noise is not learned while everything else is uncertain
        noise[0] = max(noise_rule[1], noise[0] + rate * (surprise * surprise - variance))
