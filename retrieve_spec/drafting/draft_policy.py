"""Draft policy: skips drafts while drafting takes more time than drafts save."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LONGEST_SKIP = 8
"""The most consecutive passes without a draft."""
_MEMORY = 16.0
"""Drafts after which older costs and gains have faded to a third."""


class DraftPolicy:
    """Skips drafts for increasingly many passes while they do not pay; one that pays ends that.

    What drafts save and take is learned over all requests.

    Attributes
    ----------
    left
        Passes that go without a draft before the next one.
    seconds_per_token
        What a token took with the last draft, as far as it was expected to be right; None before the first.
    """

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None
        self._means: tuple[float, float] | None = None  # average seconds that a draft saves and takes
        self.left = self._misses = 0

    def begin_request(self) -> None:
        """Begin a request without skipping."""
        self.left = self._misses = 0

    def skips(self) -> bool:
        """Return whether this pass has no draft; called once per pass."""
        skips = self.left > 0
        self.left -= skips
        return skips

    def learn(self, cost: NDArray[np.float32], nodes: int, expected: float, forced: int, seconds: float) -> None:
        """Learn from a draft.

        Parameters
        ----------
        cost
            (> nodes,) seconds of a pass over 0 … n nodes.
        nodes, forced
            How many the draft has, and how many of them come whatever anybody drafts.
        expected
            Accepted tokens expected of the others.
        seconds
            What drafting took.
        """
        anyway = 1.0 + forced
        plain, drafted = float(cost[forced]), float(cost[nodes])
        self.seconds_per_token = drafted / (anyway + expected)
        saved = plain * (anyway + expected) / anyway - drafted
        saves, takes = self._means or (plain, seconds)  # optimistic for a new drafter
        saves, takes = saves + (saved - saves) / _MEMORY, takes + (min(seconds, 4.0 * takes) - takes) / _MEMORY
        self._means = saves, takes
        self._misses = 0 if saved > takes else self._misses + 1
        self.left = 0 if saves > takes else min(self._misses // 2, _LONGEST_SKIP)
