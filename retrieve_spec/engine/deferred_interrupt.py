"""Deferred interrupt: Ctrl-C waits for the end of a pass, so that no pass is left half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class DeferredInterrupt:
    """A block in which SIGINT waits for the end; a second one does not wait.

    Python handles signals in the main thread alone, so in other threads nothing changes. Whichever handler was set is
    called as it would have been, and is in place again behind the block. Where SIGINT is ignored, or ends the process
    without Python, it stays so.
    """

    def __enter__(self) -> Self:
        self._pending: tuple[int, FrameType | None] | None = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._handler: Any = signal.getsignal(signal.SIGINT) if in_main_thread else None
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *raised: object) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def deliver(self) -> None:
        """Let what came so far be handled now, as between two passes."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._handler(*pending)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        """Keep an interrupt for the end of the block, and hand on a second one."""
        is_second = self._pending is not None
        self._pending = number, frame
        if is_second:
            self._handler(number, frame)
