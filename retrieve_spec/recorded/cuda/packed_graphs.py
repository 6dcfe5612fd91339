"""Packed passes: the rows of several texts in one recorded pass, whose attention is one launch, captured or not.

Where the texts' rows and slabs stand is read from device memory. A recorded pass therefore outlives the texts it was
captured for: it serves any of at most as many texts and rows, wherever their slabs are and however they grow.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch

from retrieve_spec.attention.tree_attention import processors, why_not_triton
from retrieve_spec.config import AUTO, PASS
from retrieve_spec.errors import in_a_line
from retrieve_spec.recorded.cuda.cuda_graphs import Capture, LazyGraphs, Replay
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.pass_buffer import LaidOut, PackedBuffer
from retrieve_spec.recorded.recorded_pass import RecordedPass

logger = logging.getLogger(__name__)

GRAPH_ROWS = (4, 8, 16, 24, 32, 48, 64, 96, 129)
"""Rows of all texts that a recorded pass is padded to: closer together than those of one text, as a pass over eight
texts without drafts has eight rows and drafts come on top."""


class PackedPass:
    """One recorded pass over at most `rows` rows of at most `texts` texts.

    Parameters
    ----------
    recorded
        The recorded pass.
    laid
        A pass like those to be run: shapes and layers are read from its caches.
    rows, texts
        Padding included.
    splits
        By slab, how many programs share one context.
    """

    def __init__(
        self, recorded: RecordedPass, laid: Sequence[LaidOut], rows: int, texts: int, splits: Sequence[int]
    ) -> None:
        cache = laid[0].cache
        self._recorded, self._splits = recorded, splits
        self._slab_of, self._layer_in_slab = cache.slab_of, cache.layer_in_slab
        self._block = _block(recorded, cache, rows, texts)
        self._buffer = PackedBuffer(rows, texts, len(cache.slabs), recorded.groups, self._block, recorded.device)
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, laid: Sequence[LaidOut], replay: Replay | None = None, wanted: int | torch.Tensor = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, vocab) logits and (rows, d) states of all texts, one behind the other, valid until the next call.

        Logits are those of the `wanted` rows (`RecordedPass.run`) where nothing captured is replayed.
        """
        self.fill(laid)
        if replay is None:
            self.run(wanted)
        else:
            replay()
        assert self._outputs is not None
        logits, hidden = self._outputs
        rows = sum(len(text.ids) for text in laid)
        return logits[0, :rows], hidden[0, :rows]

    def fill(self, laid: Sequence[LaidOut]) -> None:
        """Write a pass to the device."""
        self._buffer.fill(laid)

    def run(self, wanted: int | torch.Tensor = 0) -> None:
        """Run the pass that was written last; running it again changes nothing."""
        ids, positions = self._buffer.ids.long()[None], self._buffer.positions.long()[None]
        self._outputs = self._recorded.run(ids, positions, self._attend, wanted)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        from retrieve_spec.kernels.triton_tree_attention import packed_tree_attention

        at, rule, buffer = self._slab_of[layer], self._recorded.rules[layer], self._buffer
        query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
        return packed_tree_attention(
            query[0], keys[0], values[0], buffer.words, buffer.depths, buffer.held[at], buffer.starts, buffer.text_of,
            buffer.tiles, buffer.slabs[at], layer=self._layer_in_slab[layer], block=self._block,
            scale=rule.scale, softcap=rule.softcap, window=rule.window, sinks=rule.sinks, splits=self._splits[at],
        )[None]  # fmt: skip


def _block(recorded: RecordedPass, cache: KVBuffer, rows: int, texts: int) -> int:
    """Queries that one program takes: those of a text with its share of the rows, if that many fit."""
    from retrieve_spec.kernels.triton_tree_attention import launch_options

    keys = cache.slabs[0].tensors[0]
    height, width = recorded.groups * -(-rows // texts), keys.shape[3]
    wide = min(height, 32) if width > 128 else height  # two addresses more than one text needs leave fewer registers
    return launch_options(wide, width, keys.element_size())["BLOCK_M"]


def shares(recorded: RecordedPass, laid: Sequence[LaidOut], rows: int, texts: int) -> tuple[int, ...]:
    """By slab, how many programs share the context of a text."""
    from retrieve_spec.kernels.triton_tree_attention import num_splits

    heads = laid[0].cache.slabs[0].tensors[0].shape[1] * texts
    height, count = recorded.groups * -(-rows // texts), processors(recorded.device)
    longest = np.max([text.cache.capacities for text in laid], axis=0).tolist()
    return tuple(num_splits(heads, height, capacity, count) for capacity in longest)


def packs(recorded: RecordedPass, laid: Sequence[LaidOut]) -> bool:
    """Whether one launch can serve all texts of a pass; else each layer attends text by text."""
    if PASS.attention not in (AUTO, "triton") or why_not_packed(recorded.device.type):
        return False
    kept = [tensor for text in laid for slab in text.cache.slabs for tensor in slab.tensors]
    return len({(*tensor.shape[1:2], tensor.shape[3], tensor.dtype) for tensor in kept}) == 1 and all(
        tensor.shape[3] <= 256 for tensor in kept
    )


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
        for tensor in cache.slabs[0].tensors:
            tensor.fill_(i + 1)
        rows = i + 1
        laid.append(LaidOut(np.zeros(rows, np.int32), np.arange(rows), np.tri(rows, dtype=np.bool_), 5, cache, 5))
    buffer = PackedBuffer(3, 2, 1, 1, 16, device)
    buffer.fill(laid)
    values = torch.ones_like(states)
    values[:, :, 1:] = 2
    got = packed_tree_attention(
        states[0], states[0], values[0], buffer.words, buffer.depths, buffer.held[0], buffer.starts, buffer.text_of,
        buffer.tiles, buffer.slabs[0], layer=0, block=16, scale=1.0,
    )  # fmt: skip
    return float((got[:, 0] - values[0, 0]).abs().max())


class GraphedTexts(LazyGraphs[tuple[PackedPass, Replay]]):
    """Passes over several texts, captured when first needed by their padded numbers of rows and of texts.

    Contexts of another length may be worth other splits, and a pass captured anew.
    """

    def __init__(self, recorded: RecordedPass, capture: Capture) -> None:
        super().__init__(recorded.device)
        self._recorded, self._capture = recorded, capture

    def run(self, laid: Sequence[LaidOut]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits and states as `PackedPass` gives them; None when no graph serves the pass."""
        real = sum(len(text.ids) for text in laid)
        at = bisect_left(GRAPH_ROWS, real)
        if at == len(GRAPH_ROWS):
            return None
        rows, texts = GRAPH_ROWS[at], max(2, 1 << (len(laid) - 1).bit_length())
        last = laid[-1]
        last.cache.make_room(len(last.ids) + rows - real)  # padding is written, too
        splits = shares(self._recorded, laid, rows, texts)
        made = self._find((rows, texts, splits), lambda: self._record(laid, rows, texts, splits))
        return None if made is None else made[0](laid, made[1])

    def _record(
        self, laid: Sequence[LaidOut], rows: int, texts: int, splits: tuple[int, ...]
    ) -> tuple[PackedPass, Replay]:
        made = PackedPass(self._recorded, laid, rows, texts, splits)
        made.fill(laid)
        return made, self._capture(made.run)
