"""Text the user expects (an edited file, a predicted answer) as positions that follow the output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import prediction as kernels
from retrieve_spec.kernels import source_table
from retrieve_spec.kernels.request import HYPOTHESES
from retrieve_spec.sources.rows import Row, source_row


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
        kernels.follow(self.text, self.cursors, emitted, recent)

    def row(self, number: int) -> Row:
        """Row of the mixture's source table (the same for each cursor)."""
        return source_row(
            source_table.PREDICTION,
            number,
            {source_table.PREDICTION_TEXT: self.text, source_table.PREDICTION_CURSORS: self.cursors},
            {source_table.PREDICTION_LENGTH: len(self.text)},
        )
