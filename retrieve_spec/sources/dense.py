"""Dense source: what followed the nearest neighbours of a hidden state in the stores, as a small trie (DReSD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.dense import DenseIndex
from retrieve_spec.errors import ConfigError
from retrieve_spec.kernels import trie
from retrieve_spec.kernels.source_table import KIND_DENSE, ORIGIN_BITS
from retrieve_spec.kernels.suffix_array import SEPARATOR
from retrieve_spec.sources.rows import Row, source_row

if TYPE_CHECKING:
    from retrieve_spec.datastore.segment import Segment
    from retrieve_spec.datastore.store import Datastore

NEIGHBOURS = 50
"""Number of neighbours, as in DReSD."""
TEMPERATURE = 0.1
"""A span weighs ``exp(similarity / TEMPERATURE)``; on generated code 0.05 and 0.2 predict hardly worse."""
SPAN_TOKENS = 32
"""The most tokens read after a neighbour."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Positions with the most similar hidden states, most similar first.

    Attributes
    ----------
    similarity
        (m,) float32, cosine.
    segment
        (m,) int64, number of the segment over all stores.
    position
        (m,) int64, the token whose hidden state it is; what followed begins at the next one.
    """

    similarity: NDArray[np.float32]
    segment: NDArray[np.int64]
    position: NDArray[np.int64]


class DenseIndexes:
    """The dense indexes of all stores as one.

    Parameters
    ----------
    stores
        Open stores; those without a dense index are passed over.

    Attributes
    ----------
    layer
        Layer whose hidden states are the keys; None when no store has a dense index.

    Raises
    ------
    ConfigError
        When stores keep hidden states of different layers: one pass hands out one.
    """

    def __init__(self, stores: Sequence[Datastore]) -> None:
        self._segments: list[Segment] = [segment for store in stores for segment in store.segments]
        self.parts: list[tuple[int, DenseIndex]] = []
        first = 0
        for store in stores:
            self.parts += [(first + i, index) for i, index in store.dense]
            first += len(store.segments)
        layers = sorted({index.layer for _, index in self.parts}, key=str)
        if len(layers) > 1:
            raise ConfigError(
                "dense indexes of one layer",
                f"layers {', '.join(map(str, layers))}",
                "Rebuild the stores with the same --layer, or open one of them.",
            )
        self.layer = cast("int | Literal['last']", layers[0]) if layers else None

    def search(self, hidden: NDArray[np.float32], k: int = NEIGHBOURS) -> Neighbours:
        """Return the k nearest keys of a hidden state (d,) over all segments; ties go to the earlier position."""
        found = [(place, *index.search(hidden[None], k)) for place, index in self.parts]
        similarity = np.concatenate([s[0] for _, s, _ in found])
        position = np.concatenate([p[0] for _, _, p in found])
        segment = np.repeat([place for place, _, _ in found], [len(p[0]) for _, _, p in found])
        order = np.lexsort([position, segment, -similarity])
        order = order[position[order] >= 0][:k]
        return Neighbours(similarity[order], segment[order].astype(np.int64), position[order])

    def spans_after(self, near: Neighbours, width: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the tokens that follow some positions in their documents.

        Returns
        -------
        spans, origins
            (m, width) int32 token ids, `trie.END` after the last of a document; (m,) int64, where the first ones stand
            (`kernels/step.py`).
        """
        spans = np.full((len(near.position), width), trie.END, np.int32)
        for place in np.unique(near.segment).tolist():
            mine, segment = near.segment == place, self._segments[place]
            tokens, to_global = segment.tokens, segment.to_global
            at = near.position[mine, None] + np.arange(1, width + 1)
            local = tokens[np.minimum(at, len(tokens) - 1)]  # the last one ends a document
            ended = np.logical_or.accumulate((local == SEPARATOR) | (local >= len(to_global)), axis=1)
            spans[mine] = np.where(ended, trie.END, to_global[np.where(ended, 0, local)].astype(np.int32))
        return spans, (near.segment << ORIGIN_BITS) + near.position + 1


class DenseSource:
    """Trie of the continuations of a hidden state's neighbours.

    Parameters
    ----------
    indexes
        Where to look.
    """

    def __init__(self, indexes: DenseIndexes) -> None:
        self.indexes = indexes
        self.spans: NDArray[np.int32] = np.full((NEIGHBOURS, SPAN_TOKENS + 1), trie.END, np.int32)
        self.similarity: NDArray[np.float32] = np.zeros(NEIGHBOURS, np.float32)
        self.weight: NDArray[np.float32] = np.zeros(NEIGHBOURS, np.float32)
        self.origins: NDArray[np.int64] = np.zeros(NEIGHBOURS, np.int64)
        self.count = 0

    def prepare(self) -> None:
        """Open the indexes, and compile the kernels or load them from Numba's cache."""
        self.count = 0
        for _, index in self.indexes.parts:
            index.prepare()  # raises now if it is damaged, instead of amid the text
        self.root()

    def search(self, hidden: NDArray[np.float32], token: int) -> None:
        """Fill the trie with the continuations of neighbours that begin with a token.

        Parameters
        ----------
        hidden
            (d,) float32, hidden state at the token before.
        token
            The token that came; neighbours with another one are dropped.
        """
        near = self.indexes.search(hidden)
        spans, origins = self.indexes.spans_after(near, SPAN_TOKENS + 1)
        kept = np.flatnonzero(spans[:, 0] == token)
        kept = kept[np.lexsort((-near.similarity[kept], *spans[kept].T[::-1]))]
        n = self.count = len(kept)
        self.spans[:n], self.similarity[:n], self.origins[:n] = spans[kept], near.similarity[kept], origins[kept]
        apart = self.similarity[:n] - self.similarity[:n].max(initial=-1.0)
        self.weight[:n] = np.exp(apart.astype(np.float64) / TEMPERATURE)

    def root(self) -> NDArray[np.int64]:
        """Return the cursor after the token of the last search: (lo, hi, depth, match length)."""
        cursor = np.array([0, self.count, 1, -1], np.int64)
        cursor[3] = trie.dense_length(self.similarity, self.spans, 0, self.count, 1)
        return cursor

    def row(self, number: int) -> Row:
        """Row of the mixture's source table."""
        return source_row(
            KIND_DENSE,
            number,
            "dense",
            spans=self.spans,
            similarity=self.similarity,
            weights=self.weight,
            origins=self.origins,
            num_spans=self.spans.shape[0],
            width=self.spans.shape[1],
        )
