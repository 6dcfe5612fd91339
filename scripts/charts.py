"""Charts of README.md and docs/, drawn from docs/data by matplotlib; `make docs` draws them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from blocks import DATA, OPEN_MODELS, mean, measured
from matplotlib.figure import Figure

mpl.rcParams |= {"svg.hashsalt": "retrieve_spec", "svg.fonttype": "none", "font.size": 9}
BLUE, ORANGE, GREEN, LIGHT, GREY = "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#999999"
"""Okabe and Ito's colours, told apart by everyone."""
DRAFTERS = {
    "transformers prompt lookup": ("prompt lookup", ORANGE),
    "suffix-decoding tree, wide": ("SuffixDecoding", GREEN),
    "ours: auto, a node at 2%": ("this library", LIGHT),
    "ours: auto": ("this library", BLUE),
}
METHODS = {
    "prompt-lookup": ("prompt lookup of transformers", ORANGE),
    "off": ("this library, drafting off", GREY),
    "auto": ("this library", BLUE),
}
Bars = Sequence[float | dict[str, float]]
"""A number for each series, or one with the ends of its interval."""


def chart(title: str, note: str, series: Sequence[tuple[str, str]], groups: dict[str, Bars]) -> Figure:
    """Groups of horizontal bars, with a line at 1; `series` are names and colours."""
    figure = Figure(figsize=(8.4, 1.4 + 0.17 * len(groups) * (len(series) + 1)), layout="constrained")
    figure.suptitle(f"{title}\n{textwrap.fill(note, 90)}", fontsize=9)
    axes = figure.add_subplot()
    axes.margins(x=0.08)
    places = np.arange(len(groups))
    for i, (name, colour) in enumerate(series):
        bars = [values[i] for values in groups.values()]
        ends = [bar if isinstance(bar, dict) else {"value": bar, "low": bar, "high": bar} for bar in bars]
        values = [end["value"] for end in ends]
        error = [[end["value"] - end["low"] for end in ends], [end["high"] - end["value"] for end in ends]]
        height = 0.8 / len(series)
        drawn = axes.barh(places + i * height, values, height, xerr=error, color=colour, label=name, ecolor="#444444")
        axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="#666666", linestyle="--", linewidth=0.8)
    axes.set_yticks(places + 0.4 - 0.4 / len(series), list(groups))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    return figure


def peers() -> Figure:
    """Tokens per pass on recorded answers of open models, beside other projects' drafting code."""
    made = measured("compare")["files"]
    files = {stem: made[stem]["drafters"] for stem in OPEN_MODELS if stem in made}
    series = [
        (f"{name}: {mean((rows[drafter] for rows in files.values()), 'nodes_per_pass'):.0f} nodes", colour)
        for drafter, (name, colour) in DRAFTERS.items()
    ]
    groups = {
        "\n".join(OPEN_MODELS[stem]): [rows[drafter]["tokens_per_pass"] for drafter in DRAFTERS]
        for stem, rows in files.items()
    }
    note = "Recorded greedy answers, nothing kept between them. Plain decoding is 1; nodes are drafted tokens per pass."
    return chart("Tokens per pass of models of 7 B to 70 B parameters", note, series, groups)


def everyday() -> Figure:
    """Speed of a real chat model over plain `generate`, by kind of text."""
    greedy = measured("everyday-t0")
    by_kind = {
        kind: {method: found["by_task"][kind] for method, found in greedy["methods"].items()}
        for kind in greedy["methods"]["auto"]["by_task"]
    }
    groups = {
        label: [methods[name]["speedup"] for name in METHODS]
        for label, methods in {"all": greedy["methods"], **by_kind}.items()
    }
    machine = greedy["header"]["machine"]
    note = (
        f"Tokens/s over plain generate (1): medians over {greedy['prompts']} prompts, greedy, {machine['processor']}, "
        f"{machine['cores']} cores."
    )
    return chart("SmolLM2-135M-Instruct, float32", note, list(METHODS.values()), groups)


CHARTS: dict[str, Callable[[], Figure]] = {draw.__name__: draw for draw in (peers, everyday)}


def draw(folder: Path = DATA.parent) -> None:
    """Draw every chart into a folder."""
    for name, make in CHARTS.items():
        make().savefig(folder / f"{name}.svg", metadata={"Date": None})
