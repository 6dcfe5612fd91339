"""Figures of a report: speed-ups, tokens per pass, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from retrieve_spec.bench.drawing import STYLE, Summary, colour, colours, new_figure, png
from retrieve_spec.bench.pass_figures import accepted_lengths, calibration, cost
from retrieve_spec.bench.results import Record

PARTS = ("prefill", "draft", "verify", "commit", "learn", "other")


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
    for i, part in enumerate(PARTS):
        widths = np.array([summary["methods"][name]["split_ms_per_token"].get(part, 0.0) for name in methods])
        axes.barh(methods, widths, 0.65, left=left, color=colour(i), label=part)
        left += widths
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per new token (for transformers' methods: prefill and all the rest)")
    axes.set_title("Where the time goes")
    axes.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.45, -0.62 / (0.45 * len(methods) + 0.6)), fontsize=8)
    return figure
