"""Commands `retrieve-spec bench run` and `bench report`: a results folder with a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
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
@click.option("--resume", is_flag=True, help="Go on with an interrupted run in --out.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object on the last line.")
def run(**options: Any) -> None:
    """Let several methods answer the same prompts in turn (A B C A B C …) and report speed, identity and cost.

    Everything measured is kept when interrupted; --resume goes on. The folder gets report.html, report.md,
    summary.json, the raw results, and for Spec-Bench's questions the answer files its own scripts read.
    """
    from retrieve_spec.bench.report import check_extra, write_report

    check_extra()
    as_json = options.pop("as_json")
    folder = run_bench(command=shlex.join([CLI_NAME, *sys.argv[1:]]), **options)
    summary = write_report(folder)
    click.echo(json.dumps(summary) if as_json else (folder / "report.md").read_text(encoding="utf-8"))
    click.echo(f"report: {folder / 'report.html'}", err=True)


@click.command(short_help="Write the report of a results folder anew.")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object on the last line.")
def report(folder: Path, as_json: bool) -> None:
    """Write report.html, report.md and summary.json from the results in FOLDER, finished or not."""
    from retrieve_spec.bench.report import write_report

    summary = write_report(folder)
    click.echo(json.dumps(summary) if as_json else (folder / "report.md").read_text(encoding="utf-8"))


def run_bench(
    model: str,
    prompts: str,
    methods: Sequence[str],
    *,
    stores: Sequence[str] = (),
    state: Any = "cold",
    max_new_tokens: int = 160,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    runs: int = 1,
    limit: int | None = None,
    tasks: str | None = None,
    template: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    out: Path = Path("bench-out"),
    resume: bool = False,
    quiet: bool = True,
    command: str = "",
) -> Path:
    """Measure; return the folder with the results.

    Raises
    ------
    RetrieveSpecError
        Whatever is wrong with the model, the prompts, a method, a store or the folder.
    """
    from transformers.utils import logging

    from retrieve_spec.bench.machine import OtherWork, folder_bytes, machine_facts
    from retrieve_spec.bench.methods import Bench, parse_method
    from retrieve_spec.bench.prompts import read_prompts
    from retrieve_spec.bench.results import ResultsFolder
    from retrieve_spec.bench.runner import Plan, measure, prompts_digest, warm_up
    from retrieve_spec.datastore.store import open_datastore
    from retrieve_spec.reference_model import load_model

    logging.disable_progress_bar()
    chosen = [parse_method(name) for name in methods]
    questions = read_prompts(prompts, limit, tasks.split(",") if tasks else None)
    plan = Plan(questions, chosen, runs, state, max_new_tokens, template, sampled=temperature > 0)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    lm, tokenizer = load_model(model, dtype=dtype, device=device)
    datastores = [open_datastore(path, tokenizer=tokenizer) for path in stores]
    which = f", {tasks} only" if tasks else ""
    header = {
        "command": command,
        "machine": machine_facts(),
        "model": model,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": str(lm.device),
        "prompts": f"{prompts}{which} ({len(questions)} prompts, digest {prompts_digest(questions)})",
        "methods": list(methods),
        "stores": {str(path): folder_bytes(path) for path in stores},
        "state": state,
        "runs": runs,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "template": template,
    }
    bench = Bench(lm, tokenizer, chosen, datastores=datastores, session=state != "cold", seed=seed, options=sampling)
    folder = ResultsFolder(out, header, resume=resume)  # made only when all options are right
    warm_up(bench, plan)
    others = OtherWork()
    try:
        with Progress(len(questions) * runs, len(folder.done()), quiet) as progress:
            measure(bench, plan, folder, progress)
        folder.note("finished", True)
    except KeyboardInterrupt:
        click.echo(
            f"{len(folder.done())} answered prompts are kept; --resume goes on, `bench report {out}` shows them.",
            err=True,
        )
        raise
    finally:
        folder.note("cost_curves", {method.name: bench.cost_curve(method) for method in chosen if method.ours})
        folder.note_others(others.cores())
    return folder.path


class Progress:
    """A progress bar with time left and the speed of each method so far."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, initial=done, unit="prompt", disable=quiet, dynamic_ncols=True)
        self.sums: dict[str, list[float]] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def __call__(self, records: list[Any]) -> None:
        """Show one more prompt."""
        for record in records:
            sums = self.sums.setdefault(record.method, [0.0, 0.0])
            sums[0] += record.new_tokens
            sums[1] += record.seconds
        self.bar.set_postfix_str(" ".join(f"{name} {n / s:.0f}/s" for name, (n, s) in self.sums.items() if s))
        self.bar.update()
