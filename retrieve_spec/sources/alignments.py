"""Places of one text that its newest tokens run beside, though words are replaced, put in or left out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment as kernels
from retrieve_spec.kernels import source_table
from retrieve_spec.sources.rows import Row, source_row


class Alignments:
    """Copies that were edited: goes on where an exact context ends, and remembers how the copy differed.

    Half a megabyte, however long the text is: of longer ones than `retrieve_spec.kernels.alignment.WINDOW` tokens the
    newest are known.
    """

    def __init__(self) -> None:
        self.text: NDArray[np.int32] = np.zeros(kernels.WINDOW, np.int32)
        self.places: NDArray[np.int32] = np.zeros(kernels.SLOTS, np.int32)
        self.kept: NDArray[np.int64] = np.zeros((kernels.KEPT, kernels.WIDTH), np.int64)
        self.meta: NDArray[np.int64] = np.zeros(kernels.META, np.int64)

    def reset(self) -> None:
        """Begin another text."""
        if self.meta[0]:  # else memory that was never touched stays so
            self.places[:] = 0
        self.kept[:] = 0
        self.meta[:] = 0

    def row(self, number: int) -> Row:
        """Row of the mixture's source table; its arrays are never replaced."""
        return source_row(
            source_table.ALIGNMENT,
            number,
            {
                source_table.ALIGNMENT_TEXT: self.text,
                source_table.ALIGNMENT_PLACES: self.places,
                source_table.ALIGNMENT_KEPT: self.kept,
                source_table.ALIGNMENT_META: self.meta,
            },
            {},
        )
