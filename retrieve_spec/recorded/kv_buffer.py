"""KV buffer: keys and values of one text in preallocated slabs, of which a commit keeps only the accepted rows.

Layers with the same window share slabs, so that a commit is one copy per slab, not one per layer; slabs are parts of a
cache, so that taking it over, growing and handing it back never hold it twice. A slab of sliding-window layers holds
the rows of a window and some spare ones, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from retrieve_spec.config import PASS
from retrieve_spec.kernels.cpu import LANES


class Slab:
    """Keys and values of layers with one window: (layers, kv_heads, capacity, head_dim) each.

    Row r of the text is at `r - offset`; rows before `offset` are not held.

    Attributes
    ----------
    window
        Keys a query sees at most; 0 for all.
    offset
        First row held; 0 without a window.
    tensors
        Keys and values, none before the first rows are in.
    """

    def __init__(self, num_layers: int, window: int, capacity: int) -> None:
        self.window = window
        self.offset = 0
        self.tensors: tuple[torch.Tensor, ...] = ()
        self._layers = num_layers
        spare = max(window // 4, PASS.cache_block) + PASS.tree_rows
        self.capacity = -(-min(capacity, window + spare if window else capacity) // LANES) * LANES  # whole vectors

    def of_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, kv_heads, capacity, head_dim) keys and values of one layer."""
        keys, values = self.tensors
        return keys[index : index + 1], values[index : index + 1]

    def fits(self, held: int, rows: int) -> bool:
        """Whether rows `held … held + rows - 1` fit after the rows held, without other tensors."""
        return held + rows - self._first(held) <= self.capacity

    def _first(self, held: int) -> int:
        """The first row that must be kept; the number of dropped rows is a multiple of a GPU's blocks of keys."""
        gone = max(held - self.window + 1 - self.offset, 0) if self.window else 0
        return self.offset + gone // KEY_BLOCK * KEY_BLOCK

    def make_room(self, held: int, rows: int) -> None:
        """Make room for rows `held … held + rows - 1` after the rows held.

        Without room the tensors are replaced, one after the other: nobody else may hold the old ones.
        """
        if self.window and self.tensors and held + rows - self.offset > self.capacity:
            first = self._first(held)
            for tensor in self.tensors:
                tensor[:, :, : held - first] = tensor[:, :, first - self.offset : held - self.offset].clone()
            self.offset = first
        used, block = held - self.offset, PASS.cache_block
        if used + rows <= self.capacity:
            return
        grown = -(-max(used + rows, self.capacity + self.capacity // 8) // block) * block
        for i in range(len(self.tensors)):
            old = self.tensors[i]
            new = _empty(old, (*old.shape[:2], grown, old.shape[3]))
            new[:, :, :used] = old[:, :, :used]
            self.tensors = (*self.tensors[:i], new, *self.tensors[i + 1 :])
            del old
        self.capacity = grown

    def fit(self, *states: torch.Tensor) -> None:
        """Allocate tensors for such keys and values, once."""
        if not self.tensors:
            self.tensors = tuple(_empty(s, (self._layers, s.shape[1], self.capacity, s.shape[3])) for s in states)

    def move(self, sources: NDArray[np.int64], target: int) -> None:
        """Move the rows `sources` of the text to rows `target …`, in all layers at once."""
        index = torch.from_numpy(sources - self.offset).to(self.tensors[0].device, non_blocking=True)
        for tensor in self.tensors:
            tensor.narrow(2, target - self.offset, len(sources)).copy_(tensor.index_select(2, index))


def _empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an empty tensor that can be written to in any mode; one made in inference mode cannot be outside of it."""
    with torch.inference_mode(False):
        return like.new_empty(shape)


KEY_BLOCK = 64
"""`retrieve_spec.kernels.triton_tree_attention.ZONE`, which needs Triton to be read."""
_NO_ROWS = torch.empty(0)
_NO_MOVES = np.empty(0, np.int32)
SLABS_PER_WINDOW = 8
"""Slabs that the layers of one window are spread over."""


class KVBuffer:
    """Keys and values of one row of text in slabs.

    Parameters
    ----------
    windows
        By attention layer: keys a query sees at most, 0 for all. Layers with the same window need keys of one shape
        and values of one shape.
    capacity
        Rows to allocate at first; growing adds an eighth, `config.PASS.cache_block` rows at least.
    moves_later
        Leave the rows that a commit moves to the next pass (`take_moves`).

    Attributes
    ----------
    length
        Rows of text between two passes.
    slabs
        By window, the smallest (0: none) first, `SLABS_PER_WINDOW` at most for each.
    slab_of, layer_in_slab
        By layer, the index of its slab, and its place there.
    first_layers
        By slab, its first layer.
    layer_slabs
        By layer, its part of the slab's tensors.
    kind
        (kv_heads, head_dim, dtype) of keys and values alike in all slabs; None where they differ, or nothing is in.
    host_dtype
        Of all slabs' tensors if they are on a CPU; None where they are not, differ, or are not there yet.
    addresses
        (layers, 3) int64: where keys and values lie in memory, and rows that there is room for.
    """

    def __init__(self, windows: Sequence[int], capacity: int, moves_later: bool = False) -> None:
        self.windows = tuple(windows)
        self._moves_later = moves_later
        self._moves = _NO_MOVES
        self.length = 0
        self.slab_of = _spread(self.windows)
        self.layer_in_slab = [self.slab_of[:i].count(slab) for i, slab in enumerate(self.slab_of)]
        of_slab = [[i for i, slab in enumerate(self.slab_of) if slab == k] for k in range(max(self.slab_of) + 1)]
        self.first_layers = [layers[0] for layers in of_slab]
        self.slabs = [Slab(len(layers), self.windows[layers[0]], capacity) for layers in of_slab]
        self.layer_slabs: list[tuple[torch.Tensor, torch.Tensor]] = [(_NO_ROWS, _NO_ROWS)] * len(windows)
        self.host_dtype: torch.dtype | None = None
        self.kind: tuple[int, int, torch.dtype] | None = None
        self.addresses: NDArray[np.int64] = np.zeros((len(windows), 3), np.int64)
        self._fits = 0  # rows up to which nothing has to be moved or replaced

    def refresh(self) -> None:
        """Update the layers' views of the slabs."""
        for i, slab in enumerate(self.slab_of):
            if self.slabs[slab].tensors:
                self.layer_slabs[i] = parts = self.slabs[slab].of_layer(self.layer_in_slab[i])
                self.addresses[i] = (*(part.data_ptr() for part in parts), self.slabs[slab].capacity)
        tensors = [tensor for slab in self.slabs for tensor in slab.tensors]
        filled = len(tensors) == 2 * len(self.slabs) and all(tensor.device.type == "cpu" for tensor in tensors)
        dtypes = {tensor.dtype for tensor in tensors}
        self.host_dtype = dtypes.pop() if filled and len(dtypes) == 1 else None
        kinds = {(t.shape[1], t.shape[3], t.dtype) for t in tensors}
        self.kind = kinds.pop() if len(kinds) == 1 else None
        self._fits = 0

    def make_room(self, rows: int) -> None:
        """Make room for a pass over `rows` rows after the rows held."""
        if self.length + rows <= self._fits:
            return
        self.settle()
        for slab in self.slabs:
            self.make_room_in(slab, self.length, rows)
        self._fits = min(slab.offset + slab.capacity for slab in self.slabs)

    def make_room_in(self, slab: Slab, held: int, rows: int) -> None:
        """Make room for `rows` rows after `held` in one slab; the views go first, so that its old tensors are freed."""
        self._fits = 0
        if slab.fits(held, rows):
            slab.make_room(held, rows)
            return
        k = self.slabs.index(slab)
        for i, at in enumerate(self.slab_of):
            if at == k:
                self.layer_slabs[i] = (_NO_ROWS, _NO_ROWS)
        try:
            slab.make_room(held, rows)
        finally:  # a failed pass over several texts is repeated for each
            self.refresh()

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's (1, kv_heads, rows, head_dim) after the rows held; return views of all that its slab then
        holds.
        """
        slab, rows = self.slabs[self.slab_of[layer]], keys.shape[2]
        self.settle()
        if not slab.tensors:
            slab.fit(keys, values)
            self.refresh()
        if self.length - slab.offset + rows > slab.capacity:
            self.make_room_in(slab, self.length, rows)
        start = self.length - slab.offset
        all_keys, all_values = self.layer_slabs[layer]
        all_keys.narrow(2, start, rows).copy_(keys)
        all_values.narrow(2, start, rows).copy_(values)
        return all_keys.narrow(2, 0, start + rows), all_values.narrow(2, 0, start + rows)

    def commit(self, base: int, roots: int, path: NDArray[np.int32]) -> None:
        """Keep the root tokens of a pass and the nodes of a path, in place.

        Parameters
        ----------
        base
            Rows held before the pass.
        roots
            Root tokens of the pass; its node i is in row `base + roots + i`.
        path
            (a,) int32, accepted nodes, ascending.
        """
        self.length = base + roots + len(path)
        if not len(path) or path[-1] == len(path) - 1:
            return
        right = int((path != np.arange(len(path))).argmax())  # earlier rows are in place
        self._moves = path[right:] - np.int32(right)
        if not self._moves_later:
            self.settle()

    def take_moves(self, most: int) -> NDArray[np.int32]:
        """Return (n,) int32, the rows that the caller has to move in the next pass; empty where none moves.

        Row `length - n + n[i]` moves to `length - n + i`. More than `most` rows are moved here.
        """
        if len(self._moves) > most:
            self.settle()
        moves, self._moves = self._moves, _NO_MOVES
        return moves

    def settle(self) -> None:
        """Move the rows whose move the last commit left to the next pass."""
        moves, self._moves = self._moves, _NO_MOVES
        if len(moves):
            first = self.length - len(moves)
            for slab in self.slabs:
                slab.move(moves.astype(np.int64) + first, first)

    def load(self, cache: DynamicCache, length: int) -> None:
        """Take over the rows of a dynamic cache that has seen `length` tokens; its layers are empty afterwards."""
        for k, slab in enumerate(self.slabs):
            for i in (i for i, at in enumerate(self.slab_of) if at == k):
                theirs = cache.layers[i]
                held = theirs.keys.shape[2]
                if not self.layer_in_slab[i]:
                    slab.offset = length - held
                    self.make_room_in(slab, length - held, held)
                slab.fit(theirs.keys, theirs.values)
                parts = slab.of_layer(self.layer_in_slab[i])
                for part, states in zip(parts, (theirs.keys, theirs.values), strict=True):
                    part[:, :, :held] = states
                theirs.keys = theirs.values = None
        self.refresh()
        self.length = length

    def restart(self, states: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Begin a text that has no rows yet; `states` are keys and values of the layers, of any length."""
        for slab, (keys, values) in zip(map(self.slabs.__getitem__, self.slab_of), states, strict=True):
            slab.fit(keys, values)
        self.refresh()
        self.length = 0

    def unload(self, cache: DynamicCache, length: int, copy: bool = False) -> None:
        """Give `length` rows back to the cache they were taken from, as copies if the slabs are to be used again."""
        self.settle()
        for i, layer in enumerate(cache.layers):
            start, offset = 0, self.slabs[self.slab_of[i]].offset
            if isinstance(layer, DynamicSlidingWindowLayer):
                start = max(0, length - layer.sliding_window + 1)
                layer.cumulative_length = length
            parts = [part[:, :, start - offset : length - offset] for part in self.layer_slabs[i]]
            if not layer.is_initialized:
                layer.lazy_initialization(*parts)
            layer.keys, layer.values = [part.clone() for part in parts] if copy else parts


def _spread(windows: tuple[int, ...]) -> list[int]:
    """Return the index of each layer's slab: the layers of one window in equal parts, as many as allowed."""
    slab_of, begun = [0] * len(windows), 0
    for window in sorted(set(windows)):
        layers = [i for i, each in enumerate(windows) if each == window]
        size = -(-len(layers) // SLABS_PER_WINDOW)
        for n, i in enumerate(layers):
            slab_of[i] = begun + n // size
        begun += -(-len(layers) // size)
    return slab_of


def cache_windows(cache: DynamicCache) -> tuple[int, ...]:
    """Return, for each layer of a dynamic cache, how many keys a query sees at most; 0 for all."""
    return tuple(
        int(layer.sliding_window) if isinstance(layer, DynamicSlidingWindowLayer) else 0 for layer in cache.layers
    )
