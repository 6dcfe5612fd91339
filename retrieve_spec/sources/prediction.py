"""Text the user expects (an edited file, a predicted answer) as positions that follow the output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import prediction as kernels
from retrieve_spec.kernels.levels import ROW

HYPOTHESES = 3
"""Places in the text that are followed at once: found again, one token replaced, tokens inserted."""


class Prediction:
    """Expected text with up to three cursors: rows of (position of the next expected token, tokens matched).

    As long as the output follows the text the first cursor moves along. When it leaves, the first cursor goes where
    the newest tokens match best (nearest place on a tie), the second assumes that one token was replaced, the third
    that something is being inserted before the text goes on.
    """

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self.text = np.ascontiguousarray(token_ids, np.int32)
        self.cursors: NDArray[np.int64] = np.zeros((HYPOTHESES, 4), np.int64)
        self.cursors[1:, 1] = -1

    def follow(self, emitted: NDArray[np.int32], recent: NDArray[np.int32]) -> None:
        """Move the cursors over emitted tokens.

        Parameters
        ----------
        emitted
            (e,) int32 tokens since the last call.
        recent
            (m,) int32 newest tokens of the text so far, the emitted ones included, oldest first.
        """
        main = self.cursors[0]
        position, n = int(main[0]), len(emitted)
        if main[1] >= 0 and np.array_equal(self.text[position : position + n], emitted):
            main[0], main[1] = position + n, main[1] + n
            self.cursors[1:, 1] = -1
            return
        for token in emitted:
            self._step(int(token))
        if main[1] <= 0 and n:
            position, matched = kernels.anchor(self.text, recent, int(main[0]))
            if matched:  # otherwise the place last known stays the one to look near
                main[:2] = position, matched
                self.cursors[1:, 1] = np.where(self.cursors[1:, 0] == position, -1, self.cursors[1:, 1])

    def _step(self, token: int) -> None:
        hits = [c for c in self.cursors if c[1] >= 0 and c[0] < len(self.text) and self.text[c[0]] == token]
        if not hits:
            if self.cursors[0, 1] > 0:
                self.cursors[1, :2] = self.cursors[0, 0] + 1, 0
                self.cursors[2, :2] = self.cursors[0, 0], 0
            self.cursors[0, 1] = -1
            return
        position, matched = int(hits[0][0]) + 1, int(hits[0][1]) + 1
        self.cursors[1:, 1] = -1
        self.cursors[0, :2] = position, matched

    def row(self, number: int) -> NDArray[np.int64]:
        """Descriptor for the mixture's source table (the same for each cursor)."""
        row = np.zeros(ROW, np.int64)
        row[0], row[1] = 2, number
        row[2], row[3] = self.text.ctypes.data, len(self.text)
        return row
