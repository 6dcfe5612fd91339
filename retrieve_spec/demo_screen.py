"""Screen of the demo: panes of growing text, drawn as frames on a terminal."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Mode = Literal["live", "text", "silent"]
ROWS = 12
MIN_COLUMNS = 80
MAX_COLUMNS = 200
PANE_COLUMNS = 38
"""Narrowest pane; where not all fit side by side, the plain one and the one that is running are shown."""
SECONDS_PER_FRAME = 0.05


@dataclass
class Pane:
    """One column of the race: what has been generated, and how.

    Attributes
    ----------
    title
        Shown above the text.
    token_ids
        New tokens so far.
    seconds
        Time since the generation began.
    passes
        Forward passes it took, when it is done.
    accepted
        Accepted draft tokens by source.
    """

    title: str
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    accepted: dict[str, int] = field(default_factory=dict)

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
    """Draws panes over their last frame (`live`), or prints them when they are done (`text`), or neither."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: Mode) -> None:
        self.tokenizer = tokenizer
        self.mode = mode
        self.drawn = False

    def draw(self, panes: list[Pane], current: int) -> None:
        """Draw one frame; `current` is the pane that is being written."""
        if self.mode != "live":
            return
        columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
        if columns < len(panes) * (PANE_COLUMNS + 3):
            panes = [panes[0], panes[max(current, 1)]]
        width = (columns - 3 * (len(panes) - 1)) // len(panes)
        heads = [f"{p.title}  {len(p.token_ids):4d} tokens  {p.tokens_per_second:5.0f}/s"[:width] for p in panes]
        bodies = [pane.lines(self.tokenizer, width, ROWS) for pane in panes]
        frame = [" │ ".join(click.style(head.ljust(width), bold=True) for head in heads)]
        frame += [" │ ".join(row) for row in zip(*bodies, strict=True)]
        up = f"\x1b[{len(frame)}A" if self.drawn else ""
        click.echo(up + "\n".join(f"\x1b[2K{row}" for row in frame))
        self.drawn = True

    def finish(self, panes: list[Pane]) -> None:
        """Draw the last frame, or print all texts one below the other."""
        self.draw(panes, len(panes) - 1)
        if self.mode == "text":
            for pane in panes:
                click.echo(f"--- {pane.title}: {len(pane.token_ids)} tokens, {pane.tokens_per_second:.0f} tokens/s")
                click.echo(self.tokenizer.decode(pane.token_ids, skip_special_tokens=True))
        self.drawn = False


class PaneStreamer:
    """A transformers streamer that fills a pane and redraws now and then."""

    def __init__(self, panes: list[Pane], index: int, screen: Screen) -> None:
        self.panes, self.index, self.screen = panes, index, screen
        self.pane = panes[index]
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
            self.screen.draw(self.panes, self.index)
            self.last_frame = now

    def end(self) -> None:
        """Stop the clock."""
        self.pane.seconds = time.perf_counter() - self.begin
