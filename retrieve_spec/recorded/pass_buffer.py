"""Pass buffer: what changes from pass to pass as arrays in device memory, filled with one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention.tree_mask import visibility_bits
from retrieve_spec.config import PASS
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


@dataclass(frozen=True, slots=True)
class PassShape:
    """What a pass is made for.

    Attributes
    ----------
    rows, texts
        Rows of the pass and texts at most, padding included.
    block
        Queries that one program of the attention takes.
    splits
        By slab, how many programs share one context.
    logits
        How many rows logits are computed for, whose numbers are written with each pass; 0 for all.
    """

    rows: int
    texts: int
    block: int
    splits: tuple[int, ...]
    logits: int = 0


class PackedBuffer:
    """The inputs of one pass over the rows of several texts, each with slabs of its own.

    Padding rows belong to the last text: they see themselves only and are written behind its real rows.

    Parameters
    ----------
    shape
        Of the pass.
    slabs
        Slabs of a text.
    groups
        Query heads per key head.

    Attributes
    ----------
    moves
        Rows that all texts together can have moved before the pass (`KVBuffer.take_moves`).
    """

    moves = PASS.max_rows

    def __init__(self, shape: PassShape, slabs: int, groups: int, device: torch.device) -> None:
        rows, texts = shape.rows, shape.texts
        words, tiles = -(-rows // 32), -(-groups * rows // shape.block) + texts
        sizes = {
            "slabs": 6 * slabs * texts, "ids": rows, "positions": rows, "depths": rows, "text_of": rows,
            "held": slabs * texts, "starts": texts + 1, "tiles": 2 * tiles, "words": rows * words,
            "wanted": shape.logits or rows, "move_starts": texts + 1, "sources": self.moves,
        }  # fmt: skip
        self._fields = DeviceFields(sizes, device)
        self._shape, self._groups = shape, groups
        on_device = self._fields.device
        self.ids, self.positions, self.depths = on_device["ids"], on_device["positions"], on_device["depths"]
        self.text_of, self.starts, self.wanted = on_device["text_of"], on_device["starts"], on_device["wanted"]
        self.words, self.tiles = on_device["words"].view(rows, words), on_device["tiles"].view(tiles, 2)
        self.held = on_device["held"].view(slabs, texts)
        self.slabs = on_device["slabs"].view(torch.int64).view(slabs, texts, 3)
        self.move_starts, self.sources = on_device["move_starts"], on_device["sources"]

    def fill(self, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None = None) -> None:
        """Write a pass over at most `texts` texts with at most `rows` rows together, and what their commits move."""
        host = self._fields.writable()
        rows = self._shape.rows
        counts = [len(text.ids) for text in laid]
        real = sum(counts)
        counts[-1] += rows - real
        starts = np.concatenate([[0], np.cumsum(counts)])
        host["starts"][:] = rows
        host["starts"][: len(starts)] = starts
        host["text_of"][:] = np.repeat(np.arange(len(laid)), counts)
        host["ids"][:real], host["ids"][real:] = np.concatenate([text.ids for text in laid]), 0
        host["depths"][:real], host["depths"][real:] = np.concatenate([text.depths for text in laid]), 0
        host["positions"][:] = host["depths"] + np.repeat([text.position for text in laid], counts)
        if wanted is not None:
            host["wanted"][: len(wanted)], host["wanted"][len(wanted) :] = wanted, 0
        self._write_words(host["words"].reshape(rows, -1), laid, starts)
        self._write_tiles(host["tiles"].reshape(-1, 2), counts)
        self._write_slabs(host, laid)
        self._write_moves(host["move_starts"], host["sources"], laid)
        self._fields.send()

    def _write_words(self, words: NDArray[np.int32], laid: Sequence[LaidOut], starts: NDArray[np.int64]) -> None:
        words[:] = 0
        for text, start in zip(laid, starts.tolist(), strict=False):
            bits = visibility_bits(text.seen)
            words[start : start + len(bits), : bits.shape[1]] = bits
        own = np.arange(len(laid[-1].ids), self._shape.rows - starts[-2])  # padding, counted within the last text
        words.view(np.uint32)[starts[-2] + own, own // 32] = np.uint32(1) << (own % 32).astype(np.uint32)

    def _write_tiles(self, tiles: NDArray[np.int32], counts: Sequence[int]) -> None:
        firsts = [np.arange(0, self._groups * count, self._shape.block) for count in counts]
        used = sum(map(len, firsts))
        tiles[:used, 0] = np.repeat(np.arange(len(counts)), [len(first) for first in firsts])
        tiles[:used, 1] = np.concatenate(firsts)
        tiles[used:] = -1

    def _write_slabs(self, host: dict[str, NDArray[np.int32]], laid: Sequence[LaidOut]) -> None:
        held = host["held"].reshape(-1, self._shape.texts)
        places = host["slabs"].view(np.int64).reshape(-1, self._shape.texts, 3)
        for i, text in enumerate(laid):
            held[:, i] = [text.held - slab.offset for slab in text.cache.slabs]
            places[:, i] = text.cache.addresses

    def _write_moves(self, starts: NDArray[np.int32], sources: NDArray[np.int32], laid: Sequence[LaidOut]) -> None:
        end = 0
        for i, text in enumerate(laid):
            moved = text.cache.take_moves(len(sources) - end)
            sources[end : end + len(moved)] = moved
            starts[i], end = end, end + len(moved)
        starts[len(laid) :] = end
