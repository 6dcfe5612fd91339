"""Times of past passes in, the expected time of a pass over n nodes at context length L out: T(n, L)."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES

_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
NODE_KNOTS = np.array(_KNOTS)
_FIRST_CONTEXT = 7  # contexts up to 2**7 tokens share a bucket, then one bucket per factor of two
_CONTEXTS = 16
_RATE = 0.2
_OUTLIER = 2.5
_REBUILD = 8  # passes between two rebuilds of a curve
_HALF_LIFE = 512.0  # passes after which a width that was not tried is half believed


class CostModel:
    """Seconds per pass by number of nodes and context length, learned from passes as they happen.

    A grid of (node knot, context bucket) cells, interpolated between node knots and made monotone. A sample updates
    its two neighbouring knots; one that is far above its cell counts as that many times the cell at most, so that a
    hiccup of the machine does not switch drafting off. Contexts never seen borrow from the nearest one seen, and a new
    cell begins at what the curve said there: widths that are rarely tried must not rest on one slow pass.

    What is not tried is not measured either, and a width that was measured while the machine was busy would never be
    tried again. So a cell that gets no sample while others of its context do is believed less and less: half of what it
    costs beyond a plain pass, and half of its weight against the next sample, after 512 passes. That tries a width that
    does not pay about once in a thousand passes.
    """

    def __init__(self) -> None:
        self._seconds = np.full((_CONTEXTS, len(NODE_KNOTS)), np.nan)
        self._weight = np.zeros((_CONTEXTS, len(NODE_KNOTS)))
        self._age = np.zeros((_CONTEXTS, len(NODE_KNOTS)))  # passes at the context since the cell's last sample
        self._overhead = 0.0
        self._passes = 0
        self._pending: list[tuple[int, int, float, float]] = []
        self._curves: dict[int, NDArray[np.float32]] = {}

    @property
    def overhead(self) -> float:
        """Seconds of a step spent outside the model's forward, running mean."""
        return self._overhead

    def observe(self, nodes: int, context: int, forward_s: float, overhead_s: float = 0.0) -> None:
        """Learn from one pass over `nodes` nodes behind `context` tokens (taken in when a curve is next rebuilt)."""
        self._pending.append((nodes, context, forward_s, overhead_s))

    def seconds(self, context: int, max_nodes: int) -> NDArray[np.float32] | None:
        """(max_nodes + 1,) float32: seconds of a step with 0 … max_nodes nodes, the loop's own time included.

        None while nothing has been measured.
        """
        if len(self._pending) >= min(_REBUILD, 1 + self._passes // _REBUILD):
            self._take_in()
        row = _bucket(context)
        curve = self._curves.get(row)
        if curve is None:
            if not self._weight.any():
                return None
            curve = self._curves[row] = (self._curve(row) + self._overhead).astype(np.float32)
        return curve[: max_nodes + 1]

    def _take_in(self) -> None:
        """Update the cells with the passes seen since the last time."""
        for nodes, context, forward_s, overhead_s in self._pending:
            row = _bucket(context)
            curve = self._curves.get(row)
            self._age[row] += 1.0
            right = min(bisect.bisect_left(_KNOTS, nodes), len(_KNOTS) - 1)
            left = right if _KNOTS[right] == nodes else right - 1
            for knot in {left, right}:
                at = _KNOTS[knot]
                share, sample = 1.0, forward_s
                if left != right:
                    share = 1.0 - abs(nodes - at) / (_KNOTS[right] - _KNOTS[left])
                    if curve is not None:  # carry the sample along the curve to the knot
                        sample = forward_s * float(curve[at] / curve[nodes])
                prior = None if curve is None else max(float(curve[at]) - self._overhead, 0.0)
                self._update(row, knot, sample, share, prior)
            if self._overhead == 0.0:
                self._overhead = overhead_s
            self._overhead += 0.1 * (min(overhead_s, 4.0 * self._overhead) - self._overhead)
        self._passes += len(self._pending)
        self._pending.clear()
        self._curves.clear()

    def _update(self, row: int, knot: int, sample: float, share: float, prior: float | None) -> None:
        """Move a cell towards a sample; what the curve said there (`prior`) counts for one sample of a new cell."""
        old, weight = self._seconds[row, knot], self._weight[row, knot] * 0.5 ** (self._age[row, knot] / _HALF_LIFE)
        self._age[row, knot] = 0.0
        if weight == 0.0 and prior is None:
            self._seconds[row, knot] = sample
            self._weight[row, knot] = share
            return
        if weight == 0.0:
            old, weight = prior, 1.0
        if weight >= 1.0:
            sample = min(sample, _OUTLIER * old)
        rate = max(_RATE, 1.0 / (weight + 1.0)) * share
        self._seconds[row, knot] = old + rate * (sample - old)
        self._weight[row, knot] = weight + share

    def _curve(self, row: int) -> NDArray[np.float64]:
        """(MAX_NODES + 1,) seconds of the forward pass alone at one context bucket."""
        seen = [r for r in range(_CONTEXTS) if self._weight[r].any()]
        nearest = min(seen, key=lambda r: abs(r - row))
        if nearest != row or self._weight[row].sum() < 1.0:
            return _interpolate(self._believed(nearest))
        knots = self._believed(row)
        other = min((r for r in seen if r != row), key=lambda r: abs(r - row), default=None)
        if other is not None:
            knots = _fill(knots, _interpolate(self._believed(other)))
        return _interpolate(knots)

    def _believed(self, row: int) -> NDArray[np.float64]:
        """Seconds per knot at one context bucket: the longer a width was not tried, the nearer to a plain pass."""
        knots = self._seconds[row]
        plain = knots[0] if self._weight[row, 0] else np.nanmin(knots)
        beyond = np.maximum(knots - plain, 0.0) * (1.0 - 0.5 ** (self._age[row] / _HALF_LIFE))
        return np.asarray(knots - beyond)


def _bucket(context: int) -> int:
    return min(max((context - 1).bit_length() - _FIRST_CONTEXT, 0), _CONTEXTS - 1)


def _fill(knots: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Go on beyond the measured knots in the shape of another context's curve, scaled where the two meet."""
    known = np.flatnonzero(~np.isnan(knots))
    filled = knots.copy()
    for end, beyond in ((known[0], slice(0, known[0])), (known[-1], slice(known[-1] + 1, None))):
        filled[beyond] = other[NODE_KNOTS[beyond]] * (knots[end] / other[NODE_KNOTS[end]])
    return filled


def _interpolate(knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Line through the known knots, never falling; beyond the last one it goes on with the mean slope."""
    known = np.flatnonzero(~np.isnan(knots))
    at, values = NODE_KNOTS[known], _never_falling(knots[known])
    curve = np.interp(np.arange(MAX_NODES + 1), at, values)
    if at[-1] < MAX_NODES and len(at) > 1:
        slope = (values[-1] - values[0]) / (at[-1] - at[0])
        beyond = np.arange(at[-1] + 1, MAX_NODES + 1)
        curve[beyond] = values[-1] + slope * (beyond - at[-1])
    return curve


def _never_falling(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Closest never-falling sequence in least squares (pool adjacent violators; Ayer et al., 1955)."""
    sums: list[float] = []
    counts: list[int] = []
    for value in values:
        sums.append(float(value))
        counts.append(1)
        while len(sums) > 1 and sums[-2] / counts[-2] > sums[-1] / counts[-1]:
            total, count = sums.pop(), counts.pop()
            sums[-1] += total
            counts[-1] += count
    return np.repeat([s / c for s, c in zip(sums, counts, strict=True)], counts)
