"""CUDA graphs of a recorded pass, one per padded number of rows, that are replayed as the KV buffer grows.

Everything that changes from pass to pass is read from one device buffer: token ids, positions, visibility bits and the
rows held. Padding rows see themselves only and write behind the real rows.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention.online_softmax import Block, LayerRule, attend_blocks, keys_per_block
from retrieve_spec.attention.tree_attention import attend_triton, why_not_triton
from retrieve_spec.attention.tree_mask import TreeMask
from retrieve_spec.config import PASS
from retrieve_spec.errors import in_a_line
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.pass_buffer import PassBuffer
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded.slab import Slab

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


class CudaGraphCapture:
    """Records a call on a side stream, after a warm-up, and returns what repeats it.

    All graphs share one memory pool: a graph's outputs are read before any graph is replayed again. They share the
    stream, too, as cuBLAS keeps a workspace for each.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None
        self._graphs: WeakSet[Any] = WeakSet()

    def __call__(self, run: Callable[[], None]) -> Replay:
        """Record one call of `run`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if not self._graphs:  # torch refuses a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        stream, graph = self._stream, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a capture that fails leaves its stream the current one
            for _ in range(2):
                run()
            # "thread_local": what other threads do on a GPU meanwhile is none of this graph's business
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs.add(graph)
        return graph.replay


class BucketPass:
    """One recorded pass over a fixed number of rows.

    Parameters
    ----------
    recorded, cache
        What to run, and the cache it writes to; the pass holds while `cache.capacities` does.
    rows
        Rows it is padded to.
    capture
        Makes a replay of a call; tests pass the identity.
    triton
        Use the Triton kernel, where it takes the layers' shapes; else torch attends to all rows there is room for.
    """

    def __init__(self, recorded: RecordedPass, cache: KVBuffer, rows: int, capture: Capture, triton: bool) -> None:
        self.rows, self.capacities = rows, cache.capacities
        self._recorded, self._cache, self._triton = recorded, cache, triton
        self._buffer = PassBuffer(rows, len(cache.slabs), recorded.device)
        held = [slab.capacity - rows for slab in cache.slabs]  # capturing writes, too: behind all rows
        self._buffer.fill(np.zeros(0), np.zeros(0), np.ones((0, 0), np.bool_), 0, held)
        self._slots: list[torch.Tensor] = []
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replay = capture(self._run)

    def _run(self) -> None:
        buffer = self._buffer
        self._masks.clear()
        rows = torch.arange(self.rows, device=buffer.ids.device)
        self._slots = [rows + buffer.held[i] for i in range(len(self._cache.slabs))]
        self._outputs = self._recorded.run(buffer.ids.long()[None], buffer.positions.long()[None], self._attend)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        at, rule = self._cache.slab_of[layer], self._recorded.rules[layer]
        all_keys, all_values = self._cache.layer_slabs[layer]
        all_keys.index_copy_(2, self._slots[at], keys)
        all_values.index_copy_(2, self._slots[at], values)
        _, heads, rows, width = query.shape
        if self._triton and width == values.shape[-1] <= 256:
            described = (self._buffer.words, self._buffer.depths, self._buffer.held[at : at + 1])
            return attend_triton(query, all_keys, all_values, _NO_MASK, rule, described=described)
        slab, held = self._cache.slabs[at], self._buffer.held[at]
        if (slab.window, rule.window) not in self._masks:  # slabs of one window hold the same rows
            self._masks[slab.window, rule.window] = visible_rows_of(slab, self._buffer, held, rule.window)
        packed = query.reshape(1, keys.shape[1], heads // keys.shape[1] * rows, width)
        out = attend_all(packed, all_keys, all_values, self._masks[slab.window, rule.window], rule)
        return out.reshape(1, heads, rows, values.shape[-1]).transpose(1, 2)

    def __call__(
        self, ids: NDArray[Any], depths: NDArray[Any], seen: NDArray[np.bool_], past: int, shift: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass of at most `rows` rows: (rows, vocab) logits and (rows, d) states, valid until the next call."""
        self._buffer.fill(ids, depths, seen, past + shift, [past - slab.offset for slab in self._cache.slabs])
        self._replay()
        assert self._outputs is not None
        logits, hidden = self._outputs
        return logits[0, : len(ids)], hidden[0, : len(ids)]


_NO_MASK = TreeMask(1, torch.float32, torch.device("cpu"))


def visible_rows_of(slab: Slab, buffer: PassBuffer, held: torch.Tensor, window: int) -> torch.Tensor:
    """(rows, capacity) bool: what each row of a pass sees of a slab, from device memory alone."""
    column = torch.arange(slab.capacity, device=held.device) - held
    drafted = (column >= 0) & (column < buffer.rows)
    at = torch.where(drafted, column, 0)
    bits = (buffer.words[:, at // 32] >> (at % 32)) & 1
    seen = (column < 0) | (drafted & (bits == 1))
    if window:
        position = torch.where(drafted, buffer.depths[at], column)
        seen &= buffer.depths[:, None] - position < window
    return seen


def attend_all(
    packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, rule: LayerRule
) -> torch.Tensor:
    """Attention over all rows a slab has room for, (1, kv_heads, groups · rows, d) in and out."""
    size = keys_per_block(packed)

    def blocks() -> Iterator[Block]:
        for start in range(0, seen.shape[1], size):
            shown = seen[:, start : start + size]
            written = shown.any(0)[:, None]  # rows never written may hold anything, even NaN
            additive = torch.where(shown, 0.0, float("-inf")).repeat(packed.shape[2] // len(seen), 1)
            part = slice(start, start + size)
            yield torch.where(written, keys[:, :, part], 0), torch.where(written, values[:, :, part], 0), additive

    return attend_blocks(packed, blocks(), rule)


P = TypeVar("P")


class LazyGraphs(Generic[P]):
    """Captured passes by what they are captured for, made when first needed, within `config.PASS.graph_bytes`.

    Attributes
    ----------
    captures
        Passes captured so far.
    problem
        Why a capture failed; from then on passes run without graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._lies_on = device
        self._made: dict[Hashable, P] = {}
        self._bytes = 0
        self.captures = 0
        self.problem = ""

    def _forget(self) -> None:
        self._made.clear()
        self._bytes = 0

    def _find(self, key: Hashable, make: Callable[[], P]) -> P | None:
        """The pass of a key, or None when its memory is spent or a capture has failed."""
        made = self._made.get(key)
        if made is not None or self.problem or self._bytes > PASS.graph_bytes:
            return None if self.problem else made
        before = _gpu_bytes(self._lies_on)
        try:
            made = self._made[key] = make()
        except Exception as error:  # CUDA refuses what it cannot record, Triton what it cannot compile
            self.problem = in_a_line(error, 200)
            logger.warning("passes run without CUDA graphs: recording %s rows failed (%s)", key, self.problem)
            return None
        self._bytes += max(0, _gpu_bytes(self._lies_on) - before)
        self.captures += 1
        return made


class GraphedPasses(LazyGraphs[BucketPass]):
    """Bucket passes over the cache of one text.

    When a slab grows its tensors move, and all passes are captured anew as they are needed.

    Attributes
    ----------
    cache
        What the passes write to.
    """

    def __init__(self, recorded: RecordedPass, cache: KVBuffer, capture: Capture, triton: bool | None = None) -> None:
        super().__init__(recorded.device)
        self.cache = cache
        self._recorded, self._capture = recorded, capture
        self._triton = not why_not_triton(recorded.device.type) if triton is None else triton

    def bucket(self, rows: int) -> BucketPass | None:
        """The pass that `rows` rows are padded to, or None when there is none, its memory is spent or capture fails."""
        at = bisect_left(PASS.graph_rows, rows)
        if at == len(PASS.graph_rows):
            return None
        size = PASS.graph_rows[at]
        if any(made.capacities != self.cache.capacities for made in self._made.values()):
            self._forget()
        return self._find(size, lambda: BucketPass(self._recorded, self.cache, size, self._capture, self._triton))


def _gpu_bytes(device: Any) -> int:
    """Memory that torch holds on a GPU, without the blocks it keeps for later."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
