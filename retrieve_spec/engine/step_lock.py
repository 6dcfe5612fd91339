"""Step lock: one thread at a time takes sequences along; others wait for the end of its step, or for their own news."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from retrieve_spec.engine.deferred_interrupt import DeferredInterrupt
from retrieve_spec.errors import ConfigError

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
