"""Sequence cache: the cache of one generation, kept in step with the text as drafts are accepted and dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.verify.cache import (
    KeptRows,
    apart,
    decoder_cache,
    record_past,
    recording,
    same_rows,
    set_recording,
)
from retrieve_spec.verify.recurrent import RecurrentState


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A pass that has run and is not committed yet.

    Attributes
    ----------
    roots, nodes
        How many root tokens it took, and draft nodes whose rows the cache holds.
    kept
        (nodes,) ascending numbers of these nodes in the draft, where a pass was repeated without the others.
    shared
        Of a pass that several texts shared: the recurrent states of all of them, and the number of this text.
    """

    roots: int = 0
    nodes: int = 0
    kept: NDArray[np.int64] | None = None
    shared: tuple[RecurrentState | None, int] | None = None

    def path_in_cache(self, path: NDArray[np.int32]) -> NDArray[np.int32]:
        """(a,) numbers, among the nodes in the cache, of those on `path`."""
        return path if self.kept is None else np.searchsorted(self.kept, path).astype(np.int32)


class SequenceCache:
    """The cache of one generation.

    Parameters
    ----------
    given
        The cache that `generate` prepared, None where the model makes one.
    state
        The recurrent state beside its rows, for models that have one.

    Attributes
    ----------
    whole
        The cache in use: the given one, or one that the model put in its place (LongRoPE models do).
    decoder
        The part of it that grows with the text.
    """

    def __init__(self, given: Any, state: RecurrentState | None = None) -> None:
        self.state = state
        self.replace(given)
        self._recorded_before = recording(self.decoder) if self.decoder is not None else []
        self._is_asked = self._records = any(self._recorded_before)  # whether any layer recorded before

    def replace(self, whole: Any) -> None:
        """Use another cache from now on."""
        self.whole, self.decoder = whole, decoder_cache(whole)
        self._rows = KeptRows(self.decoder) if isinstance(self.decoder, DynamicCache) else None

    def fork(self) -> SequenceCache:
        """Return a copy that goes on without this one."""
        state = None if self.state is None else self.state.apart()
        return SequenceCache(apart(self.whole), state)

    @property
    def grows_by_rows(self) -> bool:
        """Whether rows are all that every layer holds."""
        return self._rows is not None and self._rows.grows_by_rows

    def begin(self, records: bool = False) -> None:
        """Record the rows before a pass; `records`: rows that leave a window may have to come back."""
        if self._rows is not None:
            self._rows.begin()
        if records and not self._is_asked and self.decoder is not None:
            record_past(self.decoder)
            self._is_asked, self._records = True, any(recording(self.decoder))

    def commit(self, pending: PendingPass, path: NDArray[np.int32]) -> None:
        """Keep the root tokens of a pass and the nodes of `path`, (a,) int32; drop the rest."""
        if self.decoder is None:
            return
        path, nodes = pending.path_in_cache(path), pending.nodes
        state, text = pending.shared or (self.state, 0)
        if state is not None:
            state.commit(self.decoder, path, text)
        if self._rows is not None and (nodes or self._records or pending.shared):
            self._rows.commit(path, nodes)

    def copy_rows(self) -> DynamicCache | None:
        """Return a cache of the same tensors, which nothing writes to; None where it holds more than rows."""
        return same_rows(self.decoder) if self.grows_by_rows and self.state is None else None

    def restore_rows(self, rows: DynamicCache) -> None:
        """Go back to the rows that `copy_rows` returned."""
        assert self.decoder is not None
        self.decoder.layers = rows.layers

    def finish(self) -> Any:
        """Return the cache as plain `generate` leaves it."""
        if self.state is not None:
            self.state.forget()
        if self.decoder is not None and self._records:
            set_recording(self.decoder, self._recorded_before)
        return self.whole
