"""Options and messages of several commands: checked values, and progress while a model loads."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from retrieve_spec.config import LoadOptions

EXTRAS = {
    "serve": (
        *("fastapi", "starlette", "uvicorn", "httptools", "pydantic", "prometheus_client", "pygls", "watchfiles"),
        *("httpx", "regex", "llguidance"),
    ),
    "share": ("fsspec",),
    "parquet": ("pyarrow",),
}
"""Modules of optional commands, by the extra that installs them."""


class Text(click.types.StringParamType):
    """Text that can be encoded; a terminal can pass bytes that are not UTF-8."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raise an error for text that is not Unicode."""
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self.fail(f"expected text in UTF-8, got other bytes at character {error.start}.", param, ctx)
        return str(super().convert(value, param, ctx))


class WholeRange(click.IntRange):
    """A range of whole numbers, with this name in messages."""

    name = "whole number"


class Mebibytes(WholeRange):
    """Bytes, given in MiB."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes."""
        return int(super().convert(value, param, ctx)) << 20


FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
"""A file to read."""


class Place(click.Path):
    """A folder, or an address (``s3://…``), unchanged."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return an address unchanged; a path would lose one of its slashes."""
        return value if isinstance(value, str) and "://" in value else super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A range of numbers without infinity and NaN."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raise an error for a number that is not finite, or out of range."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def layer_of(name: str) -> int | str:
    """Return a layer by number or name."""
    return int(name) if name.isdigit() else name


TEXT = Text()
PLACE = Place(path_type=Path)
COUNT = WholeRange(1, 1_000_000)
MODEL_NAMES = "smollm2|reference|PATH|HUB_ID"
MODEL = click.option("--model", default="reference", show_default=True, metavar=MODEL_NAMES, help="The model to run.")
DTYPE = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Number format of the weights; auto is the stored one.",
)
QUANTIZE = click.option(
    "--quantize",
    type=click.Choice(["int8", "int4", "fp8", "nf4"]),
    help="Quantise the weights, once; they are kept in the cache. Activations are bfloat16. fp8 and nf4 are for GPUs.",
)
DEVICE = click.option("--device", default="auto", show_default=True, metavar="D", help="auto, cpu, cuda, cuda:1 …")
_Command = TypeVar("_Command", bound=Callable[..., Any])


def as_record(name: str, default: Any, *options: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Any]:
    """Add options to a command; those that are fields of a dataclass are passed as one argument.

    Parameters
    ----------
    name
        The argument.
    default
        The record without options; an option that is None does not change its field.
    options
        Results of `click.option`, in the order of the help.
    """

    def decorate(command: Callable[..., Any]) -> Any:
        @functools.wraps(command)
        def with_record(**values: Any) -> Any:
            own = {field.name: values.pop(field.name) for field in fields(default) if field.name in values}
            given = {option: value for option, value in own.items() if value is not None}
            return command(**values, **{name: replace(default, **given)})

        return with_options(*options)(with_record)

    return decorate


def with_options(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Add options to a command, in the order of its help."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


LOADING = as_record("loading", LoadOptions(), DTYPE, QUANTIZE, DEVICE)
SEED = WholeRange(-(2**63), 2**64 - 1)  # what `torch.manual_seed` takes


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


@contextlib.contextmanager
def loading_bars(shown: bool = True) -> Iterator[None]:
    """Show transformers' progress bar while models load, if wanted and on a terminal; the setting is restored."""
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
def compiling_shown() -> Iterator[None]:
    """Show which kernels are compiled, and how many so far, if standard error is a terminal.

    The explanation is logged by `kernels/compiled_code.py`.
    """
    from tqdm import tqdm

    from retrieve_spec.kernels.compiled_code import report_compiling

    shown: list[tqdm[Any]] = []

    def tell(name: str) -> None:
        if not shown:
            shown.append(tqdm(desc="compiling", unit=" kernels", disable=None, dynamic_ncols=True, leave=False))
        shown[0].set_postfix_str(name, refresh=False)
        shown[0].update()

    try:
        with report_compiling(tell):
            yield
    finally:
        for bar in shown:
            bar.close()
