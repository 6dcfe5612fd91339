"""CUDA graphs of a recorded pass, one per number of rows, that serve any texts.

Everything that changes from pass to pass is read from one device buffer: token ids, positions, visibility bits, where
the texts' slabs stand and how many rows they hold. Slabs may grow and texts may come and go: nothing is captured again.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import PASS
from retrieve_spec.errors import in_a_line
from retrieve_spec.recorded.packed_pass import LaidOut, PackedPass, PassShape, packs, shape_of
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.verify.verifier import Ran

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


class PassGraphs:
    """Captured passes of one recording, made when first needed, within `config.PASS.graph_bytes`.

    Parameters
    ----------
    recorded
        The recorded pass.
    capture
        Makes a replay of a call; tests pass the identity.

    Attributes
    ----------
    captures
        Passes captured so far.
    problem
        Why the last pass that was not replayed was not.
    """

    def __init__(self, recorded: RecordedPass, capture: Capture | None = None) -> None:
        self._recorded, self._capture = recorded, CudaGraphCapture() if capture is None else capture
        self._made: dict[PassShape, tuple[PackedPass, Replay]] = {}
        self._bytes = 0
        self._failed = ""
        self.captures = 0
        self.problem = ""

    def clear(self) -> None:
        """Drop what was captured: the weights' addresses hold no longer."""
        self._made.clear()
        self._bytes = 0

    def run(
        self, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, Ran] | None:
        """What `run_pass` returns; None where no graph serves the pass."""
        real = sum(len(text.ids) for text in laid)
        at = bisect_left(PASS.graph_rows, real)
        if at == len(PASS.graph_rows) or not packs(self._recorded, laid):
            wide = f"a pass of {real} rows is wider than any graph"
            self.problem = wide if at == len(PASS.graph_rows) else "its layers do not attend in one launch"
            return None
        rows = PASS.graph_rows[at]
        few = 0 if wanted is None or rows < PASS.graph_rows[-1] else len(wanted)
        few = few if few <= PASS.graph_logits else 0
        shape = shape_of(self._recorded, laid, rows, min(rows, PASS.batch_rows), PASS.graph_logits if few else 0)
        last = laid[-1]
        last.cache.make_room(len(last.ids) + rows - real)  # padding is written, too
        made, ran = self._made.get(shape), Ran.REPLAYED
        if made is None:
            if (made := self._make(shape, laid, wanted)) is None:
                return None
            ran = Ran.CAPTURED
        packed, replay = made
        packed.fill(laid, wanted)
        replay()
        logits, hidden = packed.outputs
        if few:
            logits = logits[:few]
        elif wanted is None or len(wanted) == real - wanted[0]:
            logits = logits[0 if wanted is None else int(wanted[0]) : real]
        else:
            logits = packed.chosen(len(wanted))
        return logits, hidden[:real], ran

    def _make(
        self, shape: PassShape, laid: Sequence[LaidOut], wanted: NDArray[np.int64] | None
    ) -> tuple[PackedPass, Replay] | None:
        """Capture a pass of a shape; None when its memory is spent or a capture has failed."""
        if self._failed or self._bytes > PASS.graph_bytes:
            self.problem = self._failed or f"graphs hold {PASS.graph_bytes >> 20} MiB"
            return None
        before = _gpu_bytes(self._recorded.device)
        for text in laid:
            text.cache.settle()  # a pass that is captured runs more than once
        packed = PackedPass(self._recorded, laid[0].cache, shape)
        packed.fill(laid, wanted)
        try:
            made = self._made[shape] = packed, self._capture(packed.run)
        except Exception as error:  # CUDA refuses what it cannot record, Triton what it cannot compile
            self._failed = self.problem = f"capturing {shape.rows} rows failed ({in_a_line(error, 200)})"
            logger.warning("passes run without CUDA graphs: %s", self._failed)
            return None
        self._bytes += max(0, _gpu_bytes(self._recorded.device) - before)
        self.captures += 1
        return made


def _gpu_bytes(device: torch.device) -> int:
    """Memory that torch holds on a GPU, without the blocks it keeps for later."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)
