"""A model's next-token probabilities after contexts of one to three tokens and skip-grams, averaged over texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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
        return cls(*_concatenated(parts))


@dataclass(frozen=True, slots=True, eq=False)
class Contexts:
    """Contexts with a model's most probable next tokens.

    Attributes
    ----------
    keys
        (m,) uint64 hashes of the contexts' tokens (`retrieve_spec.kernels.recycling.mix`).
    counts
        (m,) float64 how often each was observed.
    top_ids, probs
        (m, k) int32 the most probable next tokens, -1 after the last, and their probabilities.
    """

    keys: NDArray[np.uint64]
    counts: NDArray[np.float64]
    top_ids: NDArray[np.int32]
    probs: NDArray[Any]

    @classmethod
    def joined(cls, parts: Sequence[Contexts]) -> Contexts:
        """Sort contexts by key; of one that several parts have, keep the average of the most observations."""
        every = cls(*_concatenated(parts))
        by_count = np.lexsort((-every.counts, every.keys))
        return every.at(by_count[rank_in_group(every.keys[by_count]) == 0])

    def at(self, places: NDArray[np.int64]) -> Contexts:
        """Return the contexts at some places."""
        return Contexts(*(getattr(self, each.name)[places] for each in fields(self)))


def _concatenated(parts: Sequence[Observations] | Sequence[Contexts]) -> list[NDArray[Any]]:
    """Concatenate each array of some records, in the order of their fields."""
    return [np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(parts[0])]


def averaged(observations: Observations, earlier: Contexts | None = None) -> Contexts:
    """Average the observations after each context of one to three tokens, and after each skip-gram.

    A skip-gram is the last token but one, whatever followed it. A rare context is smoothed towards its suffix, as in
    interpolated n-gram models (Chen & Goodman 1999), but with the model's probabilities instead of counts.

    Parameters
    ----------
    observations
        New observations.
    earlier
        Averages that they are added to.
    """
    lengths = observations.lengths
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    keys = np.empty((CONTEXTS, len(places)), np.uint64)
    context_keys(observations.token_ids, places, keys)
    if earlier is None:
        earlier = Contexts(keys[0, :0], np.empty(0, np.float64), observations.top_ids[:0], observations.probs[:0])
    found: list[Contexts] = []
    for order in range(CONTEXTS):
        observed = np.flatnonzero((keys[order] > 0) & (observations.top_ids[:, 0] >= 0))
        if not len(observed):  # no text is this long
            continue
        shorter = found[-1] if 0 < order < ORDERS else None
        smoothing = 0.0 if shorter is None else BACKOFF
        top_ids, probs = observations.top_ids[observed], observations.probs[observed]
        said = Contexts(keys[order][observed], np.ones(len(observed)), top_ids, probs)
        known, first = np.unique(said.keys, return_index=True)
        before = earlier.at(np.flatnonzero(np.isin(earlier.keys, known)))
        parts = [said, replace(before, counts=before.counts + smoothing)]
        if shorter is not None:
            is_new = np.isin(known, before.keys, invert=True)
            suffixes = shorter.at(np.searchsorted(shorter.keys, keys[order - 1][observed[first[is_new]]]))
            parts.append(replace(suffixes, keys=known[is_new], counts=np.full(len(suffixes.keys), BACKOFF)))
        average = _weighted(parts)
        found.append(replace(average, counts=average.counts - smoothing))
    return Contexts.joined([*found, earlier])


def _weighted(parts: Sequence[Contexts]) -> Contexts:
    """Average the probabilities of contexts, each with its count as its weight."""
    every = Contexts(*_concatenated(parts))
    top_ids, sums = _largest_sums(every.keys, every.top_ids, every.counts[:, None] * every.probs)
    known, of = np.unique(every.keys, return_inverse=True)
    counts = np.bincount(of, every.counts).astype(np.float64)
    return Contexts(known, counts, top_ids, (sums / counts[:, None]).astype(np.float32))


def keys_of_tokens(vocabulary: int) -> NDArray[np.uint64]:
    """Return the keys of the contexts of one token, in the order of their ids."""
    keys: NDArray[np.uint64] = np.empty((CONTEXTS, vocabulary), np.uint64)
    context_keys(np.arange(vocabulary, dtype=np.int32), np.zeros(vocabulary, np.int64), keys)
    single: NDArray[np.uint64] = keys[0]
    return single


def rank_in_group(groups: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many equal numbers precede each of (n,) sorted numbers."""
    begins = np.r_[True, groups[1:] != groups[:-1]]
    rank: NDArray[np.int64] = np.arange(len(groups)) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
    return rank


def _largest_sums(
    keys: NDArray[np.uint64], top_ids: NDArray[np.int32], probs: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
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
    out_ids, out_sums = np.full((row[-1] + 1, k), -1, np.int32), np.zeros((row[-1] + 1, k))
    kept = rank < k
    out_ids[row[kept], rank[kept]], out_sums[row[kept], rank[kept]] = tokens[kept], sums[kept]
    return out_ids, out_sums
