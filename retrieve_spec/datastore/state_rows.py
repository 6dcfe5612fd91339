"""State rows: a model's hidden states in texts that it wrote, with its most probable next tokens.

A row belongs to a token of a text: the key of the hidden state after it, and the top next tokens. Each row but a text's
first is listed under its token; its parent is the row before it (`retrieve_spec.kernels.hidden_states`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.hidden_states import TOP, project

logger = logging.getLogger(__name__)

DIMS = 64
"""Dimensions of a key."""
_STEPS = 4.5
"""Standard deviations of a component that int8 holds; larger ones are clipped."""
MOST_ROWS = 5 << 17
"""Most rows; older ones give way. A row takes 112 bytes."""
FITTED_TO, FEWEST = 1 << 14, 4 * DIMS
"""Number of states that a transform is fitted to, and the fewest."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyTransform:
    """Turns hidden states into keys: projects them on whitened principal components, scales to one length, and rounds.

    Attributes
    ----------
    mean
        (d,) float32, average hidden state.
    components
        (d, dims) float32 principal components, each divided by its standard deviation.
    """

    mean: NDArray[np.float32]
    components: NDArray[np.float32]

    @property
    def length(self) -> int:
        """Length of a key before rounding."""
        return int(127 * np.sqrt(self.components.shape[1]) / _STEPS)

    @classmethod
    def fitted(cls, hidden: NDArray[np.float32], dims: int = DIMS) -> KeyTransform:
        """Fit to hidden states (n, d)."""
        mean = hidden.mean(0, dtype=np.float64)
        moved = hidden - mean.astype(np.float32)
        variances, vectors = np.linalg.eigh(moved.T @ moved / len(hidden))
        deviations = np.sqrt(np.maximum(variances[::-1][:dims], 1e-12 * variances[-1] + 1e-30))
        return cls(mean.astype(np.float32), np.ascontiguousarray(vectors[:, ::-1][:, :dims] / deviations, np.float32))

    def __call__(self, hidden: NDArray[np.float32]) -> NDArray[np.int8]:
        """Turn hidden states (n, d) into keys (n, dims)."""
        dims = self.components.shape[1]
        keys: NDArray[np.int8] = np.empty((len(hidden), dims), np.int8)
        given = np.ascontiguousarray(hidden, np.float32)
        project(given, self.mean, self.components, self.length, np.empty(dims, np.float32), keys)
        return keys

    def is_same(self, other: KeyTransform) -> bool:
        """Whether keys of both can be compared."""
        return np.array_equal(self.components, other.components) and np.array_equal(self.mean, other.mean)


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Rows of some texts.

    Attributes
    ----------
    transform
        Makes keys of hidden states.
    keys
        (n, dims) int8.
    top_ids, shares
        (n, TOP) int32 most probable next tokens, -1 after the last, and uint8 their shares of 255.
    order, previous, starts
        (m,) int32 rows with a parent, by token and by the token before it, the newest first; (m,) int32 these tokens
        before; and (vocabulary + 1,) int32 where each token's rows begin.
    """

    transform: KeyTransform
    keys: NDArray[np.int8]
    top_ids: NDArray[np.int32]
    shares: NDArray[np.uint8]
    order: NDArray[np.int32]
    previous: NDArray[np.int32]
    starts: NDArray[np.int32]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays by the names of their files."""
        fields = ("keys", "shares", "order", "previous", "starts")
        return {name: getattr(self, name) for name in fields} | {
            "next_ids": self.top_ids,
            "mean": self.transform.mean,
            "components": self.transform.components,
        }

    @classmethod
    def of_arrays(cls, arrays: dict[str, NDArray[Any]]) -> StateRows:
        """Return the rows that flat arrays from files hold.

        Raises
        ------
        StoreCorruptError
            They contradict one another, or would lead a look-up outside of them.
        """
        mean, keys, order, previous, starts = (arrays[name] for name in ("mean", "keys", "order", "previous", "starts"))
        n, dims = len(arrays["shares"]) // TOP, len(arrays["components"]) // max(len(mean), 1)
        sizes = {
            "components": dims * len(mean),
            "keys": n * dims,
            "next_ids": n * TOP,
            "shares": n * TOP,
            "previous": len(order),
        }
        if not dims or any(len(arrays[name]) != size for name, size in sizes.items()):
            found = ", ".join(f"{name} of {len(arrays[name])}" for name in sizes)
            raise StoreCorruptError(f"state rows whose arrays have sizes {sizes}", found)
        ascend = len(starts) and starts[0] == 0 and starts[-1] == len(order) and (starts[1:] >= starts[:-1]).all()
        if not ascend or (len(order) and not 0 < order.min() <= order.max() < n):
            raise StoreCorruptError("state rows that are listed by token", "lists that lead outside of them")
        transform = KeyTransform(mean, arrays["components"].reshape(-1, dims))
        tops = arrays["next_ids"].reshape(-1, TOP), arrays["shares"].reshape(-1, TOP)
        return cls(transform, keys.reshape(-1, dims), *tops, order, previous, starts)

    @classmethod
    def joined(cls, parts: Sequence[StateRows]) -> StateRows:
        """Join rows of texts, older ones first, each text once, and keep the newest, at most `MOST_ROWS` rows.

        Rows whose keys cannot be compared with those of the largest part are left out.
        """
        transform = max(parts, key=lambda part: len(part.keys)).transform
        if others := sum(len(part.keys) for part in parts if not part.transform.is_same(transform)):
            logger.warning("left out %d hidden states of stores that were distilled apart from the largest", others)
        parts = [part for part in parts if part.transform.is_same(transform)]
        keys, top_ids, shares = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("keys", "top_ids", "shares")
        )
        tokens, previous = (np.concatenate(each) for each in zip(*(part._tokens() for part in parts), strict=True))
        begins = np.flatnonzero(tokens < 0)
        lengths = np.diff([*begins, len(tokens)])
        rows_of = [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
        newest = {(keys[rows].tobytes(), top_ids[rows].tobytes()): text for text, rows in enumerate(rows_of)}
        texts = np.sort([*newest.values()])
        texts = texts[np.cumsum(lengths[texts][::-1])[::-1] <= MOST_ROWS]
        kept = np.repeat(np.isin(np.arange(len(begins)), texts), lengths)
        return cls(transform, keys[kept], top_ids[kept], shares[kept], *_listed(tokens[kept], previous[kept]))

    def _tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (n,) tokens of the rows, -1 of a text's first, and the tokens before them."""
        tokens, previous = np.full((2, len(self.keys)), -1, np.int64)
        tokens[self.order] = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        previous[self.order] = self.previous
        return tokens, previous


class StateCollector:
    """Collects what a model shows at each token of texts.

    Parameters
    ----------
    transform
        Of earlier rows of the model; None to fit one to the first states.
    """

    def __init__(self, transform: KeyTransform | None) -> None:
        self._transform = transform
        self._waiting: list[NDArray[np.float32]] = []
        self._keys: list[NDArray[np.int8]] = []
        self._texts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float16]]] = []

    def add(
        self,
        token_ids: NDArray[np.int32],
        hidden: NDArray[np.float32],
        top_ids: NDArray[np.int32],
        probs: NDArray[np.float16],
    ) -> None:
        """Add a text: (n,) tokens, (n, d) hidden states, (n, TOP) most probable next tokens and probabilities."""
        self._texts.append((token_ids, top_ids, probs))
        if self._transform is not None:
            self._keys.append(self._transform(hidden))
            return
        self._waiting.append(hidden)
        if sum(map(len, self._waiting)) >= FITTED_TO:
            self._fit()

    def _fit(self) -> None:
        """Fit the transform to the states so far."""
        self._transform = KeyTransform.fitted(np.concatenate(self._waiting))
        self._keys = [self._transform(hidden) for hidden in self._waiting]
        self._waiting = []

    def rows(self, fewest: int = FEWEST) -> StateRows | None:
        """Return the rows of all texts; None without a transform if there are fewer than `fewest` states."""
        if self._transform is None and sum(map(len, self._waiting)) >= fewest:
            self._fit()
        if self._transform is None or not self._texts:
            return None
        token_ids, top_ids, probs = (np.concatenate(part) for part in zip(*self._texts, strict=True))
        tokens = token_ids.astype(np.int64)
        tokens[np.cumsum([0, *(len(ids) for ids, _, _ in self._texts)])[:-1]] = -1
        listed = _listed(tokens, np.roll(token_ids, 1))
        return StateRows(self._transform, np.concatenate(self._keys), top_ids, shares_of(probs), *listed)


def shares_of(probs: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Return probabilities (n, k) as shares of 255 of their sum."""
    wide = probs.astype(np.float32)
    shares: NDArray[np.uint8] = np.rint(255 * wide / np.maximum(wide.sum(1, keepdims=True), 1e-9)).astype(np.uint8)
    return shares


def _listed(
    tokens: NDArray[np.int64], previous: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return `order`, `previous` and `starts` of rows, of their tokens (-1: not listed) and the tokens before them."""
    rows = np.flatnonzero(tokens >= 0)
    order = rows[np.lexsort((-rows, previous[rows], tokens[rows]))]
    starts = np.concatenate([[0], np.cumsum(np.bincount(tokens[rows]))])
    return order.astype(np.int32), previous[order].astype(np.int32), starts.astype(np.int32)
