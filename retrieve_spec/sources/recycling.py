"""The target's own top tokens: after contexts it has seen, rejected branches included, and after single tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import recycling as kernels
from retrieve_spec.kernels.source_table import KIND_BIGRAMS, KIND_RECYCLING
from retrieve_spec.sources.rows import Row, on_large_pages, source_row

Ids = NDArray[np.int32]


MANY_CONTEXTS = 1 << 16
"""Contexts of a recycling table that is used for many texts."""


class RecyclingTable:
    """Contexts of the last 1–3 tokens, and skip-grams → the target's top k next tokens with averaged probabilities.

    Parameters
    ----------
    capacity
        Contexts remembered at most, a power of two; 80 bytes each at k = 8.
    k
        Next tokens kept per context, `retrieve_spec.kernels.recycling.MOST` at most.

    Notes
    -----
    Follows Token Recycling (Luo et al. 2024: top-k of every visited node, rejected ones included) and STAND (Song et
    al. 2025: several context lengths, running averages of probabilities). Empty entries are absent, not token 0.
    """

    def __init__(self, capacity: int = MANY_CONTEXTS, k: int = 8) -> None:
        self.k = k
        self.sets: NDArray[np.uint64] = on_large_pages(2 * capacity, np.uint64)
        entries = on_large_pages(2 * k * capacity + kernels.MOST, np.int32)  # read in blocks of eight
        self.entries: NDArray[np.int32] = entries[: 2 * k * capacity].reshape(capacity, 2 * k)
        self._memory: NDArray[np.int64] = np.zeros(kernels.MEMORY, np.int64)

    def reset(self) -> None:
        """Forget everything."""
        if self._memory[0]:  # else it is empty
            self.sets[:] = 0
            self._memory[0] = 0

    def learn(self, tails: Ids, tail_lens: Ids, ids: Ids, logits: NDArray[np.float32]) -> None:
        """Learn the target's top tokens after m contexts.

        Parameters
        ----------
        tails, tail_lens
            (m, ≥3) int32 newest tokens of each context, newest first, and (m,) how many are valid.
        ids, logits
            (m, k) top tokens, most probable first, and their raw logits.
        """
        kernels.learn_rows(self.sets, self.entries, tails, tail_lens, ids, logits, self._memory)

    def learn_text(self, token_ids: Ids, ids: Ids, logits: NDArray[np.float32]) -> None:
        """Learn the target's top tokens (m, k) after each of the last m tokens of a text (n,)."""
        ends = np.arange(len(token_ids) - len(ids), len(token_ids))
        places = ends[:, None] - np.arange(kernels.ORDERS)
        tails = np.where(places >= 0, token_ids[np.maximum(places, 0)], 0).astype(np.int32)
        self.learn(tails, np.minimum(ends + 1, kernels.ORDERS).astype(np.int32), ids, logits)

    def lookup(self, context: list[int]) -> tuple[NDArray[np.int32], NDArray[np.float32], int]:
        """Return tokens, probabilities and order of the longest known context (oldest token first in ``context``)."""
        newest = context[::-1][: kernels.ORDERS]
        for order in range(len(newest), 0, -1):
            h = np.uint64(0)
            for token in newest[:order]:
                h = np.uint64(kernels.mix(h, token))
            e = kernels.find(self.sets, h)
            if e >= 0:
                tokens, probs = self.entries[e, : self.k], self.entries[e, self.k :].view(np.float32)
                return tokens[tokens >= 0], probs[tokens >= 0], order
        return np.empty(0, np.int32), np.empty(0, np.float32), 0

    def row(self, number: int) -> Row:
        """Row of the mixture's source table."""
        return source_row(
            KIND_RECYCLING,
            number,
            "recycling",
            sets=self.sets,
            entries=self.entries,
            memory=self._memory,
            capacity=len(self.entries),
            k=self.k,
        )


class Bigrams:
    """Token → the target's top k next tokens with probabilities, used where a text has shown nothing better.

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
        self._shares = entries.copy()
        self._shares[:, k:] = shares_of_top(entries[:, k:].view(np.float32)).view(np.int32)

    def learn(self, tokens: NDArray[np.integer], ids: Ids, logits: NDArray[np.float32]) -> None:
        """Add the target's top tokens after m tokens, (m, k), most probable first, with their raw logits."""
        k = ids.shape[1]
        self.entries[tokens, k:] = logits.view(np.int32)
        self.entries[tokens, :k] = ids  # last: what Ctrl-C leaves undone is not known
        self._shares[tokens, :k], self._shares[tokens, k:] = ids, shares_of_top(logits).view(np.int32)

    @property
    def missing(self) -> Ids:
        """Tokens without entries, (m,)."""
        return np.flatnonzero(self.entries[:, 0] < 0).astype(np.int32)

    @property
    def known(self) -> Ids:
        """Return the tokens (m,) that have entries."""
        return np.flatnonzero(self.entries[:, 0] >= 0).astype(np.int32)

    def top(self, tokens: Ids) -> tuple[Ids, NDArray[np.float16]]:
        """Return the most probable tokens after m tokens, (m, k), and their probabilities."""
        ids, shares = np.hsplit(self._shares[tokens], 2)
        return ids, shares.view(np.float32).astype(np.float16)

    def row(self, number: int) -> Row:
        """Row of the mixture's source table."""
        vocabulary, width = self.entries.shape
        return source_row(KIND_BIGRAMS, number, "recycling", entries=self._shares, capacity=vocabulary, k=width // 2)


def shares_of_top(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the softmax over the top tokens of each row, (m, k)."""
    shares: NDArray[np.float32] = np.exp(logits - logits[:, :1])
    shares /= shares.sum(1, keepdims=True)
    return shares
