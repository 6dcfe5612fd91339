"""Step lock: one thread at a time takes sequences along; others wait for the end of its step, or for their own news."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from retrieve_spec.errors import ConfigError


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


_PATIENCE = 0.1
"""Seconds after which a thread that waits looks whether it was interrupted."""


class StepLock:
    """Keeps all threads but one from stepping."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it, as in the middle of a step."""
        return self._holder == threading.get_ident()

    @contextlib.contextmanager
    def held(self, unless: Callable[[], bool] = bool) -> Iterator[bool]:
        """Hold it; False if there was to wait, and `unless` came true meanwhile. Ctrl-C waits for the end of the block.

        Raises
        ------
        ConfigError
            This thread holds it already.
        """
        if self.is_mine:
            raise ConfigError(
                "to do this inside a pass of the same model", "others wait for it", "Do it when the pass is over."
            )
        with DeferredInterrupt() as interrupt:
            with self._changed:
                while self._holder and not unless():
                    self._changed.wait(_PATIENCE)
                    interrupt.deliver()
                mine = not self._holder
                if mine:
                    self._holder = threading.get_ident()
            try:
                yield mine
            finally:
                if mine:
                    with self._changed:
                        self._holder = 0
                        self._changed.notify_all()
