"""Command `retrieve-spec distil`: what a model itself would say, kept beside a store."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrieve_spec.cli_common import LOADING, MODEL, compiling_shown, loading_bars
from retrieve_spec.cli_store import JSON, QUIET
from retrieve_spec.config import LoadOptions
from retrieve_spec.errors import ConfigError

if TYPE_CHECKING:
    from retrieve_spec.distilling import DistilReport


@click.command(short_help="Keep what a model itself would say beside a datastore.")
@click.argument("store", type=click.Path(path_type=Path))
@MODEL
@LOADING
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Prompts to answer, one a line, or JSON Lines with `prompt`; a list of general ones by default.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Text to read before prompts are answered, which is faster than answering.",
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True, help="At most.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Tokens to write and read at most.")
@QUIET
@JSON
def distil(
    store: Path,
    model: str,
    prompts: tuple[Path, ...],
    texts: tuple[Path, ...],
    minutes: float,
    tokens: int | None,
    quiet: bool,
    as_json: bool,
    loading: LoadOptions,
) -> None:
    """Let a model answer prompts, and keep what it says beside the datastore STORE.

    The store is made where there is none. Its documents are the answers; a table of the model's own most probable
    tokens after short contexts lies beside them. Drafts from it are right more often than drafts from other text. A run
    that goes on with an earlier one adds to it, and Ctrl-C ends it with what there is.
    """
    from retrieve_spec import distilling
    from retrieve_spec.reference_model import load_model

    with loading_bars(not quiet):
        loaded, tokenizer = load_model(model, **asdict(loading))
    with compiling_shown():
        report = distilling.distil(
            loaded,
            tokenizer,
            store,
            prompts=None if not prompts else _prompts(prompts),
            texts=(path.read_text(encoding="utf-8", errors="replace") for path in texts),
            max_tokens=math.inf if tokens is None else tokens,
            minutes=minutes,
            on_progress=None if quiet else _show,
        )
    if not quiet:
        click.echo(err=True)
    click.echo(json.dumps(asdict(report)) if as_json else _words(report))


def _prompts(paths: tuple[Path, ...]) -> list[str]:
    """The prompts in some files."""
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if not line.strip():
                continue
            try:
                prompt = json.loads(line)["prompt"] if path.suffix == ".jsonl" else line.strip()
            except (ValueError, LookupError, TypeError):
                prompt = None
            if not isinstance(prompt, str):
                got = f"line {number} of {path}: {line.strip()[:60]}"
                raise ConfigError('JSON Lines with a text as "prompt"', got, "Mend the line, or give plain text.")
            found.append(prompt)
    return found


def _show(report: DistilReport) -> None:
    click.echo(f"\r{_words(report)}", nl=False, err=True)


def _words(report: DistilReport) -> str:
    known = f", {report.contexts:,} contexts" if report.contexts else ""
    return (
        f"{report.answers:,} answers, {report.tokens:,} tokens in {report.seconds:.0f} s "
        f"({report.tokens_per_pass:.2f} tokens per pass){known}"
    )
