"""The target's own top tokens at contexts it has seen, rejected branches included, as a bounded table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import recycling as kernels
from retrieve_spec.kernels import source_table
from retrieve_spec.sources.rows import SourceRow


class RecyclingTable:
    """Contexts of the last 1–3 tokens → the target's top k next tokens with averaged probabilities.

    Parameters
    ----------
    capacity
        Contexts remembered at most, a power of two; 72 bytes each at k = 8.
    k
        Next tokens kept per context.

    Notes
    -----
    Follows Token Recycling (Luo et al. 2024: top-k of every visited node, rejected ones included) and STAND (Song et
    al. 2025: several context lengths, running averages of probabilities). Empty entries are absent, not token 0.
    """

    def __init__(self, capacity: int = 1 << 16, k: int = 8) -> None:
        self.k = k
        self.keys: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self.info: NDArray[np.int64] = np.zeros((capacity, 2), np.int64)
        self.tokens: NDArray[np.int32] = np.full((capacity, k), -1, np.int32)
        self.probs: NDArray[np.float32] = np.zeros((capacity, k), np.float32)
        self.clock = 0

    def reset(self) -> None:
        """Forget everything."""
        self.keys[:] = 0
        self.clock = 0

    def learn(
        self,
        tails: NDArray[np.int32],
        tail_lens: NDArray[np.int32],
        ids: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None:
        """Remember the target's top tokens after m contexts.

        Parameters
        ----------
        tails, tail_lens
            (m, ≥3) int32 newest tokens of each context, newest first, and (m,) how many are valid.
        ids, logits
            (m, k) top tokens, most probable first, and their raw logits.
        """
        self.clock += 1
        kernels.learn_rows(
            self.keys, self.info, self.tokens, self.probs, tails, tail_lens, ids[:, : self.k], logits, self.clock
        )

    def lookup(self, context: list[int]) -> tuple[NDArray[np.int32], NDArray[np.float32], int]:
        """Tokens, probabilities and order of the longest known context (oldest token first in ``context``)."""
        newest = context[::-1][: kernels.ORDERS]
        for order in range(len(newest), 0, -1):
            h = np.uint64(0)
            for token in newest[:order]:
                h = np.uint64(kernels.mix(h, token))
            e = kernels.find(self.keys, h)
            if e >= 0:
                kept = self.tokens[e] >= 0
                return self.tokens[e][kept], self.probs[e][kept], order
        return np.empty(0, np.int32), np.empty(0, np.float32), 0

    def row(self, number: int) -> SourceRow:
        """Row of the mixture's source table."""
        return SourceRow.of(
            source_table.RECYCLING,
            number,
            {
                source_table.RECYCLING_KEYS: self.keys,
                source_table.RECYCLING_INFO: self.info,
                source_table.RECYCLING_TOKENS: self.tokens,
                source_table.RECYCLING_PROBS: self.probs,
            },
            {source_table.RECYCLING_CAPACITY: len(self.keys), source_table.RECYCLING_K: self.k},
        )
