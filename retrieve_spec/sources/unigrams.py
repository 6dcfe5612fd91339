"""Tokens of the text that may come anywhere: what the context source says where no longer context helps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import source_table
from retrieve_spec.kernels import unigram as kernels
from retrieve_spec.sources.rows import Row, source_row

_VOCABULARY = 1 << 19
"""Tokens with higher ids are not listed."""


class Unigrams:
    """The recent and the frequent tokens of one text, ranked by rates that are learned over all texts.

    Parameters
    ----------
    rates
        (RATES, 2) float32 to rank by and to go on learning, as `retrieve_spec.kernels.unigram` says.
    mute
        Never list anything.
    """

    def __init__(self, rates: NDArray[np.float32], mute: bool = False) -> None:
        self.rates = rates
        self.tokens: NDArray[np.int32] = np.zeros(kernels.LISTED, np.int32)
        self.shares: NDArray[np.float32] = np.zeros(kernels.LISTED, np.float32)
        self.meta: NDArray[np.int64] = np.zeros(kernels.META, np.int64)
        self._cells: NDArray[np.int32] = np.zeros(kernels.LISTED, np.int32)
        self._stats: NDArray[np.int32] = np.zeros((0 if mute else _VOCABULARY, 3), np.int32)  # touched as far as used
        self._recent: NDArray[np.int32] = np.zeros(kernels.RECENT, np.int32)
        self._frequent: NDArray[np.int32] = np.zeros(kernels.FREQUENT, np.int32)

    def reset(self) -> None:
        """Begin another text."""
        self._stats[: self.meta[kernels.HIGHEST] + 1] = 0
        self.meta[:] = 0

    def row(self, number: int) -> Row:
        """Row of the mixture's source table; its arrays are never replaced."""
        return source_row(
            source_table.UNIGRAM,
            number,
            {
                source_table.UNIGRAM_TOKENS: self.tokens,
                source_table.UNIGRAM_SHARES: self.shares,
                source_table.UNIGRAM_CELLS: self._cells,
                source_table.UNIGRAM_META: self.meta,
                source_table.UNIGRAM_RATES: self.rates,
                source_table.UNIGRAM_STATS: self._stats,
                source_table.UNIGRAM_RECENT: self._recent,
                source_table.UNIGRAM_FREQUENT: self._frequent,
            },
            {source_table.UNIGRAM_NUM_STATS: len(self._stats)},
        )
