"""Pass pool: a recorded pass's CUDA graphs, and KV buffers they write to, that one generation after another borrows."""

from __future__ import annotations

from retrieve_spec.config import PASS
from retrieve_spec.recorded.cuda.cuda_graphs import Capture, CudaGraphCapture, GraphedPasses
from retrieve_spec.recorded.cuda.packed_graphs import GraphedTexts
from retrieve_spec.recorded.kv_buffer import KVBuffer
from retrieve_spec.recorded.recorded_pass import RecordedPass

FIRST_ROWS = 2048
"""Slabs that outlive a generation are made for multiples of this, so that most texts find room."""


class PassPool:
    """Slabs and graphs of one recorded model, lent to one generation after another.

    What a generation finds is what the last one gave back, if its layers had the same windows and it takes no more than
    `config.PASS.pool_bytes`; a text that needs more room lets the slabs grow.
    """

    def __init__(self, recorded: RecordedPass, capture: Capture | None = None, triton: bool | None = None) -> None:
        self._recorded, self._triton = recorded, triton
        self._capture = capture
        self._idle: GraphedPasses | None = None
        self._idle_texts: GraphedTexts | None = None

    def take(self, windows: tuple[int, ...], rows: int) -> GraphedPasses:
        """Graphs and, as `cache`, empty slabs with room for `rows` rows."""
        rows = -(-rows // FIRST_ROWS) * FIRST_ROWS
        idle, self._idle = self._idle, None
        if idle is not None and idle.cache.windows == windows:
            idle.cache.reserve(rows)
            return idle
        return GraphedPasses(self._recorded, KVBuffer(windows, rows), self._recorder(), self._triton)

    def give_back(self, passes: GraphedPasses) -> None:
        """Keep what a generation used for the next one."""
        kept = self._idle
        if passes.cache.nbytes <= PASS.pool_bytes and (kept is None or kept.cache.nbytes < passes.cache.nbytes):
            self._idle = passes

    def clear(self) -> None:
        """Drop what is kept: its graphs kept addresses that hold no longer."""
        self._idle = self._idle_texts = None

    def take_texts(self) -> GraphedTexts:
        """Graphs of passes over several texts; the texts bring their slabs."""
        idle, self._idle_texts = self._idle_texts, None
        return GraphedTexts(self._recorded, self._recorder()) if idle is None else idle

    def give_back_texts(self, passes: GraphedTexts) -> None:
        """Keep what a batch used for the next one."""
        self._idle_texts = passes

    def _recorder(self) -> Capture:
        """What captures: not a shared one, as a generation within another must not write over its results."""
        return CudaGraphCapture() if self._capture is None else self._capture
