"""Turns real Python files into a race on the terminal: the bundled model, plain and accelerated, side by side."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from retrieve_spec._version import __version__
from retrieve_spec.bench.workloads import Prompt, builtin, loops
from retrieve_spec.errors import StoreError, TokenizerMismatchError
from retrieve_spec.paths import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from retrieve_spec.datastore.store import Datastore

Mode = Literal["live", "text", "silent"]
ROWS = 12
MIN_COLUMNS = 80
SECONDS_PER_FRAME = 0.05
WARM_UP_TOKENS = 16


@dataclass
class Pane:
    """One column of the race: what has been generated, and when.

    Attributes
    ----------
    title
        Shown above the text.
    token_ids
        New tokens so far.
    seconds
        Time since the generation began.
    """

    title: str
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens by time so far."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def lines(self, tokenizer: PreTrainedTokenizerBase, width: int, rows: int) -> list[str]:
        """The last rows of the text, wrapped to the width and padded."""
        text = tokenizer.decode(self.token_ids, skip_special_tokens=True).expandtabs(4)
        wrapped = [line[i : i + width] for line in text.split("\n") for i in range(0, max(len(line), 1), width)]
        shown = wrapped[-rows:] + [""] * (rows - len(wrapped))
        return ["".join(c if c.isprintable() else " " for c in line).ljust(width) for line in shown]


class Screen:
    """Draws two panes over their last frame (`live`), or prints them when they are done (`text`), or neither."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: Mode) -> None:
        self.tokenizer = tokenizer
        self.mode = mode
        self.drawn = False

    def draw(self, panes: list[Pane]) -> None:
        """Draw one frame."""
        if self.mode != "live":
            return
        width = (min(shutil.get_terminal_size().columns, 160) - 3) // 2
        heads = [f"{p.title}  {len(p.token_ids):4d} tokens  {p.tokens_per_second:5.0f} tokens/s"[:width] for p in panes]
        bodies = [pane.lines(self.tokenizer, width, ROWS) for pane in panes]
        frame = [" │ ".join(click.style(head.ljust(width), bold=True) for head in heads)]
        frame += [" │ ".join(row) for row in zip(*bodies, strict=True)]
        up = f"\x1b[{len(frame)}A" if self.drawn else ""
        click.echo(up + "\n".join(f"\x1b[2K{row}" for row in frame))
        self.drawn = True

    def finish(self, panes: list[Pane]) -> None:
        """Draw the last frame, or print both texts one below the other."""
        self.draw(panes)
        if self.mode == "text":
            for pane in panes:
                click.echo(f"--- {pane.title}: {len(pane.token_ids)} tokens, {pane.tokens_per_second:.0f} tokens/s")
                click.echo(self.tokenizer.decode(pane.token_ids, skip_special_tokens=True))
        self.drawn = False


class PaneStreamer:
    """A transformers streamer that fills a pane and redraws now and then."""

    def __init__(self, panes: list[Pane], index: int, screen: Screen) -> None:
        self.panes, self.pane, self.screen = panes, panes[index], screen
        self.prompt_seen = False
        self.begin = self.last_frame = time.perf_counter()

    def put(self, value: Any) -> None:
        """Take new token ids; the first call brings the prompt."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.pane.token_ids += value.flatten().tolist()
        now = time.perf_counter()
        if now - self.last_frame >= SECONDS_PER_FRAME:
            self.pane.seconds = now - self.begin
            self.screen.draw(self.panes)
            self.last_frame = now

    def end(self) -> None:
        """Stop the clock."""
        self.pane.seconds = time.perf_counter() - self.begin


@dataclass(frozen=True, slots=True)
class Result:
    """What one file gave.

    Attributes
    ----------
    name
        The file.
    plain, accelerated
        The two panes when they were done.
    identical
        Whether both hold the same token ids.
    tokens_per_pass
        Mean tokens that a forward pass yielded.
    passes
        Forward passes of the accelerated run.
    accepted_by_source
        Accepted draft tokens by source.
    looping
        Whether the text ends in a loop, which flatters every drafter.
    """

    name: str
    plain: Pane
    accelerated: Pane
    identical: bool
    tokens_per_pass: float
    passes: int
    accepted_by_source: dict[str, int]
    looping: bool


def race(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: dict[str, Any], screen: Screen
) -> Result:
    """Complete one prompt twice: transformers' own `generate`, then ours."""
    panes = [Pane("plain"), Pane("accelerated")]
    generate(model, tokenizer, prompt, options, PaneStreamer(panes, 0, screen), accelerated=False)
    generate(model, tokenizer, prompt, options, PaneStreamer(panes, 1, screen), accelerated=True)
    screen.finish(panes)
    report = model.speculation.last
    return Result(
        name=prompt.name,
        plain=panes[0],
        accelerated=panes[1],
        identical=panes[0].token_ids == panes[1].token_ids,
        tokens_per_pass=report.tokens_per_pass,
        passes=report.passes,
        accepted_by_source=dict(report.accepted_by_source),
        looping=loops(tokenizer.decode(panes[1].token_ids)),
    )


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    options: dict[str, Any],
    streamer: PaneStreamer | None,
    *,
    accelerated: bool,
) -> None:
    """Run one generation; the class's own `generate` is the plain one, whatever the instance carries."""
    inputs = tokenizer(prompt.turns[0], return_tensors="pt").to(model.device)
    call = model.generate if accelerated else type(model).generate.__get__(model)
    call(**inputs, streamer=streamer, **options)


def table(results: list[Result]) -> str:
    """The figures of all files as aligned text."""
    head = ("file", "plain tok/s", "accelerated", "speed-up", "tokens/pass", "identical")
    rows = [_row(result.name + (" (loops)" if result.looping else ""), [result]) for result in results]
    total = _row("all files", results)
    widths = [max(len(row[i]) for row in [head, *rows, total]) for i in range(len(head))]
    lines = [_aligned(row, widths) for row in (head, *rows)]
    rule = "-" * len(lines[0])
    accepted: dict[str, int] = {}
    for result in results:
        for name, count in result.accepted_by_source.items():
            accepted[name] = accepted.get(name, 0) + count
    by_source = ", ".join(f"{name} {count}" for name, count in sorted(accepted.items(), key=lambda x: -x[1]) if count)
    tokens = sum(len(result.accelerated.token_ids) for result in results)
    credit = f"accepted tokens by source: {by_source or 'none'} (of {tokens} generated)"
    return "\n".join([lines[0], rule, *lines[1:], rule, _aligned(total, widths), "", credit])


def figures(results: list[Result]) -> dict[str, Any]:
    """The same figures as one JSON object."""
    return {
        "files": [
            {
                "file": result.name,
                "plain_tokens_per_second": result.plain.tokens_per_second,
                "tokens_per_second": result.accelerated.tokens_per_second,
                "speedup": result.accelerated.tokens_per_second / result.plain.tokens_per_second,
                "tokens_per_pass": result.tokens_per_pass,
                "accepted_by_source": result.accepted_by_source,
                "identical": result.identical,
                "looping": result.looping,
            }
            for result in results
        ],
        "identical": all(result.identical for result in results),
    }


def _row(name: str, results: list[Result]) -> tuple[str, ...]:
    plain = _rate([result.plain for result in results])
    fast = _rate([result.accelerated for result in results])
    tokens = sum(len(result.accelerated.token_ids) for result in results)
    passes = sum(result.passes for result in results)
    same = "yes" if all(result.identical for result in results) else "NO"
    return name, f"{plain:.0f}", f"{fast:.0f}", f"{fast / plain:.2f}x", f"{tokens / max(passes, 1):.2f}", same


def _rate(panes: list[Pane]) -> float:
    return sum(len(pane.token_ids) for pane in panes) / max(sum(pane.seconds for pane in panes), 1e-9)


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    return cells[0].ljust(widths[0]) + "".join("  " + c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))


def stdlib_store(tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> list[Datastore]:
    """The standard library as a datastore, built on first use and kept in the user's cache.

    Empty where the recipe did not come along (an installation without the repository) or nothing can be written.
    """
    from retrieve_spec.datastore.build import build_datastore
    from retrieve_spec.datastore.recipes import load_recipe
    from retrieve_spec.datastore.store import open_datastore

    recipe = Path(__file__).resolve().parent.parent / "datastores" / "python-stdlib.toml"
    if not recipe.exists():
        return []
    path = cache_dir() / "stores" / f"python-stdlib-{platform.python_version()}-{__version__}"
    try:
        return [open_datastore(path, tokenizer=tokenizer)]
    except (StoreError, TokenizerMismatchError):
        shutil.rmtree(path, ignore_errors=True)  # absent, cut off or of another version: made again
    say(f"Building a datastore of the standard library in {path} (once, about ten seconds) …")
    try:
        loaded = load_recipe(recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        build_datastore(path, list(loaded.sources), tokenizer, config=loaded.config, recipe=loaded.name)
        return [open_datastore(path, tokenizer=tokenizer)]
    except (StoreError, OSError) as error:
        say(f"Going on without it: {error}")
        return []


def _fits() -> bool:
    return sys.stdout.isatty() and shutil.get_terminal_size().columns >= MIN_COLUMNS


def choose(files: int) -> list[Prompt]:
    """Two unseen files for every one that the model was trained on."""
    seen = builtin(files // 3, ("seen",)) if files >= 3 else []
    return builtin(files - len(seen), ("unseen",)) + seen


@click.command()
@click.option("--files", type=click.IntRange(min=1), default=6, show_default=True, help="How many files.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=160, show_default=True)
@click.option("--store/--no-store", default=False, show_default=True, help="Draft from the standard library too.")
@click.option("--json", "as_json", is_flag=True, help="Only print the figures, as one JSON object.")
def main(files: int, max_new_tokens: int, store: bool, as_json: bool) -> None:
    """Complete Python files with the bundled model, plain and accelerated, and compare."""
    import torch
    from transformers.utils import logging

    import retrieve_spec as rs
    from retrieve_spec.reference_model import load_model

    logging.disable_progress_bar()
    mode: Mode = "silent" if as_json else "live" if _fits() else "text"

    def say(text: str) -> None:
        if not as_json:
            click.echo(text)

    say("Loading the bundled model (12.6 M parameters, trained on Python) …")
    start = time.perf_counter()
    model, tokenizer = load_model()
    loaded = time.perf_counter()
    datastores = stdlib_store(tokenizer, say) if store else []
    built = time.perf_counter()
    rs.accelerate(model, tokenizer=tokenizer, datastores=datastores)
    prompts = choose(files)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    for accelerated in (False, True):
        generate(
            model, tokenizer, prompts[0], {**options, "max_new_tokens": WARM_UP_TOKENS}, None, accelerated=accelerated
        )
    prepared = time.perf_counter()
    threads = torch.get_num_threads()
    say(f"Loaded in {loaded - start:.1f} s, prepared in {prepared - built:.1f} s, {threads} threads.")
    results = []
    for index, prompt in enumerate(prompts, 1):
        say(f"\n[{index}/{len(prompts)}] {prompt.name}")
        results.append(race(model, tokenizer, prompt, options, Screen(tokenizer, mode)))
    click.echo(json.dumps(figures(results)) if as_json else "\n" + table(results))
    sys.exit(0 if all(result.identical for result in results) else 1)


if __name__ == "__main__":
    main()
