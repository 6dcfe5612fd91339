"""Progress of a build: bars on a terminal, and seconds for each stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm


class Bar(Protocol):
    """What a stage tells of its progress."""

    def update(self, n: float) -> object:
        """Report n more units of work."""

    def set_postfix_str(self, s: str, refresh: bool) -> object:
        """Set the text at the end of the bar."""


class _Silent:
    def update(self, n: float) -> None:
        pass

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        pass


@contextmanager
def progress_bar(name: str, total: int | None, unit: str, shown: bool) -> Iterator[Bar]:
    """Show a bar with amount, rate and time left, where standard error is a terminal.

    A bar that is not shown is no `tqdm` at all: even a disabled one takes a lock that processes share, and a process
    killed while it holds that lock would stop all others.
    """
    if not (shown and sys.stderr.isatty()):
        yield _Silent()
        return
    with tqdm(total=total, unit=unit, unit_scale=True, desc=name, dynamic_ncols=True) as bar:
        yield bar


class Stopwatch:
    """Wall time by stage, with a progress bar per stage when asked for.

    Parameters
    ----------
    bars
        Show bars on standard error.
    """

    def __init__(self, bars: bool) -> None:
        self.bars = bars
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Bar]:
        """Time a stage and show how far it is."""
        started = time.perf_counter()
        with progress_bar(name, total, unit, self.bars) as bar:
            yield bar
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
