"""Slab: keys and values of some layers with one window as rows of preallocated tensors, which move in place."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, PASS
from retrieve_spec.errors import UnsupportedModelError


class Slab:
    """Keys and values of layers with one window: (layers, kv_heads, capacity, head_dim) each.

    Row r of the text stands at `r - offset`; rows before `offset` are not held.

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
        self._moving: tuple[int, list[torch.Tensor]] | None = None  # the offset to come, and copies of what moves
        self._growing = 0  # the capacity that it grows to, while it does
        spare = max(window // 4, PASS.cache_block) + MAX_NODES + 1
        self.capacity = min(capacity, window + spare) if window else capacity

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_host_float32(self) -> bool:
        """Whether there are tensors, in float32 on a CPU."""
        return bool(self.tensors) and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in self.tensors)

    def of_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(1, kv_heads, capacity, head_dim) keys and values of one layer."""
        keys, values = self.tensors
        return keys[index : index + 1], values[index : index + 1]

    def fits(self, held: int, rows: int) -> bool:
        """Whether rows `held … held + rows - 1` fit behind the rows held, without other tensors."""
        first = max(self.offset, held - self.window + 1) if self.window else 0
        return held + rows - first <= self.capacity and not self._growing

    def make_room(self, held: int, rows: int) -> None:
        """Let rows `held … held + rows - 1` fit behind the rows held; where this was cut short, it can be done again.

        Where they did not, the tensors are replaced, one after the other: nobody else may hold the old ones.
        """
        if self._moving is None and self.window and self.tensors and held + rows - self.offset > self.capacity:
            first = max(self.offset, held - self.window + 1)
            kept = [tensor[:, :, first - self.offset : held - self.offset].clone() for tensor in self.tensors]
            self._moving = (first, kept)
        self.settle()
        needed = held + rows - self.offset
        block = PASS.cache_block
        if needed > self.capacity:
            self._growing = -(-max(needed, self.capacity + self.capacity // 8, self._growing) // block) * block
        if self._growing:
            self._grow(held - self.offset)

    def restart(self, offset: int) -> None:
        """Let another text begin, whose first row held is `offset`."""
        self.offset, self._moving = offset, None

    def settle(self) -> None:
        """Finish a move of the window's rows that was begun."""
        if self._moving is None:
            return
        first, kept = self._moving
        for tensor, part in zip(self.tensors, kept, strict=True):
            tensor[:, :, : part.shape[2]] = part
        self.offset, self._moving = first, None

    def _grow(self, used: int) -> None:
        """Replace the tensors that are smaller than the slab grows to, of which `used` rows are held."""
        for i in range(len(self.tensors)):
            old = self.tensors[i]
            if old.shape[2] < self._growing:
                new = _empty(old, (*old.shape[:2], self._growing, old.shape[3]))
                new[:, :, :used] = old[:, :, :used]
                self.tensors = (*self.tensors[:i], new, *self.tensors[i + 1 :])
        self.capacity, self._growing = self._growing, 0

    def fit(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Allocate tensors for such keys and values, once; return whether that was done.

        Raises
        ------
        UnsupportedModelError
            When they differ from those the slab was made for.
        """
        given = (key_states, value_states)
        if not self.tensors:
            self.tensors = tuple(_empty(s, (self._layers, s.shape[1], self.capacity, s.shape[3])) for s in given)
            return True
        for slab, states in zip(self.tensors, given, strict=True):
            if states.shape[0] != 1 or states.shape[1] != slab.shape[1] or states.shape[3] != slab.shape[3]:
                raise UnsupportedModelError(
                    f"one row of text and {slab.shape[1]} heads of width {slab.shape[3]} in every layer",
                    f"{states.shape[0]} rows, {states.shape[1]} heads of width {states.shape[3]}",
                    "Use the ordinary cache for this model.",
                )
        return False

    def copies(self, sources: NDArray[np.int64]) -> list[torch.Tensor]:
        """The rows `sources` of the text, in all layers at once: keys, values."""
        index = torch.from_numpy(sources - self.offset).to(self.tensors[0].device, non_blocking=True)
        return [tensor.index_select(2, index) for tensor in self.tensors]

    def write(self, copies: list[torch.Tensor], target: int) -> None:
        """Let copies of rows be rows `target …`."""
        for tensor, rows in zip(self.tensors, copies, strict=True):
            tensor.narrow(2, target - self.offset, rows.shape[2]).copy_(rows)


def _empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that can be written to in any mode; those made in inference mode cannot be outside of it."""
    with torch.inference_mode(False):
        return like.new_empty(shape)
