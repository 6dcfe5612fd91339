"""Demo: a real model answers everyday questions, plain and accelerated side by side; then a second turn and a store."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from retrieve_spec._version import __version__
from retrieve_spec.bench.workloads import Prompt, builtin, encode, loops, samples
from retrieve_spec.cli_common import MODEL_NAMES, WholeRange, compiling_shown, loading_bars
from retrieve_spec.config import cache_dir
from retrieve_spec.errors import StoreError
from retrieve_spec.model_files import SMOLLM2
from retrieve_spec.reference_model import REFERENCE, load_config_and_tokenizer, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from retrieve_spec.datastore.store import Datastore

WARM_UP_TOKENS = 16
ROWS = 12
"""Lines of text shown of each runner."""
SECOND_TURN = "Now add a docstring of one line to each function."
FOLLOWED = "type hints"
"""Kind of text that the second turn goes on with."""


@dataclass
class Pane:
    """One way to answer a prompt, and what it has written: a transformers streamer, decoded when it is drawn.

    Attributes
    ----------
    title
        How it is called.
    model, accelerated
        The model, and whether its accelerated `generate` is used or that of its class.
    token_ids
        New tokens so far.
    seconds
        Time since the generation began.
    passes
        Forward passes, when it is done.
    """

    title: str
    model: PreTrainedModel
    accelerated: bool
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    _began: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens by time so far."""
        return len(self.token_ids) / max(self.seconds, 1e-9)

    def generate(self, ids: Any, new_tokens: int) -> None:
        """Run one greedy generation; the class's own `generate` is the plain one, whatever the instance carries."""
        call = self.model.generate if self.accelerated else type(self.model).generate.__get__(self.model)
        self._began = time.perf_counter()
        call(ids, attention_mask=ids.new_ones(ids.shape), streamer=self, max_new_tokens=new_tokens, do_sample=False)
        self.passes = self.model.speculation.last.passes if self.accelerated else len(self.token_ids)

    def put(self, value: Any) -> None:
        """Take new token ids; the first call brings the prompt."""
        if self.seconds:
            self.token_ids += value.flatten().tolist()
        self.end()

    def end(self) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self._began

    def panel(self, tokenizer: PreTrainedTokenizerBase) -> Panel:
        """The end of the text under its figures."""
        text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
        lines = text.expandtabs(4).split("\n")[-ROWS:]
        title = f"{self.title}: {len(self.token_ids)} tokens, {self.tokens_per_second:.0f}/s"
        return Panel(Text("\n".join(lines), overflow="fold"), title=title, height=ROWS + 2)


@dataclass(frozen=True, slots=True)
class Result:
    """What one prompt gave: a pane for each way, the plain one first, and the text."""

    name: str
    panes: list[Pane]
    text: str

    @property
    def identical(self) -> bool:
        """Whether all panes hold the same token ids."""
        return all(pane.token_ids == self.panes[0].token_ids for pane in self.panes)

    @property
    def speedup(self) -> float:
        """Tokens per second of the accelerated one, by those of the plain one."""
        return self.panes[1].tokens_per_second / self.panes[0].tokens_per_second


class Race:
    """A model that answers prompts in several ways, side by side on a console.

    Parameters
    ----------
    name
        The model.
    new_tokens
        Tokens of an answer at most.
    datastores
        What the last way drafts from besides; without any there is none.
    """

    def __init__(self, name: str, new_tokens: int, console: Console, datastores: Sequence[Datastore] = ()) -> None:
        import retrieve_spec as rs

        self._new_tokens, self._console = new_tokens, console
        began = time.perf_counter()
        with loading_bars(False), compiling_shown():
            model, self.tokenizer = load_model(name)
            rs.accelerate(model, tokenizer=self.tokenizer)
            self._ways: list[tuple[str, PreTrainedModel, bool]] = [
                ("plain", model, False),
                ("accelerated", model, True),
            ]
            if datastores:
                other, _ = load_model(name)
                rs.accelerate(other, tokenizer=self.tokenizer, datastores=datastores)
                self._ways.append(("with a store", other, True))
            ids = encode(self.tokenizer, samples(self.tokenizer)[0], [])
            for way in self._ways:
                Pane(*way).generate(ids, WARM_UP_TOKENS)
        parameters = f"{model.num_parameters() / 1e6:.0f} M parameters"
        console.print(f"{name}, {parameters}: ready in {time.perf_counter() - began:.1f} s.")

    def answer(self, prompt: Prompt, name: str, answers: Sequence[str] = ()) -> Result:
        """Answer the next turn of a prompt once in every way."""
        asked = prompt.name if prompt.raw else prompt.turns[len(answers)].partition("\n")[0]
        self._console.print(f"\n{name}: {asked}", markup=False)
        ids, panes = encode(self.tokenizer, prompt, answers), [Pane(*way) for way in self._ways]

        def frame() -> Table:
            grid = Table.grid(expand=True)
            for _ in panes:
                grid.add_column(ratio=1)
            grid.add_row(*(pane.panel(self.tokenizer) for pane in panes))
            return grid

        with Live(get_renderable=frame, console=self._console, refresh_per_second=12) as live:
            for pane in panes:
                pane.generate(ids, self._new_tokens)
            live.refresh()
        return Result(name, panes, self.tokenizer.decode(panes[0].token_ids, skip_special_tokens=True))


def table(results: list[Result]) -> Table:
    """The figures of all answers."""
    shown = Table(caption="tokens/s, how many times plain, tokens per forward pass; a text that loops flatters drafts")
    shown.add_column("answer")
    for title in ("plain", "accelerated", "with a store"):
        shown.add_column(title, justify="right")
    shown.add_column("identical")
    for result in results:
        name = result.name + (" (loops)" if loops(result.text) else "")
        cells = [_cell(pane, result.panes[0]) for pane in result.panes]
        shown.add_row(name, *cells, *[""] * (3 - len(cells)), "yes" if result.identical else "NO")
    return shown


def _cell(pane: Pane, plain: Pane) -> str:
    rate = f"{pane.tokens_per_second:.0f}"
    if pane is plain:
        return rate
    return f"{rate} ({pane.tokens_per_second / plain.tokens_per_second:.2f} ×), {len(pane.token_ids) / pane.passes:.2f}"


def said(results: list[Result], number: int) -> str:
    """What the figures mean; the median is of the first answers, a kind of text each."""
    kinds = results[:number]
    slowest = min(kinds, key=lambda result: result.speedup)
    same = sum(result.identical for result in results)
    return (
        f"Median over {number} kinds of text: {median(result.speedup for result in kinds):.2f} × plain generate, from "
        f"{slowest.speedup:.2f} × ({slowest.name}) to {max(result.speedup for result in kinds):.2f} ×.\n"
        f"Identical: {same} of {len(results)}. The accelerated texts have the tokens that transformers' own generate "
        "wrote, one by one: a draft only says where to look, and what the model would not have written is dropped."
    )


def stdlib_store(tokenizer: PreTrainedTokenizerBase, console: Console) -> Datastore | None:
    """The standard library as a datastore, built on first use and kept in the user's cache.

    None where nothing can be written.
    """
    from retrieve_spec.datastore.build import open_or_build
    from retrieve_spec.datastore.sources import load_recipe

    path = cache_dir() / "stores" / f"python-stdlib-{platform.python_version()}-{__version__}"
    try:
        return open_or_build(
            path,
            load_recipe("python-stdlib"),
            tokenizer,
            before=lambda: console.print("\nBuilding a datastore of the standard library (once) …"),
            after=lambda report: console.print(f"Built {path} in {sum(report.seconds.values()):.0f} s."),
            progress=True,
        )
    except StoreError as error:
        console.print(f"No datastore: {error}")
        return None


def chosen(model: str | None, console: Console) -> str:
    """The model that is asked for, or the real one, or the bundled one where that is not installed."""
    if model is not None:
        return model
    if SMOLLM2.installed:
        return SMOLLM2.name
    console.print(
        f"{SMOLLM2.name}, a chat model, is not installed: this is the bundled model of 12.6 M parameters, which "
        f"completes Python, badly. To see the real one:  {SMOLLM2.command}"
    )
    return REFERENCE


@click.command()
@click.option("--model", metavar=MODEL_NAMES, help="The model that answers.  [default: smollm2 if it is installed]")
@click.option("--max-new-tokens", type=WholeRange(min=1), default=64, show_default=True)
@click.option(
    "--store/--no-store",
    default=True,
    show_default=True,
    help="Also complete a file with a datastore of the standard library, built on first use.",
)
def main(model: str | None, max_new_tokens: int, store: bool) -> None:
    """Let a model answer prompts of several kinds, plain and accelerated, and one of them in a second turn.

    Then the small code model completes a Python file, also with a datastore beside it.
    """
    console = Console(highlight=False)
    name = chosen(model, console)
    console.print("Getting ready; the first run on a machine compiles the kernels …")
    race = Race(name, max_new_tokens, console)
    prompts = samples(race.tokenizer)
    results = [race.answer(prompt, prompt.task) for prompt in prompts]
    for prompt, result in zip(prompts, results[:], strict=True):
        if prompt.task == FOLLOWED:
            both = replace(prompt, turns=(*prompt.turns, SECOND_TURN))
            results.append(race.answer(both, f"{prompt.task}, second turn", [result.text]))
    found = stdlib_store(load_config_and_tokenizer(REFERENCE)[1], console) if store else None
    small = Race(REFERENCE, max_new_tokens, console, [found] if found else [])
    results.append(small.answer(builtin(1, ("unseen",))[0], "a Python file, small model"))
    console.print("", table(results), said(results, len(prompts)), sep="\n")
    sys.exit(0 if all(result.identical for result in results) else 1)


if __name__ == "__main__":
    main()
