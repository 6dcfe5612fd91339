"""Progress of a change: bars on a terminal, and seconds for each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Advance = Callable[[float], object]
"""Told of units of work that are done."""


@contextmanager
def progress_bar(name: str, total: int | None, unit: str, shown: bool) -> Iterator[Advance]:
    """Show a bar with amount and time left, where standard error is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.completed:,.0f}} {unit}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        yield partial(progress.advance, progress.add_task(name, total=total))


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
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        """Time a stage and show how far it is."""
        started = time.perf_counter()
        with progress_bar(name, total, unit, self.bars) as advance:
            yield advance
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
