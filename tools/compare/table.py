"""Figures of a comparison with peers by drafter, and where `auto` loses; scripts/blocks/compare.md is their table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from peers import GIVEN, KEPT, PHRASES

OURS = "ours: "
AUTO = f"{OURS}auto"
Rows = dict[str, list[dict[str, Any]]]
"""Figures of a drafter on every file, by its name."""


def drafters(made: dict[str, Any]) -> Rows:
    """Drafters that were run on every file."""
    results = [file["drafters"] for file in made["files"].values()]
    rows = {name: [by_name.get(name, {}) for by_name in results] for name in results[0]}
    return {name: figures for name, figures in rows.items() if all("tokens_per_pass" in row for row in figures)}


def skipped(made: dict[str, Any]) -> dict[str, str]:
    """Drafters that could not be run, with the reason."""
    rows = ((name, row) for file in made["files"].values() for name, row in file["drafters"].items())
    return {name: row["skipped"] for name, row in rows if "skipped" in row}


def of_auto(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures of `auto` with all of its nodes, on every file, whatever it knows beside the text."""
    rows = drafters(made)
    return [row for end in ("", KEPT, GIVEN) for row in rows.get(AUTO + end, [])]


def losses(rows: Rows) -> Iterator[tuple[int, str, float, str, float]]:
    """Files on which another drafter gets more tokens out of a pass than `auto` with the same knowledge."""
    for at in range(len(rows.get(AUTO, []))):
        for name, figures in rows.items():
            mine = f"{AUTO}{knowledge(name)}"
            if mine in rows and not name.startswith(AUTO):
                rates = figures[at]["tokens_per_pass"], rows[mine][at]["tokens_per_pass"]
                if rates[0] > rates[1]:
                    yield at + 1, name, rates[0], mine.removeprefix(OURS), rates[1]


def as_many_nodes(rows: Rows) -> list[tuple[str, list[tuple[int, float, float]]]]:
    """Drafters that get more tokens out of as many nodes than `auto`, its budgets taken in turns.

    Of each the files, with its tokens per pass and those of `auto`.
    """
    autos = [figures for name, figures in rows.items() if name.startswith(AUTO) and not knowledge(name)]
    found = []
    for name, figures in rows.items():
        if name.startswith(AUTO) or knowledge(name):
            continue
        files = []
        for at, rival in enumerate(figures):
            points = [(auto[at]["nodes_per_pass"], auto[at]["tokens_per_pass"]) for auto in autos]
            nodes, rates = zip(*envelope([(0.0, 1.0), *points]), strict=True)
            mine = float(np.interp(rival["nodes_per_pass"], nodes, rates))
            if mine < rival["tokens_per_pass"]:
                files.append((at + 1, rival["tokens_per_pass"], mine))
        if files:
            found.append((name, files))
    return found


def most_behind(files: list[tuple[int, float, float]]) -> float:
    """By how much the other drafter gets more tokens per pass, at most."""
    return max(rival / mine - 1 for _, rival, mine in files)


def most_fewer(files: list[tuple[int, float, float]]) -> float:
    """By how much `auto` gets fewer, at most."""
    return max((1 - mine / rival for _, rival, mine in files), default=0.0)


def envelope(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Upper envelope: the rates that budgets taken in turns reach; one that others taken in turns pass is left out."""
    upper: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while upper and upper[-1][0] == x and upper[-1][1] <= y:
            upper.pop()
        while len(upper) > 1 and (upper[-1][1] - upper[-2][1]) * (x - upper[-2][0]) <= (y - upper[-2][1]) * (
            upper[-1][0] - upper[-2][0]
        ):
            upper.pop()
        upper.append((x, y))
    return upper


def knowledge(name: str) -> str:
    """What a drafter knows beside the text so far, as the end of its name says."""
    return next((end for end in (KEPT, GIVEN, PHRASES) if name.endswith(end)), "")
