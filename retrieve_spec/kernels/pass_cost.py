"""Numba kernel of the cost model: a Kalman filter of the logarithm of a pass's time takes in passes."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def learn_passes(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
    noise: NDArray[np.float64],
    knots: NDArray[np.int64],
    usual: NDArray[np.float64],
    memory: float,
    decay: NDArray[np.float64],
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
    decay, growth
        (k, k) factors of the covariance, and what is added to it, from pass to pass.
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
        slope[:] = 0.0
        for k in range(max(right, 1)):
            expected += mean[k]
            slope[k] = 1.0
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
                covariance[k, j] = covariance[k, j] * decay[k, j] + growth[k, j]
                gains[k] += covariance[k, j] * slope[j]
            variance += slope[k] * gains[k]
        surprise = min(np.log(max(seconds[i], 1e-9)) - expected, noise_rule[2] * np.sqrt(variance))
        for k in range(size):
            mean[k] += gains[k] * surprise / variance
            for j in range(size):
                covariance[k, j] -= gains[k] * gains[j] / variance
        rate = noise_rule[0] * noise[0] / variance  # nothing is learned of the noise while all else is unsure
        noise[0] = max(noise_rule[1], noise[0] + rate * (surprise * surprise - variance))
