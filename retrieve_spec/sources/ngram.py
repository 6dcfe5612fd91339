"""The n-gram tables of a datastore as a cursor machine: from the last tokens to what followed them most often."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.store import Datastore
from retrieve_spec.kernels.ngram import MAX_ORDER, ngram_hash
from retrieve_spec.sources.corpus import Successors


class NgramSource:
    """Cursor over the n-gram tables of a store (the databases of Hierarchy Drafting, Cho et al. 2025).

    A state is the end of the text, (≤ 5,) int64 token ids.

    Parameters
    ----------
    store
        An open store with n-gram tables.
    """

    def __init__(self, store: Datastore) -> None:
        self.tables, self._vocabulary = store.ngrams, store.manifest.vocabulary

    def root(self, context: NDArray[np.int32]) -> NDArray[np.int64]:
        """State after a text, (n,) int32."""
        return np.asarray(context[-MAX_ORDER:], np.int64)

    def advance(self, state: NDArray[np.int64], token_id: int) -> NDArray[np.int64]:
        """State after one more token."""
        return np.append(state, token_id)[-MAX_ORDER:]

    def orders(self, state: NDArray[np.int64]) -> list[Successors]:
        """Continuations of the last 1, 2, … 5 tokens, shortest context first, as far as some table knows them."""
        hashes = []
        h = np.uint64(0)
        for token in state[::-1].tolist():
            h = np.uint64(ngram_hash(h, token))
            hashes.append(h)
        found = (self._order(h, order) for order, h in enumerate(hashes, 1))
        return [successors for successors in found if successors is not None]

    def successors(self, state: NDArray[np.int64]) -> Successors:
        """Continuations of the longest context that some table knows."""
        known = self.orders(state)
        return known[-1] if known else Successors(np.empty(0, np.int32), np.empty(0, np.float64), 0, 0)

    def _order(self, h: np.uint64, order: int) -> Successors | None:
        """Continuations of one context, counts of all tables added; None where no table knows it."""
        total = 0
        tokens, counts = [np.empty(0, np.int64)], [np.empty(0, np.float64)]
        for table in self.tables:
            found = table.look_up(h, self._vocabulary)
            if found is not None:
                total += found[0]
                tokens.append(found[2].astype(np.int64))
                counts.append(found[3].astype(np.float64))
        if total == 0:
            return None
        ids, place = np.unique(np.concatenate(tokens), return_inverse=True)
        summed = np.bincount(place, np.concatenate(counts), len(ids)).astype(np.float64)
        return Successors(ids.astype(np.int32), summed, total, order)
