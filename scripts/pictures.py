"""Pictures of README.md and docs/, drawn as SVG from docs/data; the same data gives the same bytes.

They ask nobody for a font and follow light and dark. `make docs` draws them, and `generate_docs.py --check` names those
that are out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from blocks import DATA, ENVIRONMENT, OPEN_MODELS, TEMPERATURES, NotMeasured, mean, measured

from retrieve_spec.bench.chart import chart

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
COLUMNS, ROWS = 54, 16
"""Of a pane of the recorded terminal; longer lines are cut, later lines are not shown."""
LEFT = 18
PANE = COLUMNS * 7.8 + 2 * LEFT


def cut(line: str) -> str:
    """A line as it fits a pane of the terminal."""
    printable = "".join(c if c.isprintable() else " " for c in line)
    return printable if len(printable) <= COLUMNS else printable[: COLUMNS - 1] + "…"


ENVIRONMENT.filters |= {"escaped": escape, "cut": cut}


def peers() -> str:
    """Tokens per pass on recorded answers of open models, beside other projects' drafting code."""
    made = measured("compare")["files"]
    files = {stem: made[stem]["drafters"] for stem in OPEN_MODELS if stem in made}
    if not files:
        raise NotMeasured
    series = [
        (f"{name}: {mean((rows[drafter] for rows in files.values()), 'nodes_per_pass'):.0f} nodes", colour)
        for drafter, (name, colour) in DRAFTERS.items()
    ]
    groups = [
        (*OPEN_MODELS[stem], [rows[drafter]["tokens_per_pass"] for drafter in DRAFTERS]) for stem, rows in files.items()
    ]
    note = "Recorded greedy answers, nothing kept between them. Plain decoding is 1; nodes are drafted tokens per pass."
    return chart("Tokens per pass of models of 7 B to 70 B parameters", note, series, groups)


def _speeds(title: str, about: str, made: dict[str, Any], runs: dict[str, Any]) -> str:
    """Speed over plain `generate` of runs, a group each."""
    groups = [(label, "", [run["methods"][name]["speedup"] for name in METHODS]) for label, run in runs.items()]
    note = f"Tokens/s over plain generate (1): medians over {about}, {_machine(made)}."
    return chart(title, note, list(METHODS.values()), groups)


def speedup() -> str:
    """The bundled model."""
    runs = {label: measured(f"reference-{name}") for name, label in TEMPERATURES.items()}
    first = next(iter(runs.values()))
    return _speeds("Bundled model, 12.6 M parameters", f"{first['prompts']} unseen files", first["header"], runs)


def larger() -> str:
    """Larger models that are made to give recorded answers."""
    made = measured("larger")
    sizes = {f"{size['parameters'] / 1e9:.2f} B parameters": size for size in made["sizes"].values()}
    return _speeds("Answers of Vicuna 7 B in passes of larger models", f"{made['answers']} answers", made, sizes)


def batches() -> str:
    """Speed over the original `generate` by number of rows."""
    made = measured("batches")
    rows: dict[int, list[float]] = {}
    for entry in sorted(made["batches"], key=lambda entry: entry["temperature"]):
        rows.setdefault(entry["rows"], []).extend(entry[name]["ratio"] for name in ("off", "auto"))
    series = [
        ("greedy, drafting off", "grey"),
        ("greedy", "blue"),
        ("T = 1, drafting off", "orange"),
        ("T = 1", "light"),
    ]
    groups = [(f"{number} row{'s' * (number > 1)}", "", values) for number, values in rows.items()]
    note = f"Tokens/s over plain generate with the same batch (1), bundled model, {_machine(made)}."
    return chart("Batches: drafts fade out as rows fill a pass", note, series, groups)


def epochs() -> str:
    """Tokens per pass of recorded samples replayed as epochs, with a rollout memory and without."""
    (found,) = (row["epochs"] for row in measured("epochs")["rows"].values())
    pairs = enumerate(zip(found["siblings"], found["memory"], strict=True), 1)
    groups = [(f"epoch {number}", "", [figures["tokens_per_pass"] for figures in pair]) for number, pair in pairs]
    note = (
        f"Recorded samples at T = 0.6: {found['samples']} answers to each of {found['groups']} questions in an epoch."
    )
    series = [("siblings alone", "grey"), ("siblings and rollout memory", "blue")]
    return chart("Tokens per pass of later answers to the same prompts", note, series, groups)


def terminal() -> str:
    """The recording of a terminal (`record_terminal.py`)."""
    sizes = {"TOP": 76, "LINE": 19, "LEFT": LEFT, "ROWS": ROWS, "PANE": PANE}
    return ENVIRONMENT.get_template("terminal.svg").render(**measured("terminal"), **sizes) + "\n"


def _machine(made: dict[str, Any]) -> str:
    return f"{made['machine']['processor']}, {made['machine']['cores']} cores"


PICTURES: dict[str, Callable[[], str]] = {
    draw.__name__: draw for draw in (peers, speedup, larger, batches, epochs, terminal)
}


def pictures() -> dict[Path, str]:
    """Every picture there is data for, with its SVG."""
    drawn = {}
    for name, draw in PICTURES.items():
        try:
            drawn[DATA.parent / f"{name}.svg"] = draw()
        except NotMeasured:
            continue
    return drawn
