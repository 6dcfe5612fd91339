"""Bar charts as SVG: no font is asked for, light and dark are followed, the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH, LABELS, END = 840, 210, 60
"""Pixels: of a chart, of the names at its left, and what stays free at its right for the longest bar's value."""
BAR, GAP, TOP = 13, 14, 78
COLOURS = ("blue", "orange", "green", "light", "pink", "red", "grey")
"""Okabe and Ito's colours, told apart by everyone."""
STYLE = """\
<style>text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.dim{fill:#59636e;font-size:12px}.value{font-size:11px}.end{text-anchor:end}
.back{fill:#ffffff;stroke:#d1d9e0}.line{stroke:#59636e}.whisker{stroke:#1f2328;fill:none}
.orange{fill:#e69f00}.green{fill:#009e73}.blue{fill:#0072b2}.light{fill:#56b4e9}.grey{fill:#999999}
.pink{fill:#cc79a7}.red{fill:#d55e00}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.dim{fill:#9198a1}.back{fill:#151b23;stroke:#3d444d}
.line{stroke:#9198a1}.whisker{stroke:#f0f6fc}.blue{fill:#2f8fd6}.light{fill:#8fd0f5}}</style>"""
_NARROW = frozenset(" .,:;'|()fijlrtI")

Group = tuple[str, str, Sequence[float | dict[str, float]]]
"""Bars below one another: their name, what stands below it, and for each series a number, or one with an interval."""


def chart(title: str, note: str, series: Sequence[tuple[str, str]], groups: Sequence[Group]) -> str:
    """SVG of groups of bars, with a line at 1; `series` are names and colours."""
    step = len(series) * BAR + GAP
    height = TOP + len(groups) * step + 8
    values = [value for _, _, bars in groups for value in bars]
    scale = (WIDTH - LABELS - END) / max([1.0, *(_ends(value)[2] for value in values)])
    about = escape(on_one_line(f"{title}. {note}"))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{about}">',
        STYLE,
        f'<rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(16, 24, title, "title"),
        _text(16, 43, note, "dim"),
    ]
    x = 16.0
    for name, colour in series:
        lines += [f'<rect class="{colour}" x="{x:.0f}" y="54" width="10" height="10"/>', _text(x + 15, 63, name, "dim")]
        x += 34 + sum(4.4 if letter in _NARROW else 7.5 for letter in name)
    for top, (name, below, bars) in zip(range(TOP, height, step), groups, strict=False):
        middle = top + len(bars) * BAR / 2 + (-2 if below else 4)
        lines.append(_text(LABELS - 10, middle, name, "end"))
        lines += [_text(LABELS - 10, middle + 14, below, "dim end")] if below else []
        for number, (value, (_, colour)) in enumerate(zip(bars, series, strict=True)):
            lines += _bar(top + number * BAR, colour, value, scale)
    line = f"M{LABELS + scale:.1f} {TOP - 6}V{height - 12}"
    return "\n".join([*lines, f'<path class="line" stroke-dasharray="3 3" d="{line}"/>', "</svg>"]) + "\n"


def _bar(y: float, colour: str, value: float | dict[str, float], scale: float) -> list[str]:
    """A bar, its interval if it has one, and its number behind both."""
    value, low, high = _ends(value)
    lines = [f'<rect class="{colour}" x="{LABELS}" y="{y}" width="{value * scale:.1f}" height="{BAR - 2}"/>']
    if high > low:
        left, right, at = f"{LABELS + low * scale:.1f}", f"{LABELS + high * scale:.1f}", y + (BAR - 2) / 2
        ends = f"M{left} {at}H{right}M{right} {at - 3}v6M{left} {at - 3}v6"
        lines.append(f'<path class="whisker" d="{ends}"/>')
    return [*lines, _text(LABELS + high * scale + 5, y + BAR - 3, f"{value:.2f}", "value")]


def _ends(value: float | dict[str, float]) -> tuple[float, float, float]:
    """A value, and the ends of its interval; those of a number are itself."""
    return (value["value"], value["low"], value["high"]) if isinstance(value, dict) else (value, value, value)


def _text(x: float, y: float, said: str, kind: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(on_one_line(said))}</text>'


def on_one_line(text: str) -> str:
    """A text without line ends and what else is not printed, which neither XML nor a table may hold."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def speedups(summary: dict[str, Any]) -> str:
    """Chart of a run: speed over the baseline by method and task, the medians over prompts with their intervals."""
    base, methods = summary["baseline"], summary["methods"]
    tasks = list(methods[base]["by_task"])
    series = [("all", COLOURS[0])]
    if len(tasks) > 1:
        series += [(task, COLOURS[1 + i % (len(COLOURS) - 1)]) for i, task in enumerate(tasks)]
    groups = [
        (name, "", [found["speedup"] for found in (figures, *figures["by_task"].values())][: len(series)])
        for name, figures in methods.items()
        if name != base
    ]
    note = f"Medians over prompts of ratios within one run, with 95 % intervals; {base} is 1."
    return chart(f"Tokens per second over {base}", note, series, groups)
