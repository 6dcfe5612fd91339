"""Commands of `retrieve-spec bench`: `run` and `report`, a results folder with a report, and `replay`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from retrieve_spec.cli_common import (
    COUNT,
    FILE,
    LOADING,
    MODEL_NAMES,
    SEED,
    FiniteRange,
    WholeRange,
)
from retrieve_spec.config import MAX_NODES, SpeculationConfig


def parse_methods(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Split a comma-separated list of methods."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise click.BadParameter("name each method once, separated by commas.")
    return names


@click.command(short_help="Compare methods on prompts, interleaved, and write a report.")
@click.option("--model", default="reference", show_default=True, metavar=MODEL_NAMES)
@click.option(
    "--prompts",
    default="builtin",
    show_default=True,
    metavar="builtin|everyday|FILE.jsonl|spec-bench:PATH",
    help="What to answer: files found on this machine, a few everyday questions for chat models, lines with 'prompt' or"
    " 'turns', or Spec-Bench's question.jsonl.",
)
@click.option(
    "--methods",
    callback=parse_methods,
    default="plain,prompt-lookup,off,auto",
    show_default=True,
    metavar="A,B,…",
    help="plain and prompt-lookup[:K] are transformers' own; off, auto and presets (the last two also with :NODES) are"
    " ours; auto~SOURCE is auto without a source, ours/prompt-lookup the preset.",
)
@click.option("--store", "stores", multiple=True, metavar="DIR", help="A datastore to draft from; can be repeated.")
@click.option(
    "--state",
    type=click.Choice(["cold", "session", "shared"]),
    default="cold",
    show_default=True,
    help="What ours remember: nothing, the turns of one conversation, or all prompts of a run.",
)
@click.option("--max-new-tokens", type=COUNT, default=160, show_default=True, metavar="N")
@click.option("--temperature", type=FiniteRange(min=0), default=0.0, show_default=True, metavar="T")
@click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True, metavar="P")
@click.option("--seed", type=SEED, default=0, show_default=True, metavar="S")
@click.option("--runs", type=WholeRange(min=1), default=1, show_default=True, metavar="R", help="Repetitions.")
@click.option("--limit", type=WholeRange(min=1), metavar="N", help="First N prompts; of the built-in ones N a kind.")
@click.option(
    "--tasks",
    metavar="A,B,…",
    help="Only prompts of these tasks; built in are unseen, seen, edit, structured, prose.",
)
@LOADING
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("bench-out"),
    show_default=True,
    metavar="DIR",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object on the last line.")
def run(**options: Any) -> None:
    """Run several methods on the same prompts in turn (A B C A B C …), and report speed, identity and cost.

    The folder gets report.md, summary.json and the raw results; `bench report` also reports interrupted runs.
    """
    from retrieve_spec.bench.runner import RunOptions, run_bench

    folder, as_json, quiet = options.pop("out"), options.pop("as_json"), options.pop("quiet")
    try:
        run_bench(RunOptions(**options), folder, shlex.join(["retrieve-spec", *sys.argv[1:]]), quiet)
    except KeyboardInterrupt:
        click.echo(f"Answered prompts are kept: `bench report {folder}` shows them.", err=True)
        raise
    _show(folder, as_json)
    click.echo(f"report: {folder / 'report.md'}", err=True)


@click.command(short_help="Write the report of a results folder anew.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object on the last line.")
def report(folder: Path, as_json: bool) -> None:
    """Write report.md and summary.json from the results in FOLDER, even of an interrupted run."""
    _show(folder, as_json)


def _show(folder: Path, as_json: bool) -> None:
    from retrieve_spec.bench.report import write_report

    summary = write_report(folder)
    click.echo(json.dumps(summary) if as_json else (folder / "report.md").read_text(encoding="utf-8"))


@click.command(short_help="Replay recorded answers and count tokens per pass.")
@click.argument("trace", type=FILE)
@click.option("--tokenizer", required=True, metavar="PATH|HUB_ID", help="tokenizer.json, a model folder or a hub id.")
@click.option("--draft", default="auto", show_default=True, metavar="auto|PRESET", help="What drafts.")
@click.option(
    "--nodes", type=WholeRange(1, MAX_NODES), default=60, show_default=True, metavar="N", help="Nodes per pass."
)
@click.option(
    "--node-cost",
    type=FiniteRange(min=0.0),
    metavar="C",
    help="A node adds C of a pass without drafts: auto sizes its drafts by it, and the speed-up is reported.",
)
@click.option("--store", "stores", multiple=True, metavar="DIR", help="A datastore to draft from; can be repeated.")
@click.option("--session", is_flag=True, help="Remember the answers of earlier rows and draft from them.")
@click.option(
    "--without", multiple=True, metavar="SOURCE", help="A source that auto does without, to see what it adds."
)
@click.option(
    "--phrases",
    type=click.Choice(["live", "warm"]),
    default="live",
    show_default=True,
    help="Phrases: learned row by row, or known from the other half of the file, which is then not learned from.",
)
@click.option("--by-task", is_flag=True, help="Also report each task.")
@click.option("--limit", type=WholeRange(min=1), metavar="N", help="First N rows of the file.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on the last line.")
def replay(
    trace: Path, tokenizer: str, draft: str, session: bool, quiet: bool, as_json: bool, by_task: bool, **options: Any
) -> None:
    """Replay the recorded answers of TRACE through a drafter, without the model that wrote them.

    TRACE is JSON Lines with "prompt" and "output" (and "more": [[context, answer], …] for later turns). In each pass
    the drafter proposes a tree, the recorded answer decides which tokens are accepted, and one more token follows, as
    in verification. Sources that learn from logits stay empty, so a real model gets at least these figures.
    """
    from tqdm import tqdm

    from retrieve_spec.bench.replay import replay_trace

    with tqdm(desc="rows", unit=" rows", disable=quiet or None) as bar:

        def progress(tokens: int, passes: int) -> None:
            bar.update()
            bar.set_postfix_str(f"{tokens / max(passes, 1):.2f} tokens per pass")

        config = SpeculationConfig(draft=draft, session=session)
        result = replay_trace(trace, tokenizer, config, **options, progress=progress)
    if not by_task:
        del result["by_task"]
    click.echo(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{result['tokens_per_pass']:.3f} tokens per pass (expected {result['expected_tokens_per_pass']:.3f}) over "
        f"{result['tokens']:,} tokens, {result['nodes_per_pass']:.1f} nodes per pass"
    )
    if "speedup" in result:
        yield f"{result['speedup']:.2f} times as fast as one token per pass, by what nodes cost"
    times = {what: result[f"{what}_us"] for what in ("propose", "observe")}
    yield "; ".join(f"{what} {took['p50']:.0f} µs p50, {took['p99']:.0f} µs p99" for what, took in times.items())
    accepted = ", ".join(f"{name} {count:,}" for name, count in result["accepted_by_source"].items())
    yield f"accepted by source: {accepted or 'none'}"
    for task, figures in result.get("by_task", {}).items():
        yield f"  {task or '(no task)'}: {figures['tokens_per_pass']:.3f} over {figures['tokens']:,} tokens"
