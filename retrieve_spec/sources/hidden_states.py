"""Hidden states as a source: what the target said next where its state was similar."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.state_rows import StateRows
from retrieve_spec.kernels import hidden_states as kernels
from retrieve_spec.kernels.source_table import KIND_STATES
from retrieve_spec.sources.rows import Row, source_row

_TEXT_ROWS = 1 << 14
"""Rows of the running text that are kept: of about a thousand tokens, with what was drafted beside them."""


class SimilarStates:
    """Rows of a store and of the running text, and predictions from them (`retrieve_spec.kernels.hidden_states`).

    Parameters
    ----------
    rows
        Of a store.

    Notes
    -----
    DReSD (Gritta et al. 2025) also looks hidden states up, for what followed them in a text. Here a neighbour must end
    with the same token, tells the target's probabilities, and stands for the next state, which is looked up in turn.
    """

    def __init__(self, rows: StateRows) -> None:
        self._rows, self._transform = rows, rows.transform
        dims, vocabulary = rows.keys.shape[1], len(rows.starts) - 1
        self._own_keys: NDArray[np.int8] = np.zeros((_TEXT_ROWS, dims), np.int8)
        self._own_ids: NDArray[np.int32] = np.zeros((_TEXT_ROWS, kernels.TOP), np.int32)
        self._own_shares: NDArray[np.uint8] = np.zeros((_TEXT_ROWS, kernels.TOP), np.uint8)
        self._links: NDArray[np.int32] = np.zeros((_TEXT_ROWS, 2), np.int32)
        self._heads: NDArray[np.int32] = np.zeros(vocabulary, np.int32)
        self._meta: NDArray[np.int64] = np.zeros(kernels.META, np.int64)
        self._slots: NDArray[np.int8] = np.zeros((kernels.SLOTS, dims), np.int8)
        self._predicted: NDArray[np.int32] = np.zeros((kernels.SLOTS, kernels.PREDICTED), np.int32)
        self._scratch: NDArray[np.uint8] = np.zeros(kernels.scratch_bytes(dims), np.uint8)

    def keys(self, hidden: NDArray[np.float32]) -> NDArray[np.int8] | None:
        """Return the keys of hidden states (n, d); None if they are those of another model."""
        if hidden.shape[1] != len(self._transform.mean):
            return None
        return self._transform(hidden)

    def reset(self) -> None:
        """Forget the text."""
        self._heads[:] = 0
        self._meta[kernels.ROWS] = self._meta[kernels.LAST] = 0

    def leave(self) -> None:
        """Forget the last state: the text goes on with tokens that were not observed."""
        self._meta[kernels.LAST] = 0

    def row(self, number: int) -> Row:
        """Row of the mixture's source table."""
        stored = self._rows
        return source_row(
            KIND_STATES,
            number,
            "states",
            dims=stored.keys.shape[1],
            length=self._transform.length,
            keys=stored.keys,
            top_ids=stored.top_ids,
            shares=stored.shares,
            order=stored.order,
            previous=stored.previous,
            starts=stored.starts,
            num_listed=len(stored.order),
            vocabulary=len(stored.starts) - 1,
            own_keys=self._own_keys,
            own_ids=self._own_ids,
            own_shares=self._own_shares,
            links=self._links,
            heads=self._heads,
            num_heads=len(self._heads),
            capacity=_TEXT_ROWS,
            meta=self._meta,
            slots=self._slots,
            predicted=self._predicted,
            scratch=self._scratch,
        )
