"""A model's next-token probabilities after contexts of one to three tokens and skip-grams, averaged over texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.recycling import CONTEXTS, ORDERS, context_keys

BACKOFF = 2.0
"""Weight, in observations, of the shorter context in smoothing; this one maximises held-out likelihood."""


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """A model's most probable next tokens at every position of some texts.

    Attributes
    ----------
    token_ids
        (n,) int32 token ids of the texts, concatenated.
    lengths
        (texts,) int64 lengths of the texts in tokens.
    top_ids, probs
        (n, k) int32 the most probable next tokens at each position, -1 if not observed, and float16 their
        probabilities.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    top_ids: NDArray[np.int32]
    probs: NDArray[np.float16]

    @classmethod
    def joined(cls, parts: Sequence[Observations]) -> Observations:
        """Concatenate observations, in order."""
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def without_repeats(self) -> Observations:
        """Return the observations without repeated texts."""
        first: dict[bytes, int] = {}
        for number, end in enumerate(np.cumsum(self.lengths)):
            first.setdefault(self.token_ids[end - self.lengths[number] : end].tobytes(), number)
        kept = np.isin(np.arange(len(self.lengths)), list(first.values()))
        rows = np.repeat(kept, self.lengths)
        return Observations(self.token_ids[rows], self.lengths[kept], self.top_ids[rows], self.probs[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Contexts:
    """Contexts with a model's most probable next tokens.

    Attributes
    ----------
    keys
        (m,) uint64 hashes of the contexts' tokens (`retrieve_spec.kernels.recycling.mix`).
    counts
        (m,) int64 how often each was observed.
    top_ids, probs
        (m, k) int32 the most probable next tokens, -1 after the last, and float32 their probabilities.
    """

    keys: NDArray[np.uint64]
    counts: NDArray[np.int64]
    top_ids: NDArray[np.int32]
    probs: NDArray[np.float32]


def averaged(observations: Observations) -> Contexts:
    """Average the observations after each context of one to three tokens, and after each skip-gram.

    A skip-gram is the last token but one, whatever followed it. A rare context is smoothed towards its suffix, as in
    interpolated n-gram models (Chen & Goodman 1999), but with the model's probabilities instead of counts.
    """
    lengths = observations.lengths
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    keys = np.empty((CONTEXTS, len(places)), np.uint64)
    context_keys(observations.token_ids, places, keys)
    found: list[Contexts] = []
    for order in range(CONTEXTS):
        shorter = found[-1] if 0 < order < ORDERS else None
        observed = np.flatnonzero((keys[order] > 0) & (observations.top_ids[:, 0] >= 0))
        if not len(observed):  # no text is this long
            continue
        of_order = keys[order][observed]
        known, first, counts = np.unique(of_order, return_index=True, return_counts=True)
        top_ids, probs = observations.top_ids[observed], observations.probs[observed].astype(np.float32)
        if shorter is not None:
            at = np.searchsorted(shorter.keys, keys[order - 1][observed[first]])
            of_order = np.concatenate([of_order, known])
            top_ids = np.concatenate([top_ids, shorter.top_ids[at]])
            probs = np.concatenate([probs, np.float32(BACKOFF) * shorter.probs[at]])
        top_ids, sums = _largest_sums(of_order, top_ids, probs)
        total = (counts + (BACKOFF if shorter else 0.0)).astype(np.float32)
        found.append(Contexts(known, counts, top_ids, sums / total[:, None]))
    joined = (np.concatenate([getattr(of, name) for of in found]) for name in ("keys", "counts", "top_ids", "probs"))
    return Contexts(*joined)


def rank_in_group(groups: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many equal numbers precede each of (n,) sorted numbers."""
    begins = np.r_[True, groups[1:] != groups[:-1]]
    rank: NDArray[np.int64] = np.arange(len(groups)) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return rank


def _largest_sums(
    keys: NDArray[np.uint64], top_ids: NDArray[np.int32], probs: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Sum probabilities (n, k) by key and token; return (m, k) tokens and sums per key, in descending order."""
    k = top_ids.shape[1]
    listed = top_ids.reshape(-1) >= 0
    keys, tokens, sums = np.repeat(keys, k)[listed], top_ids.reshape(-1)[listed], probs.reshape(-1)[listed]
    by_token = np.lexsort((tokens, keys))
    keys, tokens, sums = keys[by_token], tokens[by_token], sums[by_token]
    first = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]) | (tokens[1:] != tokens[:-1])])
    keys, tokens, sums = keys[first], tokens[first], np.add.reduceat(sums, first)
    by_sum = np.lexsort((tokens, -sums, keys))
    keys, tokens, sums = keys[by_sum], tokens[by_sum], sums[by_sum]
    rank = rank_in_group(keys)
    row = np.cumsum(rank == 0) - 1
    out_ids, out_sums = np.full((row[-1] + 1, k), -1, np.int32), np.zeros((row[-1] + 1, k), np.float32)
    kept = rank < k
    out_ids[row[kept], rank[kept]], out_sums[row[kept], rank[kept]] = tokens[kept], sums[kept]
    return out_ids, out_sums
