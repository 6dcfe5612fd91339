"""Pass buffers: what changes from pass to pass as arrays in device memory, filled with one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention.tree_mask import visibility_bits
from retrieve_spec.recorded.kv_buffer import KVBuffer


class DeviceFields:
    """Named int32 arrays side by side in one piece of host memory and one of device memory.

    Parameters
    ----------
    sizes
        By name, how many numbers; a field of 64-bit numbers goes first.

    Attributes
    ----------
    device
        By name, the array that kernels read.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        pinned = device.type == "cuda"
        with torch.inference_mode(False):  # the buffer may outlive the mode it was made in
            self._host = torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=pinned)
            self._device = torch.empty(self._host.shape, dtype=torch.int32, device=device)
        self.device = dict(zip(sizes, torch.split(self._device, list(sizes.values())), strict=True))
        ends = np.cumsum(list(sizes.values()))[:-1]
        self._fields = dict(zip(sizes, np.split(self._host.numpy(), ends), strict=True))
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def writable(self) -> dict[str, NDArray[np.int32]]:
        """By name, the array to write to; the device may still be reading what was written for the last pass."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._fields

    def send(self) -> None:
        """Copy all fields to the device."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class PassBuffer:
    """The inputs of one pass over a fixed number of rows.

    Parameters
    ----------
    rows
        Rows of the pass, padding included.
    slabs
        How many slabs are written to; each has its own number of rows held.
    """

    def __init__(self, rows: int, slabs: int, device: torch.device) -> None:
        words = -(-rows // 32)
        sizes = {"ids": rows, "positions": rows, "depths": rows, "held": slabs, "words": rows * words}
        self._fields = DeviceFields(sizes, device)
        on_device = self._fields.device
        self.ids, self.positions, self.depths = on_device["ids"], on_device["positions"], on_device["depths"]
        self.held, self.words = on_device["held"], on_device["words"].view(rows, words)
        self.rows = rows

    def fill(
        self, ids: NDArray[Any], depths: NDArray[Any], seen: NDArray[np.bool_], position: int, held: Sequence[int]
    ) -> None:
        """Write a pass of at most `rows` rows: ids, depths, who sees whom, the first row's position, rows held."""
        host = self._fields.writable()
        real = len(ids)
        visible = np.eye(self.rows, dtype=np.bool_)
        visible[:real, :real] = seen
        host["ids"][:real], host["ids"][real:] = ids, 0
        host["depths"][:real], host["depths"][real:] = depths, 0
        host["positions"][:] = host["depths"] + position
        host["held"][:] = held
        host["words"][:] = visibility_bits(visible).ravel()
        self._fields.send()


@dataclass(frozen=True, slots=True)
class LaidOut:
    """One text's part of a pass, for which its cache has room.

    Attributes
    ----------
    ids, depths
        (rows,) each: tokens, and positions relative to the first row.
    seen
        (rows, rows) bool: who sees whom.
    position
        Position of the first row.
    cache, held
        Where keys and values go, and the rows of text it holds.
    """

    ids: NDArray[np.int32]
    depths: NDArray[np.int64]
    seen: NDArray[np.bool_]
    position: int
    cache: KVBuffer
    held: int


class PackedBuffer:
    """The inputs of one pass over the rows of several texts, each with slabs of its own.

    Padding rows belong to the last text: they see themselves only and are written behind its real rows.

    Parameters
    ----------
    rows, texts
        Rows of the pass and texts at most, padding included.
    slabs
        Slabs of a text.
    groups
        Query heads per key head.
    block
        Queries that one program of the kernel takes.
    """

    def __init__(self, rows: int, texts: int, slabs: int, groups: int, block: int, device: torch.device) -> None:
        words, tiles = -(-rows // 32), -(-groups * rows // block) + texts
        sizes = {
            "slabs": 6 * slabs * texts, "ids": rows, "positions": rows, "depths": rows, "text_of": rows,
            "held": slabs * texts, "starts": texts + 1, "tiles": 2 * tiles, "words": rows * words,
        }  # fmt: skip
        self._fields = DeviceFields(sizes, device)
        self.rows, self.texts = rows, texts
        self._groups, self._block = groups, block
        on_device = self._fields.device
        self.ids, self.positions, self.depths = on_device["ids"], on_device["positions"], on_device["depths"]
        self.text_of, self.starts = on_device["text_of"], on_device["starts"]
        self.words, self.tiles = on_device["words"].view(rows, words), on_device["tiles"].view(tiles, 2)
        self.held = on_device["held"].view(slabs, texts)
        self.slabs = on_device["slabs"].view(torch.int64).view(slabs, texts, 3)

    def fill(self, laid: Sequence[LaidOut]) -> None:
        """Write a pass over at most `texts` texts with at most `rows` rows together."""
        host = self._fields.writable()
        counts = [len(text.ids) for text in laid]
        real = sum(counts)
        counts[-1] += self.rows - real
        starts = np.concatenate([[0], np.cumsum(counts)])
        host["starts"][:] = self.rows
        host["starts"][: len(starts)] = starts
        host["text_of"][:] = np.repeat(np.arange(len(laid)), counts)
        host["ids"][:real], host["ids"][real:] = np.concatenate([text.ids for text in laid]), 0
        host["depths"][:real], host["depths"][real:] = np.concatenate([text.depths for text in laid]), 0
        host["positions"][:] = host["depths"] + np.repeat([text.position for text in laid], counts)
        self._write_words(host["words"].reshape(self.rows, -1), laid, starts)
        self._write_tiles(host["tiles"].reshape(-1, 2), counts)
        self._write_slabs(host, laid)
        self._fields.send()

    def _write_words(self, words: NDArray[np.int32], laid: Sequence[LaidOut], starts: NDArray[np.int64]) -> None:
        words[:] = 0
        for text, start in zip(laid, starts.tolist(), strict=False):
            bits = visibility_bits(text.seen)
            words[start : start + len(bits), : bits.shape[1]] = bits
        own = np.arange(len(laid[-1].ids), self.rows - starts[-2])  # padding, counted within the last text
        words.view(np.uint32)[starts[-2] + own, own // 32] = np.uint32(1) << (own % 32).astype(np.uint32)

    def _write_tiles(self, tiles: NDArray[np.int32], counts: Sequence[int]) -> None:
        firsts = [np.arange(0, self._groups * count, self._block) for count in counts]
        used = sum(map(len, firsts))
        tiles[:used, 0] = np.repeat(np.arange(len(counts)), [len(first) for first in firsts])
        tiles[:used, 1] = np.concatenate(firsts)
        tiles[used:] = -1

    def _write_slabs(self, host: dict[str, NDArray[np.int32]], laid: Sequence[LaidOut]) -> None:
        held = host["held"].reshape(-1, self.texts)
        places = host["slabs"].view(np.int64).reshape(-1, self.texts, 3)
        for i, text in enumerate(laid):
            for k, slab in enumerate(text.cache.slabs):
                held[k, i] = text.held - slab.offset
                keys, values = slab.tensors
                places[k, i] = keys.data_ptr(), values.data_ptr(), slab.capacity
