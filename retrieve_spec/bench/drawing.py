"""Style of all figures: colours that everyone can tell apart, sizes, bytes."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
