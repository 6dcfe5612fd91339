"""Turns key and value rows into preallocated, in-place storage of which a commit keeps only the accepted rows.

The layers are ordinary Transformers cache layers, so any model's forward can write to them. All layers of one model
share two slabs, so that a commit is one copy for the whole model, not one per layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from retrieve_spec.config import PASS
from retrieve_spec.errors import UnsupportedModelError


class PreallocatedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's window on the slabs of a `PreallocatedCache`."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # windows are a matter of the mask; every row is kept

    def __init__(self, cache: PreallocatedCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the slabs if this is the first layer that is written to."""
        self._cache.reserve(key_states, value_states, key_states.shape[-2])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, kv_heads, rows, head_dim) behind the rows held and return views of all rows."""
        rows = key_states.shape[-2]
        stop = self.length + rows
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if stop > self._cache.capacity:
            self._cache.reserve(key_states, value_states, stop)
        keys, values = self._cache.layer_slabs[self._index]
        keys.narrow(2, self.length, rows).copy_(key_states)
        values.narrow(2, self.length, rows).copy_(value_states)
        self.length = stop
        self.keys, self.values = keys.narrow(2, 0, stop), values.narrow(2, 0, stop)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset the mask of the next pass needs."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Rows held."""
        return self.length

    def get_max_length(self) -> int:
        """-1: the slabs grow."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (a number ≤ 0, as in Transformers)."""
        self.length = max(0, self.length + min(tokens_to_remove, 0))

    def reset(self) -> None:
        """Forget every row, keep the storage."""
        self.length = 0


class PreallocatedCache(Cache):  # type: ignore[misc]
    """Keys and values of one row of text in two slabs, (layers, kv_heads, capacity, head_dim) each.

    Parameters
    ----------
    num_layers
        Attention layers of the model, all with keys of one shape and values of one shape.
    capacity
        Rows to allocate at first; growing doubles it, `config.PASS.cache_block` rows at least.

    Raises
    ------
    UnsupportedModelError
        From `update`, when a layer's heads differ from the first layer's, or more than one row of text is given.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[PreallocatedLayer(self, i) for i in range(num_layers)])
        self.capacity = capacity
        self.layer_slabs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._slabs: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def length(self) -> int:
        """Rows held by every layer between two passes."""
        return int(self.layers[0].length)

    def reserve(self, key_states: torch.Tensor, value_states: torch.Tensor, rows: int) -> None:
        """Make room for `rows` rows shaped like these keys and values, keeping the rows held."""
        grown = self.capacity
        if rows > grown:
            block = PASS.cache_block
            grown = max(2 * grown, -(-rows // block) * block)
        if self._slabs is not None and grown == self.capacity:
            self._check_shape(key_states, value_states)
            return
        slabs = tuple(
            states.new_empty((len(self.layers), states.shape[1], grown, states.shape[3]))
            for states in (key_states, value_states)
        )
        if self._slabs is not None:
            self._check_shape(key_states, value_states)
            for old, new in zip(self._slabs, slabs, strict=True):
                new[:, :, : self.capacity] = old
        self._slabs, self.capacity = (slabs[0], slabs[1]), grown
        self.layer_slabs = [(slabs[0][i : i + 1], slabs[1][i : i + 1]) for i in range(len(self.layers))]

    def make_room(self, rows: int) -> None:
        """Grow to hold `rows` rows, once the first rows are in."""
        if rows > self.capacity and self._slabs is not None:
            self.reserve(self._slabs[0][:1], self._slabs[1][:1], rows)

    def _check_shape(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        assert self._slabs is not None
        for slab, states in zip(self._slabs, (key_states, value_states), strict=True):
            if states.shape[0] != 1 or states.shape[1] != slab.shape[1] or states.shape[3] != slab.shape[3]:
                raise UnsupportedModelError(
                    f"keys and values of {slab.shape[1]} heads of width {slab.shape[3]} in every layer",
                    f"{states.shape[1]} heads of width {states.shape[3]}",
                    "Use the ordinary cache for this model.",
                )

    def commit(self, base: int, roots: int, path: NDArray[np.int32]) -> None:
        """Keep the root tokens of a pass and the nodes of a path, in place.

        Parameters
        ----------
        base
            Rows held before the pass.
        roots
            Root tokens of the pass; its node i stands in row `base + roots + i`.
        path
            (a,) int32, accepted nodes, ascending.
        """
        accepted = len(path)
        moved = int((path == np.arange(accepted)).argmin()) if accepted else 0
        if accepted and path[moved] != moved:
            assert self._slabs is not None
            first = base + roots
            index = torch.from_numpy(path[moved:].astype(np.int64) + first)
            for slab in self._slabs:
                rows = slab.index_select(2, index.to(slab.device, non_blocking=True))
                slab.narrow(2, first + moved, accepted - moved).copy_(rows)
        self.set_length(base + roots + accepted)

    def set_length(self, length: int) -> None:
        """Let every layer hold the first `length` rows."""
        for layer in self.layers:
            layer.length = length

    def load(self, cache: DynamicCache, length: int) -> None:
        """Take over the rows of a dynamic cache that has seen `length` tokens; its layers are empty afterwards.

        A sliding layer holds its last rows only; the rows before them are zeros that its window never shows.
        """
        first = cache.layers[0]
        self.reserve(first.keys, first.values, max(length, self.capacity))
        for i, theirs in enumerate(cache.layers):
            keys, values = self.layer_slabs[i]
            self._check_shape(theirs.keys, theirs.values)
            start = length - theirs.keys.shape[2]
            for slab, states in ((keys, theirs.keys), (values, theirs.values)):
                slab[:, :, :start] = 0
                slab[:, :, start:length] = states
            self.layers[i].is_initialized = True
            theirs.keys = theirs.values = None
        self.set_length(length)

    def unload(self, cache: DynamicCache) -> None:
        """Give the rows back to the cache they were taken from; this object is empty afterwards."""
        length = self.length
        for layer, (keys, values) in zip(cache.layers, self.layer_slabs, strict=True):
            start = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                start = max(0, length - layer.sliding_window + 1)
                layer.cumulative_length = length
            layer.keys, layer.values = keys[:, :, start:length], values[:, :, start:length]
        self._slabs, self.layer_slabs = None, []
        self.layers: list[Any] = []


def why_not_preallocated(config: Any) -> str:
    """Say why a model's cache cannot be held in slabs; empty when it can."""
    if getattr(config, "attention_chunk_size", None):
        return "its attention is cut into chunks"
    for layer in DynamicCache(config=config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"its cache has layers of type {type(layer).__name__}"
    return ""
