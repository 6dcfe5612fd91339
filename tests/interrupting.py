"""Ctrl-C as a terminal sends it: SIGINT to this process, now or at the n-th line that the library runs."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import retrieve_spec as rs

PACKAGE = str(Path(rs.__file__).parent)


def ctrl_c(*_given: Any, **_named: Any) -> None:
    """Interrupt this process; whatever it is called with."""
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def python_handles_it() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, as it does in a terminal; a suite in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class CtrlCAt:
    """Ctrl-C at the n-th line that is run in the library and in caches, or at none of them.

    Signals are handled where Python calls or jumps back, not between any two lines: the end of a call is left out.
    """

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def __enter__(self) -> CtrlCAt:
        self._before = sys.gettrace()
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(python_handles_it())
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: Any) -> None:
        sys.settrace(self._before)
        self._signals.close()

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        traced = name.startswith(PACKAGE) or name.endswith("cache_utils.py")
        return self._line if traced and frame.f_code.co_name != "leave" else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and self.left > 0:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                ctrl_c()
        return self._line
