"""What several commands share: words of a command line as checked values, and what is said while a model gets ready."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click

SLOW_START_S = 20.0
"""A start from compiled kernels is over by then, also on a busy machine of two cores."""
SLOW_START = "Still getting ready: the first run compiles the kernels, which takes minutes; later runs take seconds."

EXTRAS = {
    "serve": ("starlette", "uvicorn", "pydantic", "sse_starlette", "prometheus_client", "pygls", "watchfiles"),
    "share": ("fsspec",),
    "bench": ("matplotlib", "jinja2"),
    "parquet": ("pyarrow",),
}
"""What the optional commands import, by the name of the extra that brings it."""


class Text(click.types.StringParamType):
    """Text that can be encoded: a terminal can hand over bytes that are not UTF-8."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what is not Unicode."""
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self.fail(f"expected text in UTF-8, got other bytes at character {error.start}.", param, ctx)
        return str(super().convert(value, param, ctx))


class Seed(click.types.IntParamType):
    """A number that `torch.manual_seed` takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Refuse what has more than 64 bits."""
        number = int(super().convert(value, param, ctx))
        if not -(2**63) <= number < 2**64:
            self.fail(f"{value} has more than 64 bits.", param, ctx)
        return number


class FiniteRange(click.FloatRange):
    """A range of numbers without infinity and without NaN, which no comparison leaves out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse what is not finite, then what is out of range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


TEXT = Text()
COUNT = click.IntRange(1, 1_000_000)
SEED = Seed()


def counted(number: int, noun: str) -> str:
    """A number and what it counts: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@contextlib.contextmanager
def loading_bars(shown: bool = True) -> Iterator[None]:
    """Let models load with a progress bar if it is to be shown and somebody watches; the setting stays as it was."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    if not (shown and sys.stderr.isatty()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def explained_wait(after_s: float = SLOW_START_S) -> Iterator[None]:
    """Say on standard error why a start takes long, once it does."""
    timer = threading.Timer(after_s, lambda: click.echo(SLOW_START, err=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
