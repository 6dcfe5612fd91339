"""Numba kernels that correct blended probabilities by what came of earlier ones, per source and log-odds bin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.blend import scratch_of
from retrieve_spec.kernels.compiled_code import inner, part
from retrieve_spec.kernels.source_table import NUMBER
from retrieve_spec.kernels.views import borrowed

SCALE_BINS = 33
"""Bins over log-odds -8 … 8; a probability counts for the two around it."""
SCALE_PRIOR = 8.0
"""Summed probability that the prior of a bin, no correction, counts for."""
SCALE_MEMORY = 1000.0
"""Summed probability after which a bin forgets as fast as it learns."""
CERTAIN = 0.9999
"""Largest probability of a node."""


@inner
def _bin(p: float) -> tuple[int, float]:
    """Lower bin of a probability on the log-odds scale and its fractional part."""
    p = min(max(p, 1e-6), 1.0 - 1e-6)
    x = (min(max(np.log(p / (1.0 - p)), -7.999), 7.999) + 8.0) * 2.0
    i = int(x)
    return i, x - i


@inner
def scaled(scale: NDArray[np.float32], row: int, p: float) -> float:
    """Probability after the learned correction of a row of ``scale`` (`Calibration.scale`)."""
    scale = borrowed(scale)
    i, f = _bin(p)
    low = (np.float64(scale[row, i, 0]) + SCALE_PRIOR) / (np.float64(scale[row, i, 1]) + SCALE_PRIOR)
    high = (np.float64(scale[row, i + 1, 0]) + SCALE_PRIOR) / (np.float64(scale[row, i + 1, 1]) + SCALE_PRIOR)
    return min(p * ((1.0 - f) * low + f * high), CERTAIN)


@part
def learn_scale(
    scale: NDArray[np.float32],
    first: int,
    table: NDArray[np.int64],
    memory: NDArray[np.int64],
    n: int,
    min_p: float,
    token: int,
) -> None:
    """Compare the probability of each of ``n`` candidates with what came.

    Parameters
    ----------
    scale, first
        Modified in place; the row of source 0, which tells greedy decoding from sampling with known noise.
    min_p
        Candidates below it are never drafted, so nothing is learned of them.
    """
    scratch = scratch_of(memory, len(table))
    tokens, probs, credit = scratch.tokens, scratch.probs, scratch.credit
    for i in range(n):
        p = np.float64(probs[i])
        if p < min_p:
            continue
        row = first + table[credit[i], NUMBER]
        b, f = _bin(p)
        hit = 1.0 if tokens[i] == token else 0.0
        for j in range(2):
            w = (1.0 - f) if j == 0 else f
            cell = scale[row, b + j]
            if cell[1] > SCALE_MEMORY:
                cell[0] = np.float64(cell[0]) * (1.0 - 1.0 / SCALE_MEMORY)
                cell[1] = np.float64(cell[1]) * (1.0 - 1.0 / SCALE_MEMORY)
            cell[0] = np.float64(cell[0]) + w * hit
            cell[1] = np.float64(cell[1]) + w * p
