"""Demo: a race on the terminal between the bundled model plain, accelerated, and with a datastore."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from retrieve_spec._version import __version__
from retrieve_spec.bench.workloads import Prompt, builtin, loops
from retrieve_spec.cli_common import WholeRange, compiling_shown
from retrieve_spec.demo_screen import MIN_COLUMNS, Mode, Pane, PaneStreamer, Screen
from retrieve_spec.errors import StoreError
from retrieve_spec.paths import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from retrieve_spec.datastore.store import Datastore

WARM_UP_TOKENS = 16
SEEN_FILES = 8
"""Files of the standard library that may be completed; these are not in the store."""


@dataclass(frozen=True, slots=True)
class Runner:
    """One way to complete a prompt: its title, a model, and whether its own `generate` is used or the accelerated."""

    title: str
    model: PreTrainedModel
    accelerated: bool

    def generate(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt,
        options: dict[str, Any],
        streamer: PaneStreamer | None = None,
    ) -> None:
        """Run one generation; the class's own `generate` is the plain one, whatever the instance carries."""
        inputs = tokenizer(prompt.turns[0], return_tensors="pt").to(self.model.device)
        call = self.model.generate if self.accelerated else type(self.model).generate.__get__(self.model)
        call(**inputs, streamer=streamer, **options)


@dataclass(frozen=True, slots=True)
class Result:
    """What one file gave: a pane per runner, the plain one first.

    Attributes
    ----------
    name
        The file.
    panes
        When they were done.
    looping
        Whether the text ends in a loop, which flatters every drafter.
    """

    name: str
    panes: list[Pane]
    looping: bool

    @property
    def identical(self) -> bool:
        """Whether all panes hold the same token ids."""
        return all(pane.token_ids == self.panes[0].token_ids for pane in self.panes)


def race(
    runners: list[Runner],
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    options: dict[str, Any],
    screen: Screen,
) -> Result:
    """Complete one prompt once with every runner."""
    panes = [Pane(runner.title) for runner in runners]
    for index, runner in enumerate(runners):
        runner.generate(tokenizer, prompt, options, PaneStreamer(panes, index, screen))
        panes[index].passes = len(panes[index].token_ids)
        if runner.accelerated:
            report = runner.model.speculation.last
            panes[index].passes, panes[index].accepted = report.passes, dict(report.accepted_by_source)
    screen.finish(panes)
    return Result(prompt.name, panes, loops(tokenizer.decode(panes[0].token_ids)))


def table(results: list[Result]) -> str:
    """The figures of all files as aligned text: tokens per second and, but for the plain one, tokens per pass."""
    head = ["file"]
    for i, pane in enumerate(results[0].panes):
        head += [pane.title] if i == 0 else [pane.title, "per pass"]
    rows = [_row(result.name + (" (loops)" if result.looping else ""), [result]) for result in results]
    lines = [[*head, "identical"], *rows, _row("all files", results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = [_aligned(line, widths) for line in lines]
    rule = "-" * len(shown[0])
    legend = "tokens/s, how many times plain, and tokens per forward pass"
    return "\n".join([shown[0], rule, *shown[1:-1], rule, shown[-1], "", legend, *_credits(results)])


def _credits(results: list[Result]) -> list[str]:
    """One line per accelerated runner: which sources its accepted tokens came from."""
    lines = []
    for panes in list(zip(*(result.panes for result in results), strict=True))[1:]:
        accepted: Counter[str] = Counter()
        for pane in panes:
            accepted.update(pane.accepted)
        by_source = ", ".join(f"{name} {count}" for name, count in accepted.most_common() if count)
        tokens = sum(len(pane.token_ids) for pane in panes)
        lines.append(f"{panes[0].title}: accepted by source: {by_source or 'none'} (of {tokens} generated)")
    return lines


def figures(results: list[Result]) -> dict[str, Any]:
    """The same figures as one JSON object."""
    return {
        "files": [
            {
                "file": result.name,
                "plain_tokens_per_second": result.panes[0].tokens_per_second,
                **_figures_of(result.panes[1], result.panes[0]),
                "with_store": _figures_of(result.panes[2], result.panes[0]) if len(result.panes) > 2 else None,
                "identical": result.identical,
                "looping": result.looping,
            }
            for result in results
        ],
        "identical": all(result.identical for result in results),
    }


def _figures_of(pane: Pane, plain: Pane) -> dict[str, Any]:
    return {
        "tokens_per_second": pane.tokens_per_second,
        "speedup": pane.tokens_per_second / plain.tokens_per_second,
        "tokens_per_pass": len(pane.token_ids) / max(pane.passes, 1),
        "accepted_by_source": pane.accepted,
    }


def _row(name: str, results: list[Result]) -> list[str]:
    columns = list(zip(*(result.panes for result in results), strict=True))
    plain = _rate(columns[0])
    cells = [name, f"{plain:.0f}"]
    for panes in columns[1:]:
        tokens, passes = sum(len(pane.token_ids) for pane in panes), sum(pane.passes for pane in panes)
        cells += [f"{_rate(panes):.0f} ({_rate(panes) / plain:.2f}x)", f"{tokens / max(passes, 1):.2f}"]
    return [*cells, "yes" if all(result.identical for result in results) else "NO"]


def _rate(panes: Sequence[Pane]) -> float:
    return sum(len(pane.token_ids) for pane in panes) / max(sum(pane.seconds for pane in panes), 1e-9)


def _aligned(cells: list[str], widths: list[int]) -> str:
    return cells[0].ljust(widths[0]) + "".join("  " + c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))


def stdlib_store(tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None], progress: bool) -> Datastore | None:
    """The standard library as a datastore, built on first use and kept in the user's cache.

    None where nothing can be written.
    """
    from retrieve_spec.datastore.recipes import load_recipe, open_or_build

    path = cache_dir() / "stores" / f"python-stdlib-{platform.python_version()}-{__version__}"
    completed = [prompt.name.partition(" ")[0] for prompt in builtin(SEEN_FILES, ("seen",))]
    try:
        store = open_or_build(
            path,
            load_recipe("python-stdlib", exclude=completed),
            tokenizer,
            before=lambda: say("Building a datastore of the standard library (once; 15 s on two idle cores) …"),
            after=lambda report: say(f"Built {path} in {sum(report.seconds.values()):.0f} s."),
            progress=progress,
        )
    except StoreError as error:
        say(f"No datastore: {error}")
        return None
    say(f"Datastore: {store.manifest.tokens:,} tokens of the standard library, without the files completed below.")
    return store


def _fits() -> bool:
    return sys.stdout.isatty() and shutil.get_terminal_size().columns >= MIN_COLUMNS


def choose(files: int) -> list[Prompt]:
    """Two unseen files for every one that the model was trained on."""
    seen = builtin(min(files // 3, SEEN_FILES), ("seen",)) if files >= 3 else []
    return builtin(files - len(seen), ("unseen",)) + seen


def runners_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, datastores: Sequence[Datastore]
) -> list[Runner]:
    """Plain and accelerated, and, where there are datastores, accelerated with them."""
    import retrieve_spec as rs
    from retrieve_spec.reference_model import load_model

    rs.accelerate(model, tokenizer=tokenizer)
    runners = [Runner("plain", model, False), Runner("accelerated", model, True)]
    if datastores:
        another, _ = load_model()
        rs.accelerate(another, tokenizer=tokenizer, datastores=datastores)
        runners.append(Runner("with stdlib store", another, True))
    return runners


@click.command()
@click.option("--files", type=WholeRange(min=1), default=6, show_default=True, help="How many files.")
@click.option("--max-new-tokens", type=WholeRange(min=1), default=160, show_default=True)
@click.option(
    "--store/--no-store",
    default=True,
    show_default=True,
    help="Also draft from a datastore of the standard library, built on first use.",
)
@click.option("--json", "as_json", is_flag=True, help="Only print the figures, as one JSON object.")
def main(files: int, max_new_tokens: int, store: bool, as_json: bool) -> None:
    """Complete Python files with the bundled model: plain, accelerated, and with a datastore beside it."""
    import torch
    from transformers.utils import logging

    from retrieve_spec.reference_model import load_model

    logging.disable_progress_bar()
    mode: Mode = "silent" if as_json else "live" if _fits() else "text"

    def say(text: str) -> None:
        if not as_json:
            click.echo(text)

    say("Loading the bundled model (12.6 M parameters, trained on Python) …")
    model, tokenizer = load_model()
    found = stdlib_store(tokenizer, say, not as_json) if store else None
    say("Getting ready: measuring passes; the first run compiles the kernels too …")
    start = time.perf_counter()
    prompts = choose(files)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    with compiling_shown():
        runners = runners_of(model, tokenizer, [found] if found else [])
        for runner in runners:
            runner.generate(tokenizer, prompts[0], {**options, "max_new_tokens": WARM_UP_TOKENS})
    say(f"Ready in {time.perf_counter() - start:.1f} s, {torch.get_num_threads()} threads.")
    results = []
    for index, prompt in enumerate(prompts, 1):
        say(f"\n[{index}/{len(prompts)}] {prompt.name}")
        results.append(race(runners, tokenizer, prompt, options, Screen(tokenizer, mode)))
    click.echo(json.dumps(figures(results)) if as_json else "\n" + table(results))
    sys.exit(0 if all(result.identical for result in results) else 1)


if __name__ == "__main__":
    main()
