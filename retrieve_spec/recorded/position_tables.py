"""Position tables: what a forward computes from positions alone, such as rotary angles, looked up by position."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

_ROOM = 1024
"""Positions that are computed beyond those of a pass, for the passes after it."""


class PositionTables:
    """Results of a function of positions, for the range of all that were looked up.

    Parameters
    ----------
    compute
        The function with the tensors that it reads: takes (1, n) positions, returns tensors (1, 1, n, d).
    """

    def __init__(self, compute: functools.partial[Any]) -> None:
        self._compute = compute
        self._seen: list[torch.Tensor] = []  # copies of what the function read
        self._begin, self._end = sys.maxsize, 0
        self._tables: list[torch.Tensor] = []

    def look_up(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of (1, n) positions in the tables, and the tables."""
        numbers = positions.numpy()
        low, high = int(numbers.min()), int(numbers.max())
        known = self._begin <= low and high < self._end
        if not known or not all(map(torch.equal, self._compute.args, self._seen)):
            self._fill(min(low, self._begin), max(high + _ROOM, self._end))
        return torch.from_numpy(numbers - self._begin), *self._tables

    def _fill(self, begin: int, end: int) -> None:
        seen = [tensor.clone() for tensor in self._compute.args]
        tables = [result[0, 0].contiguous() for result in self._compute(torch.arange(begin, end)[None])]
        self._seen, self._begin, self._end, self._tables = seen, begin, end, tables
