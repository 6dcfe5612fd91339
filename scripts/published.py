"""Data files of docs/data, and the lines that every published table of them shares: figures, machine, command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from checkout import ROOT

DATA = ROOT / "docs" / "data"


def measured(name: str) -> dict[str, Any] | None:
    """What `scripts/reproduce` wrote, if it did."""
    path = DATA / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def missing(part: str) -> str:
    """What stands where a table will be."""
    return f"Not measured yet: `scripts/reproduce {part}`.\n"


def facts(machine: dict[str, Any]) -> str:
    """Machine, versions, commit and date in one line."""
    from retrieve_spec.bench.machine import summary

    return summary(machine)


def origin(made: dict[str, Any]) -> list[str]:
    """Where a table comes from: machine, versions, commit and date, then the command."""
    return [facts(made["machine"]), "", f"`{made['command']}`", ""]


Lines = Callable[[dict[str, Any]], Iterable[str]]


def block(
    tables: dict[str, Callable[[], str]], data: str, *, part: str = "", name: str = "", alone: bool = True
) -> Callable[[Lines], Callable[[], str]]:
    """A decorator: the function turns the data file `data` into lines, and is put among `tables` as a block of a page.

    `part` of `scripts/reproduce` makes the file, and `name` is the block's, where they are called otherwise. A block
    that does not stand alone has its origin in another one.
    """

    def register(lines: Lines) -> Callable[[], str]:
        def text() -> str:
            made = measured(data)
            if made is None:
                return missing(part or data)
            return "\n".join([*(origin(made) if alone else ()), *lines(made), ""])

        tables[name or data] = text
        return text

    return register


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def two(value: float) -> str:
    """A number with two digits behind the first one that counts: 1,234; 12.3; 0.12."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ratio(value: dict[str, float]) -> str:
    """A ratio and its interval."""
    return f"{value['value']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def millions(value: float) -> str:
    """A number in millions."""
    return f"{two(value / 1e6)} M"
