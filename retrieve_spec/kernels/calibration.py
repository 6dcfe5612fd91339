"""Numba kernels of what is learned: weights of levels, the scale of probabilities, acceptance of drafts, cost.

Weights: how much of the mass a level takes. Over all requests a weight is ``explained / reached`` of its cell (source,
match length, count, distinct continuations), shrunk towards a prior. Within a request its odds are multiplied by two
factors that begin at one: one per source, one per source and length class. They are random effects of a logistic model,
followed by a Kalman filter with one variance per factor, so a request that does not follow what others followed is
noticed within a few tokens.

Scale: blended probabilities are corrected by what came of earlier ones, per source and log-odds bin.

Acceptance: the probability of a token is calibrated where the text went, that of a path is a product over places where
it may never go. How many tokens are accepted for each one that was expected of whole drafts is learned as two counts,
where the next draft is made (`kernels/step.py`, `kernels/batch.py`), and for drafts that are judged elsewhere by
`retrieve_spec.drafting.calibration.Calibration`.

Cost: a Kalman filter of the logarithm of a pass's time takes in passes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import door, inner, making_door

LENGTH_BUCKETS, COUNT_BUCKETS, DISTINCT_BUCKETS = 12, 8, 6
NUM_SOURCES = 12
_CONTEXT, _PREDICTION, _RECYCLING, _DENSE, _PHRASES, _ALIGNMENT, _BIGRAMS, _DISTILLED = 0, 2, 3, 6, 8, 9, 10, 11
"""How many of `retrieve_spec.sources.SOURCE_NAMES` estimate, and the places of some of them."""
FORCED = NUM_SOURCES
"""The place of what needs no source, as nothing else may come."""
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


@door
def length_bucket(n: int) -> int:
    """0 … 11 for match lengths 0, 1, 2, 3, 4, 5, 6–7, 8–11, 12–15, 16–23, 24–39, 40 and more."""
    # Sums, as no branch can be foretold; they begin with a number, as truth values of NumPy alone add up to one.
    short = 0 + (n >= 1) + (n >= 2) + (n >= 3) + (n >= 4) + (n >= 5) + (n >= 6)
    return short + (n >= 8) + (n >= 12) + (n >= 16) + (n >= 24) + (n >= 40)


@inner
def count_bucket(n: int) -> int:
    """0 … 7 for counts 1, 2, 3, 4–5, 6–8, 9–16, 17–64, 65 and more."""
    return 0 + (n >= 2) + (n >= 3) + (n >= 4) + (n >= 6) + (n >= 9) + (n >= 17) + (n >= 65)


@inner
def distinct_bucket(n: int) -> int:
    """0 … 5 for 1, 2, 3, 4–5, 6–8, 9 and more distinct continuations."""
    return 0 + (n >= 2) + (n >= 3) + (n >= 4) + (n >= 6) + (n >= 9)


@inner
def cell_of(source: int, length: int, total: int, distinct: int) -> int:
    """Row of the calibration table."""
    c = source * LENGTH_BUCKETS + length_bucket(length)
    return (c * COUNT_BUCKETS + count_bucket(total)) * DISTINCT_BUCKETS + distinct_bucket(distinct)


@inner
def recency_weight(cells: NDArray[np.float32], cell: int) -> float:
    """Share of a level that goes to its most recent continuation, whatever its count."""
    return (np.float64(cells[cell, 2]) + 0.15 * PRIOR_WEIGHT) / (np.float64(cells[cell, 3]) + PRIOR_WEIGHT)


@inner
def prior_weight(source: int, length: int, total: int, distinct: int) -> float:
    """Weight of a level before anything was learned: n / (n + a·d), with a falling in the match length."""
    if source == _RECYCLING or source == _DISTILLED:  # the target's own probabilities
        return 0.75 if length >= 2 else 0.6
    if source == _BIGRAMS:  # the same, whatever stood before
        return 0.5
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


SCALE_BINS = 33
"""Bins over log-odds -8 … 8; a probability counts for the two around it."""
SCALE_PRIOR = 8.0
"""Summed probability that the prior of a bin, no correction, counts for."""
SCALE_MEMORY = 1000.0
"""Summed probability after which a bin forgets as fast as it learns."""
CERTAIN = 0.9999
"""Largest probability of a node."""


@inner
def scale_bin(p: float) -> tuple[int, float]:
    """Lower bin of a probability on the log-odds scale and its fractional part."""
    p = min(max(p, 1e-6), 1.0 - 1e-6)
    x = (min(max(np.log(p / (1.0 - p)), -7.999), 7.999) + 8.0) * 2.0
    i = int(x)
    return i, x - i


@inner
def scaled(scale: NDArray[np.float32], row: int, p: float) -> float:
    """Probability after the learned correction of a row of ``scale`` (`Calibration.scale`)."""
    i, f = scale_bin(p)
    low = (np.float64(scale[row, i, 0]) + SCALE_PRIOR) / (np.float64(scale[row, i, 1]) + SCALE_PRIOR)
    high = (np.float64(scale[row, i + 1, 0]) + SCALE_PRIOR) / (np.float64(scale[row, i + 1, 1]) + SCALE_PRIOR)
    return min(p * ((1.0 - f) * low + f * high), CERTAIN)


DRAFT_PRIOR, DRAFT_MEMORY = 10.0, 300.0
"""Accepted tokens that the ratio of a new drafter counts for, and after how many the oldest fade."""
FIRST_MEMORY = 12.0
"""First tokens of drafts that were not made after which what drafts taught has faded to a third: few passes are looked
at while drafts do not pay."""
LEAST, MOST = 0.3, 1.3
"""The ratio at least and at most."""


@door
def acceptance_ratio(counts: NDArray[np.float64]) -> float:
    """Tokens accepted for each one expected, of ``counts`` (2,): accepted and expected."""
    return min(max((counts[0] + DRAFT_PRIOR) / (counts[1] + DRAFT_PRIOR), LEAST), MOST)


@door
def learn_draft(counts: NDArray[np.float64], expected: float, accepted: int) -> None:
    """Learn what became of a draft: tokens expected (the ratio is in them) and tokens accepted."""
    total = counts[1] + expected / acceptance_ratio(counts)
    fade = min(DRAFT_MEMORY / total, 1.0)
    counts[0] = (counts[0] + accepted) * fade
    counts[1] = total * fade


@inner
def learn_first(counts: NDArray[np.float64], p: float, right: int) -> None:
    """Learn whether the token that a draft would have begun with came (1) or not (0); its probability was `p`.

    Drafts that do not pay because they are not trusted are not made: trust would never be won back.
    """
    fade = 1.0 - p / acceptance_ratio(counts) / FIRST_MEMORY
    counts[0] *= fade
    counts[1] *= fade
    learn_draft(counts, p, right)


@making_door
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
    """Learn from passes, one after another; `mean`, `covariance` and `noise` change in place.

    Parameters
    ----------
    mean, covariance
        (k,) and (k, k): log T(0), then the steps of log T from knot to knot.
    noise
        (1,) variance of the logarithm of one pass's time.
    knots
        (k,) numbers of nodes.
    usual, memory
        (k - 1,) steps that the mean goes back to, and how much of what was learned stays from pass to pass.
    growth
        (k, k) what is added to the covariance from pass to pass.
    noise_rule
        (3,) how fast the noise is learned, the least it can be, and the standard deviations that a slow pass counts for
        at most.
    nodes, seconds
        (n,) each: what passes drafted, and what they took.
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
                decay = (memory if k else 1.0) * (memory if j else 1.0)  # the level log T(0) does not fade
                covariance[k, j] = covariance[k, j] * decay + growth[k, j]
                gains[k] += covariance[k, j] * slope[j]
            variance += slope[k] * gains[k]
        surprise = min(np.log(max(seconds[i], 1e-9)) - expected, noise_rule[2] * np.sqrt(variance))
        for k in range(size):
            mean[k] += gains[k] * surprise / variance
            for j in range(size):
                covariance[k, j] -= gains[k] * gains[j] / variance
        rate = noise_rule[0] * noise[0] / variance  # nothing is learned of the noise while all else is unsure
        noise[0] = max(noise_rule[1], noise[0] + rate * (surprise * surprise - variance))
