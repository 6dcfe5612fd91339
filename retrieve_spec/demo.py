"""Demo: a race on the terminal between the bundled model plain, accelerated, and with a datastore."""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from retrieve_spec._version import __version__
from retrieve_spec.bench.workloads import Prompt, builtin, loops
from retrieve_spec.cli_common import WholeRange, compiling_shown
from retrieve_spec.config import cache_dir
from retrieve_spec.errors import StoreError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from retrieve_spec.datastore.store import Datastore

WARM_UP_TOKENS = 16
ROWS = 12
"""Lines of text shown of each runner."""
SEEN_FILES = 8
"""Files of the standard library that may be completed; these are not in the store."""


@dataclass
class Pane:
    """What one runner has generated for one file: a transformers streamer, whose text is decoded when it is drawn.

    Attributes
    ----------
    title
        Name of the runner.
    token_ids
        New tokens so far.
    seconds
        Time since the generation began.
    passes, accepted
        Forward passes and accepted draft tokens by source, when it is done.
    began
        When the generation began.
    """

    title: str
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    began: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens by time so far."""
        return len(self.token_ids) / max(self.seconds, 1e-9)

    def put(self, value: Any) -> None:
        """Take new token ids; the first call brings the prompt."""
        if self.seconds:
            self.token_ids += value.flatten().tolist()
        self.end()

    def end(self) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self.began

    def panel(self, tokenizer: PreTrainedTokenizerBase) -> Panel:
        """The end of the text under its figures."""
        text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
        lines = text.expandtabs(4).split("\n")[-ROWS:]
        title = f"{self.title}: {len(self.token_ids)} tokens, {self.tokens_per_second:.0f}/s"
        return Panel(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), title=title, height=ROWS + 2)


@dataclass(frozen=True, slots=True)
class Runner:
    """One way to complete a prompt: its title, a model, and whether its own `generate` is used or the accelerated."""

    title: str
    model: PreTrainedModel
    accelerated: bool

    def generate(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, new_tokens: int, streamer: Any) -> None:
        """Run one greedy generation; the class's own `generate` is the plain one, whatever the instance carries."""
        inputs = tokenizer(prompt.turns[0], return_tensors="pt").to(self.model.device)
        call = self.model.generate if self.accelerated else type(self.model).generate.__get__(self.model)
        call(**inputs, streamer=streamer, max_new_tokens=new_tokens, do_sample=False)


@dataclass(frozen=True, slots=True)
class Result:
    """What one file gave: a pane per runner, the plain one first; `looping` texts flatter every drafter."""

    name: str
    panes: list[Pane]
    looping: bool

    @property
    def identical(self) -> bool:
        """Whether all panes hold the same token ids."""
        return all(pane.token_ids == self.panes[0].token_ids for pane in self.panes)


def race(
    runners: list[Runner], tokenizer: PreTrainedTokenizerBase, prompt: Prompt, new_tokens: int, console: Console
) -> Result:
    """Complete one prompt once with every runner."""
    panes = [Pane(runner.title) for runner in runners]

    def frame() -> Table:
        grid = Table.grid(expand=True)
        for _ in panes:
            grid.add_column(ratio=1)
        grid.add_row(*(pane.panel(tokenizer) for pane in panes))
        return grid

    with Live(get_renderable=frame, console=console, refresh_per_second=12) as live:
        for runner, pane in zip(runners, panes, strict=True):
            pane.began = time.perf_counter()
            runner.generate(tokenizer, prompt, new_tokens, pane)
            pane.passes = len(pane.token_ids)
            if runner.accelerated:
                report = runner.model.speculation.last
                pane.passes, pane.accepted = report.passes, dict(report.accepted_by_source)
        live.refresh()
    return Result(prompt.name, panes, loops(tokenizer.decode(panes[0].token_ids)))


def table(results: list[Result]) -> Table:
    """The figures of all files: tokens per second, how many times plain, and tokens per pass."""
    shown = Table(caption="tokens/s, how many times plain, and tokens per forward pass")
    shown.add_column("file")
    for pane in results[0].panes:
        shown.add_column(pane.title, justify="right")
    shown.add_column("identical")
    for result in results:
        shown.add_row(*_row(result.name + (" (loops)" if result.looping else ""), [result]))
    shown.add_section()
    shown.add_row(*_row("all files", results))
    return shown


def _row(name: str, results: list[Result]) -> list[str]:
    cells = [name]
    plain = 0.0
    for panes in zip(*(result.panes for result in results), strict=True):
        tokens, passes = sum(len(pane.token_ids) for pane in panes), sum(pane.passes for pane in panes)
        rate = tokens / max(sum(pane.seconds for pane in panes), 1e-9)
        plain = plain or rate
        cells.append(f"{rate:.0f} ({rate / plain:.2f} ×), {tokens / max(passes, 1):.2f}")
    return [*cells, "yes" if all(result.identical for result in results) else "NO"]


def credits(panes: Sequence[Pane]) -> str:
    """Which sources the accepted tokens of a runner came from."""
    accepted = sum((Counter(pane.accepted) for pane in panes), Counter[str]())
    by_source = ", ".join(f"{name} {count}" for name, count in accepted.most_common())
    tokens = sum(len(pane.token_ids) for pane in panes)
    return f"{panes[0].title}: accepted by source: {by_source or 'none'} (of {tokens} generated)"


def stdlib_store(tokenizer: PreTrainedTokenizerBase, console: Console) -> Datastore | None:
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
            before=lambda: console.print("Building a datastore of the standard library (once) …"),
            after=lambda report: console.print(f"Built {path} in {sum(report.seconds.values()):.0f} s."),
            progress=True,
        )
    except StoreError as error:
        console.print(f"No datastore: {error}")
        return None
    tokens = f"{store.manifest.tokens:,} tokens"
    console.print(f"Datastore: {tokens} of the standard library, without the files completed below.")
    return store


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
def main(files: int, max_new_tokens: int, store: bool) -> None:
    """Complete Python files with the bundled model: plain, accelerated, and with a datastore beside it."""
    import torch
    from transformers.utils import logging

    from retrieve_spec.reference_model import load_model

    logging.disable_progress_bar()
    console = Console(highlight=False)
    console.print("Loading the bundled model (12.6 M parameters, trained on Python) …")
    model, tokenizer = load_model()
    found = stdlib_store(tokenizer, console) if store else None
    console.print("Getting ready: measuring passes; the first run compiles the kernels too …")
    start = time.perf_counter()
    prompts = choose(files)
    with compiling_shown():
        runners = runners_of(model, tokenizer, [found] if found else [])
        for runner in runners:
            runner.generate(tokenizer, prompts[0], WARM_UP_TOKENS, None)
    console.print(f"Ready in {time.perf_counter() - start:.1f} s, {torch.get_num_threads()} threads.")
    results = []
    for index, prompt in enumerate(prompts, 1):
        console.print(f"\n\\[{index}/{len(prompts)}] {prompt.name}")
        results.append(race(runners, tokenizer, prompt, max_new_tokens, console))
    console.print(table(results))
    _, *accelerated = zip(*(result.panes for result in results), strict=True)
    console.print(*map(credits, accelerated), sep="\n")
    sys.exit(0 if all(result.identical for result in results) else 1)


if __name__ == "__main__":
    main()
