"""Reader of a sequence: what a pass made visible waits until it is taken."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

RUN_AHEAD = 2
"""Passes that a sequence is ahead of its reader at most, when other sequences' passes take it along."""


class Reader:
    """The reader of one sequence.

    Parameters
    ----------
    on_demand
        Whether passes come only while the reader asks for one: the cache is the caller's and never runs ahead.

    Attributes
    ----------
    asking
        Calls that wait for the sequence.
    """

    def __init__(self, on_demand: bool = False) -> None:
        self._on_demand = on_demand
        self._pieces: deque[NDArray[np.int32]] = deque()
        self.asking = 0

    @property
    def has_pieces(self) -> bool:
        """Whether there is something to take."""
        return len(self._pieces) > 0

    @property
    def is_near(self) -> bool:
        """Whether the reader is close enough for another pass."""
        if self._on_demand:
            return self.asking > 0 and not self._pieces
        return len(self._pieces) < RUN_AHEAD

    def show(self, token_ids: NDArray[np.int32]) -> None:
        """Show what a pass made visible, (t,) int32; none of a prompt's piece."""
        self._pieces.append(token_ids)

    def take(self) -> NDArray[np.int32]:
        """The visible tokens of the oldest pass that was not taken."""
        return self._pieces.popleft()
