"""Pace of an engine: what its further steps will cost by the seconds of past ones, and when drafting does not pay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.engine.budget import Backoff
from retrieve_spec.engine.cost import CostModel, Costs

_FIRST_PLAIN, _FIRST_EVERY, _PLAIN_EVERY = 4, 8, 256
"""Steps without drafts that are taken to learn their cost: so many at one of eight steps, then one of 256."""
_PATIENCE = 4
"""Looks in a row which find nothing that pays, behind which steps rest: a few say little of the next one. Resting no
sooner is worth one per cent for a lone sampled request."""
_HOPE_EVERY, _LEAST_HOPE, _MOST = 4, 2.0, 64
"""Where several rows have fewer drafted tokens than there are rows, one of so many looks takes them to cost less than
they seem to, by a factor. It doubles while nothing pays even so, the looks in between while something does, to that
many at most. A few slow steps, as there are beside other work, would else be believed for good."""


@dataclass(slots=True)
class _Rows:
    """Steps over about as many rows: what they cost; how many had no drafts, and how many had some since then; nodes
    that the last look found to pay; looks since one that was hopeful, how many there are between two, and what these
    divide the cost of nodes by."""

    cost: CostModel
    plain: int = 0
    since: int = 0
    nodes: int = 0
    looks: int = 0
    patience: int = _HOPE_EVERY
    hope: float = _LEAST_HOPE


class Pace:
    """Measured cost of an engine's steps, by rows (to the next power of two), drafted nodes and context.

    Steps in which tokens are sampled are apart: vLLM goes through the whole vocabulary for each of them. An engine may
    take another way as soon as one row has a draft, so steps without any are measured too: they are taken now and then
    where none were seen.
    """

    def __init__(self) -> None:
        self._costs = Costs(), Costs()
        self._rows: dict[tuple[int, bool], _Rows] = {}
        self._step: tuple[_Rows, int, int] | None = None
        self._backoff = Backoff(patience=_PATIENCE)
        self._hopes = False

    def measured(self, seconds: float) -> None:
        """Learn what the step over the last drafts took; a second report of the same step counts no more."""
        if self._step is None:
            return
        (known, nodes, context), self._step = self._step, None
        known.plain += nodes == 0
        known.since = known.since + 1 if nodes else 0
        known.cost.observe(nodes, context, seconds)

    def curve(self, rows: int, context: int, sampled: bool = False) -> NDArray[np.float32] | None:
        """(MAX_NODES + 1,) seconds of a step over so many rows and 0 … n nodes, None while nothing is measured."""
        known = self._of(rows, sampled)
        self._hopes = False
        if not known.cost.measured:
            return None
        curve = known.cost.seconds(context, MAX_NODES)
        known.looks += 1
        if known.nodes >= rows or rows == 1:
            known.looks, known.patience = 0, _HOPE_EVERY
        elif known.looks >= known.patience:  # the curve if nodes cost less than they seem to
            known.looks, self._hopes = 0, True
            curve = curve[0] + (curve - curve[0]) / np.float32(known.hope)
        return curve

    def goes_without(self, rows: int, sampled: bool = False) -> bool:
        """Whether the next step is better taken without a look: drafting did not pay lately, or to measure that."""
        if self._backoff.rests():
            return True
        known = self._of(rows, sampled)
        return known.since >= (_FIRST_EVERY if known.plain < _FIRST_PLAIN else _PLAIN_EVERY)

    def stepped(self, rows: int, nodes: int, context: int, sampled: bool = False, looked: bool = False) -> None:
        """Be told of the drafts that the next step verifies; `looked`: there are so few as no more would pay."""
        known = self._of(rows, sampled)
        if looked and self._hopes:
            known.hope = _LEAST_HOPE if nodes else min(2.0 * known.hope, _MOST)
            known.patience = min(2 * known.patience, _MOST) if nodes else known.patience
        elif looked:
            self._backoff.looked(nodes > 0)
            known.nodes = nodes
        self._step = known, nodes, context

    def _of(self, rows: int, sampled: bool) -> _Rows:
        bucket = 1 << (rows - 1).bit_length()
        if (bucket, sampled) not in self._rows:
            self._rows[bucket, sampled] = _Rows(self._costs[sampled].of(bucket))
        return self._rows[bucket, sampled]
