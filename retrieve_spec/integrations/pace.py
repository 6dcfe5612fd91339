"""Pace of an engine: what its further steps will cost by the seconds of past ones, and when drafting does not pay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.engine.budget import Costs, Rest

_FIRST_PLAIN, _FIRST_EVERY, _PLAIN_EVERY = 4, 8, 256
"""Steps without drafts that are taken to learn their cost: so many at one of eight steps, then one of 256."""
_FIRST_LEARNED, _LEARNED_EVERY = 64, 4
"""Steps with drafts over about as many rows that are all learned from; then one of four, as learning takes time."""


class Pace:
    """Measured cost of an engine's steps, by rows (to the next power of two), drafted nodes and context.

    An engine may take another way as soon as one row has a draft (vLLM samples by rejection then), so steps without any
    are measured too: they are taken now and then where none were seen.
    """

    def __init__(self) -> None:
        self._costs = Costs()
        self._steps: dict[int, int] = {}
        self._plain: dict[int, int] = {}
        self._since: dict[int, int] = {}
        self._step: tuple[int, int, int] | None = None
        self._rest = Rest()

    def measured(self, seconds: float) -> None:
        """Learn what the step over the last drafts took; a second report of the same step counts no more."""
        if self._step is None:
            return
        rows, nodes, context = self._step
        self._step = None
        steps = self._steps[rows] = self._steps.get(rows, 0) + (nodes > 0)
        if nodes == 0 or steps <= _FIRST_LEARNED or steps % _LEARNED_EVERY == 0:
            self._costs.of(rows).observe(nodes, context, seconds)
        self._plain[rows] = self._plain.get(rows, 0) + (nodes == 0)
        self._since[rows] = 0 if nodes == 0 else self._since.get(rows, 0) + 1

    def curve(self, rows: int, context: int) -> NDArray[np.float32] | None:
        """(MAX_NODES + 1,) seconds of a step over so many rows and 0 … n nodes, None while nothing is measured."""
        costs = self._costs.of(_bucket(rows))
        return costs.seconds(context, MAX_NODES) if costs.measured else None

    def rests(self) -> bool:
        """Whether the next step is better taken without a look, as drafting did not pay lately."""
        return self._rest.takes()

    def goes_without(self, rows: int) -> bool:
        """Whether the next step is better taken without a look, also to measure that."""
        if self.rests():
            return True
        bucket = _bucket(rows)
        every = _FIRST_EVERY if self._plain.get(bucket, 0) < _FIRST_PLAIN else _PLAIN_EVERY
        return self._since.get(bucket, 0) >= every

    def looked(self, nodes: int, measured: bool) -> None:
        """Be told how many nodes a look has found worth drafting; measured or not, costs being known."""
        if measured:
            self._rest.looked(nodes > 0)

    def stepped(self, rows: int, nodes: int, context: int) -> None:
        """Be told of the drafts that the next step verifies."""
        self._step = _bucket(rows), nodes, context


def _bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
