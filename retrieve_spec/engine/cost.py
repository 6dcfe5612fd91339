"""Cost model T(n, L): the expected time of a pass over n nodes at context length L, from the times of past passes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Many
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.kernels.calibration import learn_passes

_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NODE_KNOTS = np.array(_KNOTS)
_FIRST_CONTEXT = 7  # contexts up to 2**7 tokens share a bucket, then one bucket per factor of two
_CONTEXTS = 16
_REBUILD = 8  # passes between two rebuilds of a curve

_BALANCE, _MOST_BALANCE = 64.0, 4096.0
"""Nodes that cost as much as a plain pass: before anything is measured, and at most."""
_UNSURE = 1.5
"""Standard deviation of that number's logarithm."""
_NOISE = 0.12**2
"""Variance of the logarithm of one pass's time before it is measured."""
_NOISE_RULE = np.array([0.05, 0.05**2, 2.5])
"""How fast it is learned, the least it can be, and standard deviations beyond which a slow pass counts no further."""
_SPEED = 0.15**2
"""Variance by which the machine's speed changes from pass to pass."""
_MEMORY = 0.5 ** (1.0 / 512)
"""How much of what was measured is still believed a pass later."""
_KEPT = np.append(1.0, np.full(len(_KNOTS) - 1, _MEMORY))
_DECAY = np.outer(_KEPT, _KEPT)


class CostModel:
    """Seconds per pass by number of nodes and context length, learned from passes as they happen.

    A Kalman filter for each bucket of contexts follows the logarithm of a plain pass's time and its steps to 1, 2, 4 …
    1024 nodes. The machine's speed may change at any time and moves all widths together: a width that was not tried
    lately stays as much slower than the others as it was. The steps are taken to have one steepness, so that small
    widths say what to expect of wide ones. A pass far slower than expected counts as a slow one only, so that a hiccup
    of the machine does not switch drafting off. What is not measured again is forgotten, half of it in 512 passes: a
    width that was measured beside other load is not avoided for good. Contexts never seen begin with what is known of
    the nearest one.

    Parameters
    ----------
    known
        A model of passes of another kind to begin with; what it learned counts, but less surely.
    more
        Rows that every pass has beside those that `known` was learned from.

    Attributes
    ----------
    overhead
        Seconds of a step spent outside the model's forward, running mean.
    """

    def __init__(self, known: CostModel | None = None, more: int = 0) -> None:
        self._filters: dict[int, _Filter] = {}
        self._balance: float = _BALANCE if known is None else known._balance + more
        self.overhead = 0.0
        self._passes = 0
        if known is not None:
            known._take_in()
            self._filters = {row: filter_.elsewhere(more) for row, filter_ in known._filters.items()}
            self.overhead = known.overhead
        self._pending: list[tuple[int, int, float, float]] = []
        self._curves: dict[int, NDArray[np.float32]] = {}

    @property
    def measured(self) -> bool:
        """Whether anything has been observed."""
        return bool(self._filters or self._pending)

    def begin(self, context: int, seconds: Mapping[int, float]) -> None:
        """Begin with the seconds of passes over a few numbers of nodes, 0 among them, behind `context` tokens.

        How the widest compares says what still wider ones may cost.
        """
        if widest := max(seconds):
            self._balance = widest / max(seconds[widest] / seconds[0] - 1.0, widest / _MOST_BALANCE)
        for nodes, forward_s in seconds.items():
            self.observe(nodes, context, forward_s)

    def observe(self, nodes: int, context: int, forward_s: float, overhead_s: float = 0.0) -> None:
        """Learn from one pass over `nodes` nodes behind `context` tokens (taken in when a curve is next rebuilt)."""
        self._pending.append((nodes, context, forward_s, overhead_s))

    def seconds(self, context: int, max_nodes: int) -> NDArray[np.float32]:
        """(max_nodes + 1,) float32: seconds of a step with 0 … max_nodes nodes, the loop's own time included.

        Before anything was measured a plain pass takes a second: only ratios matter.
        """
        if len(self._pending) >= min(_REBUILD, 1 + self._passes // _REBUILD):
            self._take_in()
        row = _bucket(context)
        curve = self._curves.get(row)
        if curve is None:
            curve = self._curves[row] = (self._filter(row).curve() + self.overhead).astype(np.float32)
        return curve[: max_nodes + 1]

    def _take_in(self) -> None:
        """Learn from the passes seen since the last time."""
        buckets = [(_bucket(context), nodes, forward_s) for nodes, context, forward_s, _ in self._pending]
        for row, passes in itertools.groupby(buckets, itemgetter(0)):
            filter_ = self._filters[row] = self._filter(row)
            filter_.learn(*zip(*[(nodes, seconds) for _, nodes, seconds in passes], strict=True))
        for *_, overhead_s in self._pending:
            if self.overhead == 0.0:
                self.overhead = overhead_s
            self.overhead += 0.1 * (min(overhead_s, 4.0 * self.overhead) - self.overhead)
        self._passes += len(self._pending)
        self._pending.clear()
        self._curves.clear()

    def _filter(self, row: int) -> _Filter:
        """The filter of a context bucket; a new one knows what that of the nearest one does, less surely."""
        known = self._filters.get(row)
        if known is not None:
            return known
        nearest = min(self._filters, key=lambda other: abs(other - row), default=None)
        return _Filter(self._balance) if nearest is None else self._filters[nearest].elsewhere()


class _Filter:
    """Mean and covariance of (log T(0), steps of log T from knot to knot) at contexts of about one length.

    To begin with, and where it is forgotten, T(n) is 1 + n / `balance` times T(0).
    """

    def __init__(self, balance: float = _BALANCE) -> None:
        self.balance, ratio = balance, NODE_KNOTS / balance
        self._usual = np.diff(np.log1p(ratio))
        self.mean = np.append(0.0, self._usual)
        steepness = _UNSURE * np.diff(ratio / (1.0 + ratio))
        self._first = np.diag(np.append(100.0, (0.1 + 0.3 * self._usual) ** 2))  # the speed is not known at all
        self._first[1:, 1:] += np.outer(steepness, steepness)
        self.covariance = self._first.copy()
        self.noise = np.array([_NOISE])

    def elsewhere(self, more: int = 0) -> _Filter:
        """The same for passes of another kind: over a longer context, or with `more` rows that are no nodes."""
        other = _Filter(self.balance + more)
        other.mean = self._behind(more) if more else self.mean.copy()
        other.noise[:] = self.noise
        other.covariance = self.covariance + 0.1 * other._first
        return other

    def learn(self, nodes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        """Learn from passes, by what each drafted and took."""
        growth = (1.0 - _MEMORY**2) * self._first
        growth[0, 0] = _SPEED
        learn_passes(
            self.mean,
            self.covariance,
            self.noise,
            NODE_KNOTS,
            self._usual,
            _MEMORY,
            _DECAY,
            growth,
            _NOISE_RULE,
            np.array(nodes, np.int64),
            np.array(seconds, np.float64),
        )

    def _behind(self, more: int) -> NDArray[np.float64]:
        """The mean where `more` rows cost as much as nodes; as steep beyond the widest knot as before it."""
        seconds, rows = np.exp(np.cumsum(self.mean)), NODE_KNOTS + more
        slope = max(seconds[-1] - seconds[-2], 0.0) / (_KNOTS[-1] - _KNOTS[-2])
        levels = np.log(np.interp(rows, _KNOTS, seconds) + slope * np.maximum(rows - MAX_NODES, 0))
        return np.diff(levels, prepend=0.0)

    def curve(self) -> NDArray[np.float64]:
        """(MAX_NODES + 1,) seconds of the forward pass alone, never falling."""
        knots = np.exp(_never_falling(np.cumsum(self.mean), np.cumsum(self.covariance, 0).cumsum(1).diagonal()))
        return np.interp(np.arange(MAX_NODES + 1), _KNOTS, knots)


def _bucket(context: int) -> int:
    return min(max((context - 1).bit_length() - _FIRST_CONTEXT, 0), _CONTEXTS - 1)


def _never_falling(values: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Closest never-falling sequence in weighted least squares (pool adjacent violators; Ayer et al., 1955)."""
    sums: list[float] = []
    weights: list[float] = []
    counts: list[int] = []
    for value, variance in zip(values.tolist(), variances.tolist(), strict=True):
        sums.append(value / variance)
        weights.append(1.0 / variance)
        counts.append(1)
        while len(sums) > 1 and sums[-2] / weights[-2] > sums[-1] / weights[-1]:
            total, weight, count = sums.pop(), weights.pop(), counts.pop()
            sums[-1] += total
            weights[-1] += weight
            counts[-1] += count
    return np.repeat([s / w for s, w in zip(sums, weights, strict=True)], counts)


class Costs:
    """What passes cost, by the number of sequences in them and of nodes that these draft together.

    A pass in which none drafts may take another way through the model, so that its cost is no point of a line through
    those of others. Numbers of sequences within an eighth of one another share what is measured. What is not measured
    yet is taken from fewer sequences: the last token of one more costs what one more node does.

    Attributes
    ----------
    alone
        Cost of passes over one sequence.
    """

    def __init__(self, alone: CostModel | None = None) -> None:
        self._models = {1: alone or CostModel()}  # by sequences

    @property
    def alone(self) -> CostModel:
        """Cost of passes over one sequence."""
        return self._models[1]

    def of(self, sequences: int) -> CostModel:
        """Cost of passes over so many sequences."""
        digits = max(sequences.bit_length() - 4, 0)  # all but the first four are 0 in those that share a model
        sequences = sequences >> digits << digits
        if sequences not in self._models:
            fewer = max(count for count in self._models if count < sequences)
            self._models[sequences] = CostModel(self._models[fewer], more=sequences - fewer)
        return self._models[sequences]

    def doubt(self) -> None:
        """Be less sure of what was learned: passes run in another way from now on."""
        self._models = {sequences: CostModel(model) for sequences, model in self._models.items()}

    def seconds(self, sequences: int, context: int) -> NDArray[np.float32]:
        """(MAX_NODES + 1,) seconds of a step over so many sequences with 0 … MAX_NODES nodes."""
        return self.of(sequences).seconds(context, MAX_NODES)

    def expected(self, sequences: int, nodes: int, context: int) -> float:
        """Seconds of a step over so many sequences and drafted nodes."""
        return float(self.of(sequences).seconds(context, MAX_NODES)[min(nodes, MAX_NODES)])

    def learn(self, sequences: int, nodes: int, context: int, seconds: Many[float]) -> None:
        """Learn from a pass.

        Parameters
        ----------
        sequences
            How many it served.
        nodes
            Rows of it beyond a last token of each, padding included.
        context
            Tokens in front, of all sequences.
        seconds
            Of drafting, the model's forward, commits and learning.
        """
        drafted, forward, committed, learned = seconds
        self.of(sequences).observe(nodes, context, forward, drafted + committed + learned)
