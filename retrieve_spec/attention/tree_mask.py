"""Tree masks: who sees whom in one pass over a draft tree, in every form that attention backends read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import PASS
from retrieve_spec.drafting.tree import DraftTree, unpacked
from retrieve_spec.kernels.treemask import write_block


def visible_rows(roots: int, tree: DraftTree | None) -> NDArray[np.bool_]:
    """Who may look at whom within a pass: (roots + n, roots + n) bool over the root tokens and then the nodes."""
    if tree is None or not len(tree):
        return np.tri(roots, dtype=np.bool_)
    return unpacked(tree.seen_behind(roots))


def row_depths(roots: int, tree: DraftTree | None) -> NDArray[np.int64]:
    """Offset of every row of a pass from its first row in positions: (roots + n,) int64."""
    head = np.arange(roots, dtype=np.int64)
    return head if tree is None or not len(tree) else np.concatenate([head, tree.depth.astype(np.int64) + roots - 1])


def visibility_bits(seen: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(rows, ceil(rows / 32)) int32: bit j of row i is set when row i sees row j of the pass."""
    rows = len(seen)
    padded = np.zeros((rows, -(-rows // 32) * 32), np.bool_)
    padded[:, :rows] = seen
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


class TreeMask:
    """The mask of one pass in every form a backend asks for, kept in buffers that live from pass to pass.

    Parameters
    ----------
    groups
        Query heads per key head.
    dtype, device
        Of the queries.
    """

    def __init__(self, groups: int, dtype: torch.dtype, device: torch.device) -> None:
        self.groups = groups
        self.dtype, self.device = dtype, device
        self.rows = self.prefix = 0
        self.seen: NDArray[np.bool_] = np.ones((1, 1), np.bool_)
        self._depths: NDArray[np.int64] = np.zeros(1, np.int64)
        self._buffer = torch.empty((0, 0), dtype=dtype, device=device)
        self._margin = self._spare = 0
        self._host: NDArray[np.float32] | None = None  # the same memory
        self._packed: torch.Tensor | None = None
        self._is_text: bool | None = None
        self._windows: dict[int, torch.Tensor] = {}
        self._device_words: tuple[torch.Tensor, torch.Tensor] | None = None
        self._device_prefix: dict[int, torch.Tensor] = {}

    def set(self, prefix: int, seen: NDArray[np.bool_], depths: NDArray[np.int64]) -> None:
        """Describe the next pass: committed rows before it, who sees whom, and positions relative to its first row."""
        self.rows, self.prefix, self.seen, self._depths = len(seen), prefix, seen, depths
        self._windows.clear()
        self._device_words = None
        self._device_prefix.clear()
        self._packed = self._is_text = None

    @property
    def is_text(self) -> bool:
        """Whether every row of the pass sees those before it and no other, as a text does."""
        if self._is_text is None:
            self._is_text = bool((self.seen == np.tri(self.rows, dtype=np.bool_)).all())
        return self._is_text

    @property
    def fits(self) -> bool:
        """Whether the zero-prefix buffer stays within `config.PASS.mask_bytes`."""
        columns = self.prefix + self.rows
        return self.groups * self.rows * columns * self.dtype.itemsize <= PASS.mask_bytes

    def on_device(self, prefix: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pass behind `prefix` rows as the GPU kernel reads it: `visibility_bits`, int32 depths, (1,) prefix."""
        if self._device_words is None:
            bits, depths = visibility_bits(self.seen), self._depths.astype(np.int32)
            self._device_words = (self._send(bits), self._send(depths))
        if prefix not in self._device_prefix:
            self._device_prefix[prefix] = self._send(np.array([prefix], np.int32))
        return (*self._device_words, self._device_prefix[prefix])

    def _send(self, array: NDArray[Any]) -> torch.Tensor:
        """Copy to the device without waiting for what it is doing; pageable memory is read before the call returns."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def block(self) -> torch.Tensor:
        """(rows, rows) additive mask of the tree block."""
        block = torch.zeros((self.rows, self.rows), dtype=self.dtype)
        block.masked_fill_(torch.from_numpy(~self.seen), float("-inf"))
        return block.to(self.device, non_blocking=True)

    def packed(self) -> torch.Tensor:
        """(1, 1, groups · rows, prefix + rows) additive mask: zeros, then the tree block once per group."""
        if self._packed is None:
            height, end = self.groups * self.rows, self._margin + self.rows
            if height > self._buffer.shape[0] or self.prefix > self._margin or self.rows > self._spare:
                self._grow(height)
                end = self._margin + self.rows
            if self._host is not None:
                write_block(self.seen, self._margin, self._host[:height])
            else:
                target = self._buffer[:height, self._margin : end]
                target.view(self.groups, self.rows, self.rows).copy_(self.block())
            self._packed = self._buffer[:height, self._margin - self.prefix : end][None, None]
        return self._packed

    def _grow(self, height: int) -> None:
        """Make a zeroed buffer with room for this pass and longer prefixes."""
        block = PASS.cache_block
        self._spare = max(-(-self.rows // 32) * 32, self._spare)
        self._margin = max(self._margin, -(-(self.prefix + 1) // block) * block)
        self._buffer = torch.zeros(
            (max(height, self.groups * self._spare), self._margin + self._spare), dtype=self.dtype, device=self.device
        )
        if self.device.type == "cpu" and self.dtype == torch.float32:
            self._host = self._buffer.numpy()

    def first_key(self, window: int) -> int:
        """First cached row that any row of the pass sees in a layer with this window."""
        return max(0, self.prefix - window + 1)

    def windowed(self, window: int) -> torch.Tensor:
        """(1, 1, groups · rows, columns) additive mask of a layer with a window, from column `first_key` on."""
        if window not in self._windows:
            start = self.first_key(window)
            position = np.concatenate([np.arange(start, self.prefix), self.prefix + self._depths])
            near = position[None, :] > (self.prefix + self._depths - window)[:, None]
            near[:, self.prefix - start :] &= self.seen
            mask = torch.zeros(near.shape, dtype=self.dtype)
            mask.masked_fill_(torch.from_numpy(~near), float("-inf"))
            self._windows[window] = mask.repeat(self.groups, 1).to(self.device, non_blocking=True)[None, None]
        return self._windows[window]
