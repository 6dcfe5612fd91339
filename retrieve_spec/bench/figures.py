"""Figures of a report: speed-ups, tokens per pass, accepted lengths, costs, where the time goes, calibration."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from retrieve_spec.bench.results import PARTS, Record
from retrieve_spec.bench.stats import passes_of

# Okabe and Ito's colours, told apart by everyone.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
FEW = 5
"""Methods that bars side by side and colours can still tell apart."""
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}

Summary = dict[str, Any]


def png(figure: Figure) -> bytes:
    """The figure's bytes; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of one panel, in inches."""
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def colours(summary: Summary) -> dict[str, str]:
    """One colour for each method, the same in all figures."""
    others = [name for name in summary["methods"] if name != summary["baseline"]]
    return {summary["baseline"]: "#444444", **{name: colour(i) for i, name in enumerate(others)}}


def colour(index: int) -> str:
    """One colour after another, again from the first when they run out."""
    return COLOURS[index % len(COLOURS)]


def all_figures(summary: Summary, records: Sequence[Record]) -> dict[str, bytes]:
    """PNG of every figure that these results allow, by name, in reading order."""
    makers: dict[str, Callable[[Summary, Sequence[Record]], Figure | None]] = {
        "speedup": speedup,
        "tokens_per_pass": tokens_per_pass,
        "accepted_lengths": accepted_lengths,
        "cost": cost,
        "time": where_time_goes,
        "calibration": calibration,
    }
    made = {}
    with matplotlib.rc_context(STYLE):
        for name, maker in makers.items():
            figure = maker(summary, records)
            if figure is not None:
                made[name] = png(figure)
    return made


def speedup(summary: Summary, records: Sequence[Record]) -> Figure | None:
    """Speed-up by task and method, median over prompts with its interval.

    A panel for each task has a lying bar for each method: names instead of colours that nobody can tell apart.
    """
    methods = [name for name in summary["methods"] if name != summary["baseline"]]
    if not methods:
        return None
    tasks = [*next(iter(summary["methods"].values()))["by_task"], "all"]
    tasks = tasks if len(tasks) > 2 else ["all"]  # one task is all
    figure = Figure(figsize=(max(5.5, 2.1 * len(tasks) + 1.5), 0.28 * len(methods) + 1.3))
    panels = figure.subplots(1, len(tasks), sharex=True, sharey=True, squeeze=False)[0]
    shades = [colour(0) if name.startswith("auto") else "#999999" for name in methods]
    for axes, task in zip(panels, tasks, strict=True):
        mine = [_of_task(summary, name, task) for name in methods]
        values = [v["value"] for v in mine]
        errors = [[v["value"] - v["low"] for v in mine], [v["high"] - v["value"] for v in mine]]
        bars = axes.barh(methods, values, 0.7, color=shades, xerr=errors, ecolor="#444444", capsize=2)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        axes.margins(x=0.2)
        axes.axvline(1, color="#444444", linewidth=1)
        axes.grid(axis="y", visible=False)
        axes.set_title(task)
    panels[0].invert_yaxis()
    figure.supxlabel(f"tokens/s over {summary['baseline']}, median over prompts with its 95 % interval", fontsize=10)
    figure.tight_layout()
    return figure


def _of_task(summary: Summary, method: str, task: str) -> dict[str, float]:
    figures = summary["methods"][method]
    found: dict[str, float] = (figures if task == "all" else figures["by_task"][task])["speedup"]
    return found


def tokens_per_pass(summary: Summary, records: Sequence[Record]) -> Figure | None:
    """Tokens per pass against nodes per pass; methods that differ in their budget only are joined."""
    families: dict[str, list[tuple[float, float, str]]] = {}
    for name, figures in summary["methods"].items():
        if figures["nodes_per_pass"] is not None:
            kind, fixed, _ = name.partition(":")
            point = (figures["nodes_per_pass"], figures["tokens_per_pass"], name)
            families.setdefault(kind + fixed, []).append(point)
    if not families:
        return None
    figure, axes = new_figure(6.5, 3.6)
    below = _every_second([name for points in families.values() for name in points])
    for points in families.values():
        points.sort()
        alone = len(points) == 1
        shade = colours(summary)[points[0][2]]
        axes.plot([p[0] for p in points], [p[1] for p in points], "D" if alone else "o-", color=shade)
        for x, y, name in points:
            axes.annotate(name, (x, y), xytext=(6, -11 if name in below else 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("draft nodes per pass")
    axes.set_ylabel("tokens per pass")
    axes.margins(x=0.15, y=0.15)
    axes.set_ylim(bottom=0.5)
    axes.set_title("Tokens per pass against nodes per pass")
    return figure


def _every_second(points: list[tuple[float, float, str]]) -> set[str]:
    """Names of every second point from left to right, so that neighbours' labels stand above and below."""
    return {name for _, _, name in sorted(points)[1::2]}


def where_time_goes(summary: Summary, records: Sequence[Record]) -> Figure | None:
    """Milliseconds per token by part, for every method."""
    methods = [name for name, figures in summary["methods"].items() if figures["split_ms_per_token"]]
    if not methods:
        return None
    figure, axes = new_figure(6.5, 0.45 * len(methods) + 1.3)
    left = np.zeros(len(methods))
    for i, part in enumerate((*PARTS, "other")):
        widths = np.array([summary["methods"][name]["split_ms_per_token"].get(part, 0.0) for name in methods])
        axes.barh(methods, widths, 0.65, left=left, color=colour(i), label=part)
        left += widths
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per new token (for transformers' methods: prefill and all the rest)")
    axes.set_title("Where the time goes")
    axes.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.45, -0.62 / (0.45 * len(methods) + 0.6)), fontsize=8)
    return figure


LENGTH_BINS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33)
"""First accepted length of each bar."""


def accepted_lengths(summary: Summary, records: Sequence[Record]) -> Figure | None:
    """How many draft tokens a pass accepts: a row for each method, shares of its passes."""
    ours = _drafting(summary, records)
    if not ours:
        return None
    figure, axes = new_figure(7.5, 0.3 * len(ours) + 1.0)
    shares = []
    for passes in ours.values():
        counts = np.bincount(np.searchsorted(LENGTH_BINS, passes[:, 1], side="right") - 1, minlength=len(LENGTH_BINS))
        shares.append(counts / counts.sum() * 100)
    axes.imshow(shares, cmap="Blues", aspect="auto", vmin=0, vmax=60)
    for row, share in enumerate(shares):
        for column, percent in enumerate(share):
            if percent >= 0.5:
                ink = "white" if percent > 35 else "#222222"
                axes.text(column, row, f"{percent:.0f}", ha="center", va="center", fontsize=8, color=ink)
    axes.set_xticks(range(len(LENGTH_BINS)), [_bin_name(i) for i in range(len(LENGTH_BINS))])
    axes.set_yticks(range(len(ours)), list(ours))
    axes.grid(visible=False)
    axes.set_xlabel("accepted draft tokens in a pass")
    axes.set_title("Accepted lengths, % of a method's passes")
    return figure


def cost(summary: Summary, records: Sequence[Record]) -> Figure | None:
    """Measured time of a pass over n nodes, and the budgets that were chosen."""
    curves = {n: c for n, c in summary["header"].get("cost_curves", {}).items() if c and n in summary["methods"]}
    ours = _drafting(summary, records)
    if not curves or not ours:
        return None
    name = next((n for n in ours if n in curves and ":" not in n), next(iter(curves)))
    curve = np.asarray(curves[name]) * 1e3
    figure, axes = new_figure(6.5, 3.4)
    axes.plot(np.arange(len(curve)), curve, color=colour(0), label="T(n): a pass over n draft nodes, all included")
    axes.set_xlabel("draft nodes n")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.set_title(f"What a pass costs and which budgets {name} chose")
    if name in ours:
        chosen = axes.twinx()
        counts = np.bincount(np.minimum(ours[name][:, 0].astype(int), len(curve) - 1), minlength=len(curve))
        chosen.bar(
            np.arange(len(curve)),
            counts / counts.sum() * 100,
            1.0,
            color=colour(1),
            alpha=0.6,
            label="passes with n nodes",
        )
        chosen.set_ylabel("% of passes")
        chosen.grid(visible=False)
        chosen.spines["right"].set_visible(True)
        handles = [*axes.get_legend_handles_labels()[0], *chosen.get_legend_handles_labels()[0]]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return figure


def calibration(summary: Summary, records: Sequence[Record]) -> Figure | None:
    """Expected against realised accepted tokens per pass, in ten groups of equal size.

    Of many methods only `auto` and its kin are shown: published rules promise nothing that could be right.
    """
    ours = _drafting(summary, records)
    if len(ours) > FEW:
        ours = {name: passes for name, passes in ours.items() if name.startswith("auto")}
    drawn = False
    figure, axes = new_figure(4.6, 4.2)
    top = 0.0
    for name, passes in ours.items():
        passes = passes[passes[:, 0] > 0]
        if len(passes) < 20:
            continue
        order = passes[np.argsort(passes[:, 2], kind="stable")]
        groups = np.array_split(order, 10)
        x, y = [g[:, 2].mean() for g in groups], [g[:, 1].mean() for g in groups]
        axes.plot(x, y, "o-", color=colours(summary)[name], label=name, markersize=4)
        top, drawn = max(top, *x, *y), True
    if not drawn:
        return None
    line = np.linspace(0, top, 200)
    axes.plot(line, line, "--", color="#444444", linewidth=1, label="as expected")
    ticks = [tick for tick in (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if tick <= 1.3 * top]
    for scale, set_ticks in ((axes.set_xscale, axes.set_xticks), (axes.set_yscale, axes.set_yticks)):
        scale("symlog", linthresh=1, linscale=0.7)  # most passes expect little, a few expect much
        set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        set_ticks([], minor=True)
    axes.set_xlim(-0.1, 1.15 * top + 0.2)
    axes.set_ylim(-0.1, 1.15 * top + 0.2)
    axes.set_xlabel("accepted tokens expected, mean of a group of passes")
    axes.set_ylabel("accepted tokens, mean")
    axes.set_title("Is the expectation right?")
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure


def _bin_name(index: int) -> str:
    first = LENGTH_BINS[index]
    if index == len(LENGTH_BINS) - 1:
        return f"{first}+"
    last = LENGTH_BINS[index + 1] - 1
    return str(first) if first == last else f"{first}-{last}"


def _drafting(summary: Summary, records: Sequence[Record]) -> dict[str, Any]:
    """Passes of the methods that drafted anything."""
    found = {name: passes_of(records, name) for name in summary["methods"]}
    return {name: passes for name, passes in found.items() if len(passes) and passes[:, 0].any()}
