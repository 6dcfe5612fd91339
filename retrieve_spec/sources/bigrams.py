"""A model's bigrams: what it says after each of its tokens, whatever stood before, known before any text is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import source_table
from retrieve_spec.sources.rows import Row, source_row

Ids = NDArray[np.int32]


class Bigrams:
    """Token → the target's top k next tokens with probabilities, for where a text has shown nothing better.

    They are the target's own answers to lines of one token, so they say nothing of anybody's text.

    Parameters
    ----------
    entries
        (vocabulary, 2k) int32: top tokens, most probable first, then the bits of their float32 logits; a first token of
        -1 where they are not known.

    Notes
    -----
    Token Recycling (Luo et al. 2024) keeps such a matrix from one text to the next; this one is full from the first.
    """

    def __init__(self, entries: Ids) -> None:
        self.entries, k = entries, entries.shape[1] // 2
        logits = entries[:, k:].view(np.float32)
        shares = np.exp(logits - logits[:, :1])
        self._shares = entries.copy()
        self._shares[:, k:] = (shares / shares.sum(1, keepdims=True)).view(np.int32)

    @property
    def known(self) -> Ids:
        """Tokens (m,) that have entries."""
        return np.flatnonzero(self.entries[:, 0] >= 0).astype(np.int32)

    def row(self, number: int) -> Row:
        """Row of the mixture's source table."""
        vocabulary, width = self.entries.shape
        return source_row(
            source_table.BIGRAMS,
            number,
            {source_table.RECYCLING_ENTRIES: self._shares},
            {source_table.RECYCLING_CAPACITY: vocabulary, source_table.RECYCLING_K: width // 2},
        )
