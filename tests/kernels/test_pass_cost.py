"""The cost model's filter against the same steps in NumPy."""

import bisect
import math

import numpy as np
import pytest

from retrieve_spec.engine import budget
from retrieve_spec.engine.budget import NODE_KNOTS, _Filter


def naive(mean, covariance, noise, nodes, seconds, balance):
    """One pass learned; mean and covariance in place, the noise returned."""
    knots = NODE_KNOTS.tolist()
    usual = np.diff(np.log(1 + NODE_KNOTS / balance))
    steepness = 1.5 * np.diff(NODE_KNOTS / (balance + NODE_KNOTS))
    mean[1:] = usual + budget._MEMORY * (mean[1:] - usual)
    covariance[1:] *= budget._MEMORY
    covariance[:, 1:] *= budget._MEMORY
    covariance[0, 0] += budget._SPEED
    forgotten = np.outer(steepness, steepness) + np.diag((0.1 + 0.3 * usual) ** 2)
    covariance[1:, 1:] += (1 - budget._MEMORY**2) * forgotten
    right = min(bisect.bisect_left(knots, nodes), len(knots) - 1)
    left = max(right - 1, 0)
    share = 1.0 if right == left else (nodes - knots[left]) / (knots[right] - knots[left])
    step = math.exp(mean[right]) if right else 1.0
    between = 1.0 + share * (step - 1.0)
    slope = np.zeros(len(knots))
    slope[: left + 1] = 1.0
    if right:
        slope[right] = share * step / between
    expected = float(mean[: left + 1].sum()) + math.log(between)
    gains = covariance @ slope
    variance = float(slope @ gains) + noise
    surprise = min(math.log(max(seconds, 1e-9)) - expected, 2.5 * math.sqrt(variance))
    mean += gains * (surprise / variance)
    covariance -= np.outer(gains, gains) / variance
    rate = 0.05 * noise / variance
    return max(0.05**2, noise + rate * (surprise**2 - variance))


@pytest.mark.parametrize("widest", [0, 1, 20, 256, 300])
def test_passes_are_learned_as_one_after_another_in_numpy(widest: int) -> None:
    random = np.random.default_rng(widest)
    nodes = random.integers(0, widest + 1, 200)
    seconds = (
        0.004 * (1 + nodes / 30) * np.exp(random.normal(0, 0.3, 200)) * random.choice([1, 20], 200, p=[0.95, 0.05])
    )
    balance = 10.0 * (1 + widest)
    ours, theirs, noise = _Filter(balance), _Filter(balance), budget._NOISE
    for first in range(0, 200, 8):
        part = slice(first, first + 8)
        ours.learn(tuple(nodes[part].tolist()), tuple(seconds[part].tolist()))
        for n, took in zip(nodes[part].tolist(), seconds[part].tolist(), strict=True):
            noise = naive(theirs.mean, theirs.covariance, noise, n, took, balance)
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(ours.covariance, theirs.covariance, rtol=1e-8, atol=1e-12)
        assert math.isclose(ours.noise[0], noise, rel_tol=1e-9)


def test_a_filter_made_of_another_learns_for_itself() -> None:
    first = _Filter()
    second = first.elsewhere()
    second.learn((0, 3), (0.1, 0.2))
    assert first.noise[0] == budget._NOISE and np.array_equal(first.mean, _Filter().mean)
