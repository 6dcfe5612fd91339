"""Bar charts as SVG: no font is asked for, light and dark are followed, the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH, LABELS, END = 840, 210, 60
"""Pixels: of a chart, of the names at its left, and what stays free at its right for the longest bar's value."""
BAR, GAP, TOP = 13, 14, 78
COLOURS = ("blue", "orange", "green", "light", "pink", "red", "grey")
"""Okabe and Ito's colours, told apart by everyone."""
TEMPLATE = """\
{% macro text(x, y, said, kind) %}<text x="{{ "%.0f"|format(x) }}" y="{{ "%.0f"|format(y) }}" class="{{ kind }}">\
{{ said }}</text>{% endmacro %}
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ WIDTH }} {{ height }}" role="img" \
aria-label="{{ title }}. {{ note }}">
<style>text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.dim{fill:#59636e;font-size:12px}.value{font-size:11px}.end{text-anchor:end}
.back{fill:#ffffff;stroke:#d1d9e0}.line{stroke:#59636e}.whisker{stroke:#1f2328;fill:none}
.orange{fill:#e69f00}.green{fill:#009e73}.blue{fill:#0072b2}.light{fill:#56b4e9}.grey{fill:#999999}
.pink{fill:#cc79a7}.red{fill:#d55e00}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.dim{fill:#9198a1}.back{fill:#151b23;stroke:#3d444d}
.line{stroke:#9198a1}.whisker{stroke:#f0f6fc}.blue{fill:#2f8fd6}.light{fill:#8fd0f5}}</style>
<rect class="back" x=".5" y=".5" width="{{ WIDTH - 1 }}" height="{{ height - 1 }}" rx="8"/>
{{ text(16, 24, title, "title") }}
{{ text(16, 43, note, "dim") }}
{% for x, name, colour in legend %}
<rect class="{{ colour }}" x="{{ "%.0f"|format(x) }}" y="54" width="10" height="10"/>
{{ text(x + 15, 63, name, "dim") }}
{% endfor %}
{% for top, name, below, bars in groups %}
{% set middle = top + bars|length * BAR / 2 + (-2 if below else 4) %}
{{ text(LABELS - 10, middle, name, "end") }}
{% if below %}
{{ text(LABELS - 10, middle + 14, below, "dim end") }}
{% endif %}
{% for y, colour, value, low, high in bars %}
{% set width = "%.1f"|format(value * scale) %}
<rect class="{{ colour }}" x="{{ LABELS }}" y="{{ y }}" width="{{ width }}" height="{{ BAR - 2 }}"/>
{% if high is not none %}
{% set left, right = "%.1f"|format(LABELS + low * scale), "%.1f"|format(LABELS + high * scale) %}
{% set at = y + (BAR - 2) / 2 %}
<path class="whisker" d="M{{ left }} {{ at }}H{{ right }}M{{ right }} {{ at - 3 }}v6M{{ left }} {{ at - 3 }}v6"/>
{% endif %}
{{ text(LABELS + (value if high is none else high) * scale + 5, y + BAR - 3, "%.2f"|format(value), "value") }}
{% endfor %}
{% endfor %}
<path class="line" stroke-dasharray="3 3" d="M{{ "%.1f"|format(LABELS + scale) }} {{ TOP - 6 }}V{{ height - 12 }}"/>
</svg>
"""

Group = tuple[str, str, Sequence[float | dict[str, float]]]
"""Bars below one another: their name, what stands below it, and for each series a number, or one with an interval."""


def chart(title: str, note: str, series: Sequence[tuple[str, str]], groups: Sequence[Group]) -> str:
    """SVG of groups of bars, with a line at 1; `series` are names and colours."""
    from jinja2 import Environment

    step = len(series) * BAR + GAP
    legend, x, drawn, longest = [], 16.0, [], 1.0
    for name, colour in series:
        legend.append((x, name, colour))
        x += 32 + 6.5 * len(name)
    for number, (name, below, values) in enumerate(groups):
        top, bars = TOP + number * step, list[tuple[Any, ...]]()
        for i, (value, (_, colour)) in enumerate(zip(values, series, strict=True)):
            whole: dict[str, Any] = value if isinstance(value, dict) else {"value": value, "low": None, "high": None}
            bars.append((top + i * BAR, colour, *(whole[part] for part in ("value", "low", "high"))))
            longest = max(longest, whole["high"] or whole["value"])
        drawn.append((top, name, below, bars))
    places: dict[str, Any] = {"WIDTH": WIDTH, "LABELS": LABELS, "BAR": BAR, "TOP": TOP}
    places |= {"height": TOP + len(groups) * step + 8, "scale": (WIDTH - LABELS - END) / longest}
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    return template.render(title=title, note=note, legend=legend, groups=drawn, **places).strip() + "\n"


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
