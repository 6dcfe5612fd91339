"""Command `retrieve-spec distil`: a model's own answers and next tokens as a datastore."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieve_spec.cli_common import FILE, LOADING, MODEL, compiling_shown, counted, loading_bars
from retrieve_spec.cli_serve import need_extra
from retrieve_spec.cli_store import JSON, QUIET
from retrieve_spec.config import LoadOptions

if TYPE_CHECKING:
    from retrieve_spec.distilling import DistilReport


@click.command(short_help="Keep what a model itself would say in a datastore.")
@click.argument("store", type=click.Path(path_type=Path))
@MODEL
@LOADING
@click.option(
    "--prompts",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="Prompts to answer, one per line, or JSON Lines with `prompt` or `turns`; by default general ones.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="Text to read before prompts are answered, which is faster than answering.",
)
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True, help="Limit of the time."
)
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Limit of the tokens to write and read.")
@click.option(
    "--connect",
    metavar="URL",
    help="Ask the model of this server (vLLM, llama.cpp, retrieve-spec serve); --model is its tokenizer then.",
)
@click.option("--api-key-file", "key_file", type=FILE, metavar="F", help="Key for --connect, on its first line.")
@QUIET
@JSON
def distil(
    store: Path,
    model: str,
    prompts: tuple[Path, ...],
    texts: tuple[Path, ...],
    minutes: float,
    tokens: int | None,
    connect: str | None,
    key_file: Path | None,
    quiet: bool,
    as_json: bool,
    loading: LoadOptions,
) -> None:
    """Let a model answer prompts, and keep its answers and next tokens in the datastore STORE.

    The store is created if needed. The answers become its documents, and a table lists the model's most probable tokens
    after short contexts. Drafts from it are right more often than drafts from other text. A later run adds to it.
    What was done is saved every five minutes and at the end, also when Ctrl-C ends it.
    """
    from tqdm import tqdm

    from retrieve_spec import distilling

    teacher, tokenizer = _loaded(model, loading, quiet) if connect is None else _served(model, connect, key_file)
    with compiling_shown(), tqdm(bar_format="{desc}", disable=quiet or None, leave=False) as line:
        report = distilling.distil(
            teacher,
            tokenizer,
            store,
            prompts=None if not prompts else _prompts(prompts),
            texts=(path.read_text(encoding="utf-8", errors="replace") for path in texts),
            max_tokens=math.inf if tokens is None else tokens,
            minutes=minutes,
            on_progress=lambda so_far: line.set_description_str(_words(so_far)),
        )
    click.echo(json.dumps(asdict(report)) if as_json else _words(report))


def _loaded(model: str, loading: LoadOptions, quiet: bool) -> tuple[Any, Any]:
    from retrieve_spec.reference_model import load_model

    with loading_bars(not quiet):
        return load_model(model, **asdict(loading))


def _served(model: str, url: str, key_file: Path | None) -> tuple[Any, Any]:
    need_extra()
    from retrieve_spec.reference_model import load_config_and_tokenizer
    from retrieve_spec.server.editors import Remote
    from retrieve_spec.server.guard import client_key
    from retrieve_spec.server.served_model import ServedModel

    tokenizer = load_config_and_tokenizer(model)[1]
    return ServedModel(Remote(url, client_key(key_file)), tokenizer, model), tokenizer


def _prompts(paths: tuple[Path, ...]) -> list[str]:
    """Return the prompts in some files; of a conversation, its first turn."""
    from retrieve_spec.bench.workloads import read_prompts

    found: list[str] = []
    for path in paths:
        if path.suffix == ".jsonl":
            found += [prompt.turns[0] for prompt in read_prompts(str(path))]
        else:
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            found += [line.strip() for line in lines if line.strip()]
    return found


def _words(report: DistilReport) -> str:
    if not report.tokens:
        return f"asked what follows each of {report.asked:,} tokens in {report.seconds:.0f} s"
    known = f", {report.contexts:,} contexts" if report.contexts else ""
    return (
        f"{counted(report.answers, 'answer')}, {counted(report.tokens, 'token')} in {report.seconds:.0f} s "
        f"({report.tokens_per_pass:.2f} tokens per pass){known}"
    )
