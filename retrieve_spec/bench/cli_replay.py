"""Command `retrieve-spec bench replay`: acceptance figures of recorded answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from retrieve_spec.cli_common import FiniteRange, WholeRange
from retrieve_spec.config import MAX_NODES


@click.command(short_help="Replay recorded answers and count tokens per pass.")
@click.argument("trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
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
def replay(trace: Path, tokenizer: str, quiet: bool, as_json: bool, by_task: bool, **options: Any) -> None:
    """Replay the recorded answers of TRACE through a drafter, without the model that wrote them.

    TRACE is JSON Lines with "prompt" and "output" (and "more": [[context, answer], …] for later turns). At each step
    the drafter proposes, the recorded answer decides what is accepted, and one more token follows, as greedy
    verification would. Sources that learn from the model's logits stay empty, so a model gets at least these figures.
    """
    from tqdm import tqdm

    from retrieve_spec.bench.replay import replay_trace

    with tqdm(desc="rows", unit=" rows", disable=quiet or None) as bar:

        def progress(tokens: int, passes: int) -> None:
            bar.update()
            bar.set_postfix_str(f"{tokens / max(passes, 1):.2f} tokens per pass")

        result = replay_trace(trace, tokenizer, **options, progress=progress)
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
