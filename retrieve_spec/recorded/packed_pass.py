"""Packed pass: the rows of one text or of several in one recorded pass, every text over its own KV buffer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention.tree_attention import processors, why_not_triton
from retrieve_spec.config import AUTO, PASS
from retrieve_spec.errors import in_a_line
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.pass_buffer import LaidOut, PackedBuffer, PassShape
from retrieve_spec.recorded.recorded_pass import RecordedPass

logger = logging.getLogger(__name__)

_CONTEXT = 4096
"""Tokens of a context that as many programs share as fill a GPU; they share any other length, too."""


class PackedPass:
    """A recorded pass of one shape on a GPU, whose attention is one launch for all texts.

    Where the texts' rows and slabs stand is read from device memory: it serves any texts, however their slabs grow.

    Parameters
    ----------
    recorded
        The recorded pass.
    cache
        A KV buffer like those of the texts to come: layers and shapes are read from it.
    shape
        What it is made for.
    """

    def __init__(self, recorded: RecordedPass, cache: KVBuffer, shape: PassShape) -> None:
        self._recorded, self._shape = recorded, shape
        self._slab_of, self._layer_in_slab = cache.slab_of, cache.layer_in_slab
        self._buffer = PackedBuffer(shape, len(cache.slabs), recorded.groups, recorded.device)
        self._kind = cache.slabs[0].tensors[0][:1, :, :1].clone()
        places = torch.tensor([cache.slab_of, cache.layer_in_slab], dtype=torch.int32)
        self._places = places.to(recorded.device)
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def fill(self, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None = None) -> None:
        """Write a pass to the device, and which rows' logits are wanted of those that have any."""
        self._buffer.fill(laid, wanted)

    def run(self) -> None:
        """Run the pass that was written last."""
        from retrieve_spec.kernels.triton_tree_attention import move_rows

        buffer = self._buffer
        move_rows(self._kind, self._places, buffer.slabs, buffer.held, buffer.move_starts, buffer.sources)
        ids, positions = buffer.ids.long()[None], buffer.positions.long()[None]
        wanted = buffer.wanted.long() if self._shape.logits else 0
        self._outputs = self._recorded.run(ids, positions, self._attend, wanted)

    @property
    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, vocab) logits and (rows, d) states, padding included, valid until the next pass."""
        assert self._outputs is not None
        return self._outputs[0][0], self._outputs[1][0]

    def chosen(self, count: int) -> torch.Tensor:
        """(count, vocab), the logits of the rows that were wanted, of a pass that computes those of all."""
        return self.outputs[0].index_select(0, self._buffer.wanted[:count])

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        from retrieve_spec.kernels.triton_tree_attention import packed_tree_attention

        at, rule, buffer = self._slab_of[layer], self._recorded.rules[layer], self._buffer
        query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
        return packed_tree_attention(
            query[0], keys[0], values[0], buffer.words, buffer.depths, buffer.held[at], buffer.starts, buffer.text_of,
            buffer.tiles, buffer.slabs[at], layer=self._layer_in_slab[layer], block=self._shape.block,
            scale=rule.scale, softcap=rule.softcap, window=rule.window, sinks=rule.sinks, splits=self._shape.splits[at],
        )[None]  # fmt: skip


def shape_of(recorded: RecordedPass, laid: Sequence[LaidOut], rows: int, texts: int, logits: int = 0) -> PassShape:
    """What a pass like one that is laid out is made for, with so many rows and texts at most.

    Programs take as many queries as a text has: those of one text fill blocks, those of many with a few rows each
    would leave them empty.
    """
    from retrieve_spec.kernels.triton_tree_attention import launch_options, num_splits

    keys = laid[0].cache.slabs[0].tensors[0]
    heads, width, count = keys.shape[1], keys.shape[3], processors(recorded.device)
    height = recorded.groups * -(-rows // len(laid))
    wide = min(height, 32) if width > 128 else height  # two addresses more than one text needs leave fewer registers
    small = launch_options(1, width, keys.element_size())["BLOCK_M"]
    block = launch_options(wide, width, keys.element_size())["BLOCK_M"] if height > 2 * small else small
    contexts = [min(slab.window or _CONTEXT, _CONTEXT) for slab in laid[0].cache.slabs]
    splits = tuple(num_splits(heads, recorded.groups * rows, context, count) for context in contexts)
    return PassShape(rows, texts, block, splits, logits)


def packs(recorded: RecordedPass, laid: Sequence[LaidOut]) -> bool:
    """Whether one launch can serve all texts of a pass; else each layer attends text by text."""
    if PASS.attention not in (AUTO, "triton") or why_not_packed(recorded.device.type):
        return False
    kinds = {text.cache.kind for text in laid}
    return len(kinds) == 1 and all(kind is not None and kind[1] <= 256 for kind in kinds)


@functools.cache
def why_not_packed(device: str) -> str:
    """Why the GPU kernel cannot serve several texts at once, tried once on small caches; empty when it can."""
    why = why_not_triton(device)
    if not why:
        try:
            wrong = _deviation(torch.device(device))
            why = "" if wrong < 1e-2 else f"several texts at once give something else (off by {wrong:.2g})"
        except Exception as error:  # whatever the compiler raises: text by text computes the same
            why = f"several texts at once fail ({in_a_line(error)})"
        if why:
            logger.warning("batches attend row by row: %s", why)
    return why


def _deviation(device: torch.device) -> float:
    """Largest error over two texts whose values are all one and two."""
    from retrieve_spec.kernels.triton_tree_attention import packed_tree_attention

    caches = [KVBuffer([0], 16) for _ in range(2)]
    states = torch.ones((1, 1, 3, 16), dtype=torch.float16, device=device)
    laid = []
    for i, cache in enumerate(caches):
        cache.slabs[0].fit(states, states)
        cache.refresh()
        for tensor in cache.slabs[0].tensors:
            tensor.fill_(i + 1)
        rows = i + 1
        laid.append(LaidOut(np.zeros(rows, np.int32), np.arange(rows), np.tri(rows, dtype=np.bool_), 5, cache, 5))
    buffer = PackedBuffer(PassShape(3, 2, 16, (1,)), 1, 1, device)
    buffer.fill(laid)
    values = torch.ones_like(states)
    values[:, :, 1:] = 2
    got = packed_tree_attention(
        states[0], states[0], values[0], buffer.words, buffer.depths, buffer.held[0], buffer.starts, buffer.text_of,
        buffer.tiles, buffer.slabs[0], layer=0, block=16, scale=1.0,
    )  # fmt: skip
    return float((got[:, 0] - values[0, 0]).abs().max())
