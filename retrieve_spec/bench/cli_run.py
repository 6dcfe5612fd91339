"""Commands `retrieve-spec bench run` and `bench report`: a results folder with a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from retrieve_spec.cli_common import COUNT, SEED, FiniteRange, WholeRange

CLI_NAME = "retrieve-spec"


def parse_methods(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """Split the list of methods."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise click.BadParameter("name each method once, separated by commas.")
    return names


@click.command(short_help="Compare methods on prompts, interleaved, and write a report.")
@click.option("--model", default="reference", show_default=True, metavar="reference|PATH|HUB_ID")
@click.option(
    "--prompts",
    default="builtin",
    show_default=True,
    metavar="builtin|FILE.jsonl|spec-bench:PATH",
    help="What to answer: files found on this machine, lines with 'prompt' or 'turns', or Spec-Bench's question.jsonl.",
)
@click.option(
    "--methods",
    callback=parse_methods,
    default="plain,prompt-lookup,off,auto",
    show_default=True,
    metavar="A,B,…",
    help="plain and prompt-lookup[:K] are transformers' own; off, auto and presets, each also with :NODES, are ours;"
    " auto~SOURCE is auto without a source, ours/prompt-lookup the preset.",
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
@click.option(
    "--template",
    type=click.Choice(["auto", "vicuna", "none"]),
    default="auto",
    show_default=True,
    help="How turns are wrapped: the model's chat template, Spec-Bench's Vicuna template, or not at all.",
)
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
@click.option("--device", default="auto", show_default=True, metavar="D")
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
    """Let several methods answer the same prompts in turn (A B C A B C …) and report speed, identity and cost.

    The folder gets report.md, summary.json and the raw results, those of an interrupted run too (`bench report`).
    """
    from retrieve_spec.bench.report import write_report

    as_json = options.pop("as_json")
    folder = run_bench(shlex.join([CLI_NAME, *sys.argv[1:]]), options)
    summary = write_report(folder)
    click.echo(json.dumps(summary) if as_json else (folder / "report.md").read_text(encoding="utf-8"))
    click.echo(f"report: {folder / 'report.md'}", err=True)


@click.command(short_help="Write the report of a results folder anew.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object on the last line.")
def report(folder: Path, as_json: bool) -> None:
    """Write report.md and summary.json from the results in FOLDER, finished or not."""
    from retrieve_spec.bench.report import write_report

    summary = write_report(folder)
    click.echo(json.dumps(summary) if as_json else (folder / "report.md").read_text(encoding="utf-8"))


def run_bench(command: str, options: dict[str, Any]) -> Path:
    """Measure what the options of `bench run` say; return the folder with the results.

    Raises
    ------
    RetrieveSpecError
        Whatever is wrong with the model, the prompts, a method, a store or the folder.
    """
    from transformers.utils import logging

    from retrieve_spec.bench.machine import OtherWork, folder_bytes, machine_facts
    from retrieve_spec.bench.methods import Bench, parse_method
    from retrieve_spec.bench.prompts import read_prompts
    from retrieve_spec.bench.results import ResultsFolder, check_new
    from retrieve_spec.bench.runner import Plan, measure, prompts_digest, warm_up
    from retrieve_spec.datastore.store import open_datastore
    from retrieve_spec.reference_model import load_model

    logging.disable_progress_bar()
    it = SimpleNamespace(**options)
    check_new(it.out)
    chosen = [parse_method(name) for name in it.methods]
    questions = read_prompts(it.prompts, it.limit, it.tasks.split(",") if it.tasks else None)
    plan = Plan(questions, chosen, it.runs, it.state, it.max_new_tokens, it.template, sampled=it.temperature > 0)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if plan.sampled:
        sampling = {"do_sample": True, "temperature": it.temperature, "top_p": it.top_p, "top_k": 0}
    lm, tokenizer = load_model(it.model, dtype=it.dtype, device=it.device)
    datastores = [open_datastore(path, tokenizer=tokenizer) for path in it.stores]
    which = f", {it.tasks} only" if it.tasks else ""
    given = ("model", "state", "runs", "max_new_tokens", "temperature", "top_p", "seed", "template")
    header = {
        "command": command,
        "machine": machine_facts(),
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": str(lm.device),
        "prompts": f"{it.prompts}{which} ({len(questions)} prompts, digest {prompts_digest(questions)})",
        "methods": list(it.methods),
        "stores": {str(path): folder_bytes(path) for path in it.stores},
        **{name: options[name] for name in given},
    }
    bench = Bench(
        lm, tokenizer, chosen, datastores=datastores, session=it.state != "cold", seed=it.seed, options=sampling
    )
    folder = ResultsFolder(it.out, header)  # made only when all options are right
    warm_up(bench, plan)
    others = OtherWork()
    try:
        with _progress(len(questions) * it.runs, it.quiet) as progress:
            measure(bench, plan, folder, progress)
        folder.note(finished=True)
    except KeyboardInterrupt:
        click.echo(f"{folder.answered} answered prompts are kept: `bench report {it.out}` shows them.", err=True)
        raise
    finally:
        curves = {method.name: bench.cost_curve(method) for method in chosen if method.ours}
        folder.note(cost_curves=curves, machine=folder.header["machine"] | {"others": others.cores()})
    return folder.path


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[list[Any]], None]]:
    """A progress bar with the speed of each method so far; call what it yields with the records of each prompt."""
    from tqdm import tqdm

    tokens, seconds = Counter[str](), Counter[str]()
    with tqdm(total=total, unit="prompt", disable=quiet, dynamic_ncols=True) as bar:

        def show(records: list[Any]) -> None:
            for record in records:
                tokens[record.method] += record.new_tokens
                seconds[record.method] += record.seconds
            bar.set_postfix_str(" ".join(f"{name} {tokens[name] / seconds[name]:.0f}/s" for name in tokens))
            bar.update()

        yield show
