"""Figures of single passes: accepted lengths, cost by width, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from retrieve_spec.bench.drawing import FEW, Summary, colour, colours, new_figure
from retrieve_spec.bench.results import Record
from retrieve_spec.bench.stats import passes_of

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
