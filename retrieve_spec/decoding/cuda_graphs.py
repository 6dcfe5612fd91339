"""Turns a captured pass into CUDA graphs, one per padded number of rows, that are replayed as the cache grows.

Everything that changes from pass to pass is read from device buffers: token ids, positions, slots of the new rows,
visibility bits and the length of the prefix. Padding rows see themselves only and write behind the real rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import PASS
from retrieve_spec.decoding.captured_pass import CapturedPass
from retrieve_spec.decoding.static_cache import PreallocatedCache
from retrieve_spec.decoding.tree_attention import PassMask, attend_triton

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


def capture_cuda_graph(run: Callable[[], None]) -> Replay:
    """Record one call of `run` on a side stream, after a warm-up, and return what repeats it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class BucketPass:
    """One captured pass over a fixed number of rows.

    Parameters
    ----------
    captured, slabs
        What to run, and the cache it writes to; the pass holds while `slabs.capacity` does.
    rows
        Rows it is padded to.
    capture
        Makes a replay of a call; tests pass the identity.
    """

    def __init__(
        self, captured: CapturedPass, slabs: PreallocatedCache, rows: int, dtype: torch.dtype, capture: Capture
    ) -> None:
        device = captured.device
        self.rows, self.capacity = rows, slabs.capacity
        self._captured, self._slabs = captured, slabs
        self._mask = PassMask(captured.groups, dtype, device)
        self._mask.set(0, np.eye(rows, dtype=np.bool_), np.zeros(rows, np.int64))
        self._ids, self._positions = (torch.zeros((1, rows), dtype=torch.long, device=device) for _ in range(2))
        self._slots = torch.arange(slabs.capacity - rows, slabs.capacity, device=device)  # capturing writes, too
        self._prefix = torch.zeros(1, dtype=torch.int32, device=device)
        self._words, self._depths = self._mask.words()
        self._mask.device_words = (self._words, self._depths, self._prefix)
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None
        self._replay = capture(self._run)

    def _run(self) -> None:
        self._outputs = self._captured.run(self._ids, self._positions, self._attend)

    def _attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
        all_keys, all_values = self._slabs.layer_slabs[layer]
        all_keys.index_copy_(2, self._slots, keys)
        all_values.index_copy_(2, self._slots, values)
        _, heads, rows, width = query.shape
        packed = query.reshape(1, keys.shape[1], heads // keys.shape[1] * rows, width)
        out = attend_triton(packed, all_keys, all_values, self._mask, self._captured.rules[layer])
        return out.reshape(1, heads, rows, width).transpose(1, 2)

    def __call__(
        self, ids: NDArray[np.int64], depths: NDArray[np.int64], seen: NDArray[np.bool_], prefix: int, shift: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass of at most `rows` rows: (rows, vocab) logits and (rows, d) states, valid until the next call."""
        real = len(ids)
        padded = np.zeros((2, self.rows), np.int64)
        padded[0, :real], padded[1, :real] = ids, depths
        visible = np.eye(self.rows, dtype=np.bool_)
        visible[:real, :real] = seen
        self._mask.set(prefix, visible, padded[1])
        words, relative = self._mask.words()
        self._mask.device_words = (self._words, self._depths, self._prefix)
        self._ids.copy_(torch.from_numpy(padded[:1]), non_blocking=True)
        self._positions.copy_(torch.from_numpy(padded[1:] + (prefix + shift)), non_blocking=True)
        self._slots.copy_(torch.arange(prefix, prefix + self.rows), non_blocking=True)
        self._words.copy_(words, non_blocking=True)
        self._depths.copy_(relative, non_blocking=True)
        self._prefix.fill_(prefix)
        self._replay()
        assert self._outputs is not None
        logits, hidden = self._outputs
        return logits[0, :real], hidden[0, :real]


class GraphedPasses:
    """Bucket passes, captured when first needed, within `config.PASS.graph_bytes` of GPU memory."""

    def __init__(
        self,
        captured: CapturedPass,
        slabs: PreallocatedCache,
        dtype: torch.dtype,
        capture: Capture = capture_cuda_graph,
    ) -> None:
        self._made: dict[int, BucketPass] = {}
        self._captured, self._slabs, self._dtype, self._capture = captured, slabs, dtype, capture
        self._bytes = 0

    def bucket(self, rows: int) -> BucketPass | None:
        """The pass that `rows` rows are padded to, or None when there is none or its memory is spent."""
        at = bisect_left(PASS.graph_rows, rows)
        if at == len(PASS.graph_rows):
            return None
        size = PASS.graph_rows[at]
        made = self._made.get(size)
        if made is not None and made.capacity == self._slabs.capacity:
            return made
        if self._bytes > PASS.graph_bytes:
            return None
        before = _gpu_bytes(self._captured.device)
        self._made[size] = BucketPass(self._captured, self._slabs, size, self._dtype, self._capture)
        self._bytes += max(0, _gpu_bytes(self._captured.device) - before)
        return self._made[size]


def _gpu_bytes(device: Any) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
