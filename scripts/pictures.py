"""Bar charts of README.md and docs/, drawn as SVG from docs/data; the same data gives the same bytes.

A chart asks nobody for a font and follows light and dark. `make docs` draws them, and `generate_docs.py --check` names
those that are out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

import record_terminal
from published import ROOT, measured

TEMPERATURES = {"t0": "greedy", "t0.7": "T = 0.7, top-p 0.95", "t1.0": "T = 1.0"}
OPEN_MODELS = {
    "code_classeval_incremental_deepseekcoder_greedy": ("completing a class", "DeepSeek-Coder 6.7 B"),
    "code_fim_evocodebench_greedy": ("filling in a function", "three models, 7 B to 33 B"),
    "codeedit_nofuneval_deepseekcoder33b_greedy": ("rewriting a file", "DeepSeek-Coder 33 B"),
    "math_tora_gsm8k_greedy": ("mathematics", "ToRA 34 B and 70 B"),
    "reasoning_skyt1_aime24_11ckpts_greedy": ("long reasoning", "Sky-T1 32 B"),
    "specbench_vicuna7b_greedy": ("Spec-Bench", "Vicuna 7 B"),
    "specbench_business_vicuna7b_greedy": ("business questions", "Vicuna 7 B"),
}
"""Recorded files whose answers are all by open models of 7 B to 70 B parameters: the work, the models."""
DRAFTERS = {
    "transformers prompt lookup": ("prompt lookup", "orange"),
    "suffix-decoding tree, wide": ("SuffixDecoding", "green"),
    "ours: auto, a node at 2%": ("this library", "light"),
    "ours: auto": ("this library", "blue"),
}
METHODS = {
    "prompt-lookup": ("prompt lookup of transformers", "orange"),
    "off": ("this library, drafting off", "grey"),
    "auto": ("this library", "blue"),
}

WIDTH, LABELS, END = 840, 210, 60
"""Pixels: of a picture, of the names at its left, and what stays free at its right for the longest bar's value."""
BAR, GAP, TOP = 13, 14, 78
STYLE = """\
text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.dim{fill:#59636e;font-size:12px}.value{font-size:11px}.end{text-anchor:end}
.back{fill:#ffffff;stroke:#d1d9e0}.line{stroke:#59636e}.whisker{stroke:#1f2328;fill:none}
.orange{fill:#e69f00}.green{fill:#009e73}.blue{fill:#0072b2}.light{fill:#56b4e9}.grey{fill:#999999}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.dim{fill:#9198a1}.back{fill:#151b23;stroke:#3d444d}
.line{stroke:#9198a1}.whisker{stroke:#f0f6fc}.blue{fill:#2f8fd6}.light{fill:#8fd0f5}}"""


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars below one another: its name, what stands below the name, and a value for each series.

    A value is a number, or a mapping with `value`, `low` and `high` (an interval).
    """

    name: str
    below: str
    values: Sequence[float | dict[str, float]]


def chart(title: str, note: str, series: Iterable[tuple[str, str]], groups: Sequence[Bars], line: float | None) -> str:
    """SVG of groups of bars; `series` are names and colours, `line` is a value to compare with."""
    series = list(series)
    longest = max(_ends(value)[1] for group in groups for value in group.values)
    scale = (WIDTH - LABELS - END) / longest
    step = len(series) * BAR + GAP
    height = TOP + len(groups) * step + 8
    said = escape(f"{title}. {note}", quote=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(16, 24, title, "title"),
        _text(16, 43, note, "dim"),
        *_legend(series),
    ]
    for number, group in enumerate(groups):
        top = TOP + number * step
        middle = top + len(series) * BAR / 2 + (4 if not group.below else -2)
        parts.append(_text(LABELS - 10, middle, group.name, "end"))
        if group.below:
            parts.append(_text(LABELS - 10, middle + 14, group.below, "dim end"))
        for i, ((_, colour), value) in enumerate(zip(series, group.values, strict=True)):
            parts += _bar(top + i * BAR, value, colour, scale)
    if line is not None:
        x = LABELS + line * scale
        parts.append(f'<path class="line" stroke-dasharray="3 3" d="M{x:.1f} {TOP - 6}V{height - 12}"/>')
    return "\n".join([*parts, "</svg>", ""])


def _ends(value: float | dict[str, float]) -> tuple[float, float]:
    return (value["value"], value["high"]) if isinstance(value, dict) else (value, value)


def _bar(top: float, value: float | dict[str, float], colour: str, scale: float) -> list[str]:
    number, high = _ends(value)
    parts = [f'<rect class="{colour}" x="{LABELS}" y="{top}" width="{number * scale:.1f}" height="{BAR - 2}"/>']
    if isinstance(value, dict):
        low, right, y = LABELS + value["low"] * scale, LABELS + high * scale, top + (BAR - 2) / 2
        parts.append(
            f'<path class="whisker" d="M{low:.1f} {y}H{right:.1f}M{right:.1f} {y - 3}v6M{low:.1f} {y - 3}v6"/>'
        )
    return [*parts, _text(LABELS + high * scale + 5, top + BAR - 3, f"{number:.2f}", "value")]


def _legend(series: Sequence[tuple[str, str]]) -> list[str]:
    parts, x = [], 16.0
    for name, colour in series:
        parts += [f'<rect class="{colour}" x="{x:.0f}" y="54" width="10" height="10"/>', _text(x + 15, 63, name, "dim")]
        x += 32 + 6.5 * len(name)
    return parts


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(text)}</text>'


def peers() -> str | None:
    """Tokens per pass on recorded answers of open models, beside other projects' drafting code."""
    made = measured("compare")
    files = {stem: made["files"][stem]["drafters"] for stem in OPEN_MODELS if stem in made["files"]} if made else {}
    if not files:
        return None
    series = [
        (f"{name}: {mean(rows[drafter]['nodes_per_pass'] for rows in files.values()):.0f} nodes", colour)
        for drafter, (name, colour) in DRAFTERS.items()
    ]
    groups = [
        Bars(*OPEN_MODELS[stem], [rows[drafter]["tokens_per_pass"] for drafter in DRAFTERS])
        for stem, rows in files.items()
    ]
    note = "Recorded greedy answers, nothing kept between them. Plain decoding is 1; nodes are drafted tokens per pass."
    return chart("Tokens per pass of models of 7 B to 70 B parameters", note, series, groups, 1)


def speedup() -> str | None:
    """Speed over plain `generate` with the bundled model."""
    runs = {label: found for name, label in TEMPERATURES.items() if (found := measured(f"reference-{name}"))}
    if not runs:
        return None
    groups = [Bars(label, "", [run["methods"][name]["speedup"] for name in METHODS]) for label, run in runs.items()]
    first = next(iter(runs.values()))
    note = (
        f"Tokens/s over plain generate (1): medians over {first['prompts']} unseen files, {_machine(first['header'])}."
    )
    return chart("Bundled model, 12.6 M parameters", note, METHODS.values(), groups, 1)


def larger() -> str | None:
    """Speed over plain `generate` with larger models that are made to give recorded answers."""
    made = measured("larger")
    if made is None:
        return None
    groups = [
        Bars(f"{size['parameters'] / 1e9:.2f} B parameters", "", [size["methods"][name]["speedup"] for name in METHODS])
        for size in made["sizes"].values()
    ]
    note = f"Tokens/s over plain generate (1): medians over {made['answers']} answers, {_machine(made)}."
    return chart("Answers of Vicuna 7 B in passes of larger models", note, METHODS.values(), groups, 1)


def batches() -> str | None:
    """Speed over the original `generate` by number of rows."""
    made = measured("batches")
    if made is None:
        return None
    rows: dict[int, list[float]] = {}
    for entry in sorted(made["batches"], key=lambda entry: entry["temperature"]):
        rows.setdefault(entry["rows"], []).extend(entry[name]["ratio"] for name in ("off", "auto"))
    series = [
        ("greedy, drafting off", "grey"),
        ("greedy", "blue"),
        ("T = 1, drafting off", "orange"),
        ("T = 1", "light"),
    ]
    groups = [Bars(f"{number} row{'s' * (number > 1)}", "", values) for number, values in rows.items()]
    note = f"Tokens/s over plain generate with the same batch (1), bundled model, {_machine(made)}."
    return chart("Batches: drafts fade out as rows fill a pass", note, series, groups, 1)


def epochs() -> str | None:
    """Tokens per pass of recorded samples replayed as epochs, with a rollout memory and without."""
    made = measured("epochs")
    if made is None:
        return None
    ((_, row),) = made["rows"].items()
    found = row["epochs"]
    pairs = zip(found["siblings"], found["memory"], strict=True)
    groups = [
        Bars(f"epoch {number}", "", [figures["tokens_per_pass"] for figures in pair])
        for number, pair in enumerate(pairs, 1)
    ]
    note = (
        f"Recorded samples at T = 0.6: {found['samples']} answers to each of {found['groups']} questions in an epoch."
    )
    series = [("siblings alone", "grey"), ("siblings and rollout memory", "blue")]
    return chart("Tokens per pass of later answers to the same prompts", note, series, groups, 1)


def terminal() -> str | None:
    """The recording of a terminal."""
    made = measured("terminal")
    return None if made is None else record_terminal.draw(made)


def _machine(made: dict[str, Any]) -> str:
    return f"{made['machine']['processor']}, {made['machine']['cores']} cores"


PICTURES: dict[str, Callable[[], str | None]] = {
    "peers": peers,
    "speedup": speedup,
    "larger": larger,
    "batches": batches,
    "epochs": epochs,
    "terminal": terminal,
}


def pictures() -> dict[Path, str]:
    """Every picture there is data for, with its SVG."""
    return {ROOT / "docs" / f"{name}.svg": drawn for name, draw in PICTURES.items() if (drawn := draw()) is not None}
