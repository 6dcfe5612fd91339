"""Markdown tables of a comparison with peers: tokens per pass by file, where `auto` loses, nodes and times."""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np
from peers import GIVEN, KEPT, PHRASES

from retrieve_spec.bench.machine import summary

OURS = "ours: "
SKIPPED = {"skipped": ""}


def table(made: dict[str, Any]) -> str:
    """All tables."""
    return "\n".join([*acceptance(made), "", *times(made)]) + "\n"


def acceptance(made: dict[str, Any]) -> list[str]:
    """Lines of what does not depend on the machine: tokens per pass by file, and where `auto` loses."""
    files: dict[str, Any] = made["files"]
    results = {stem: file["drafters"] for stem, file in files.items()}
    there = measured(results)
    lines = [
        *head(made),
        "| no. | file | rows | tokens | other answers, tokens | tokenizer |",
        "|---|---|---|---|---|---|",
    ]
    for number, (stem, file) in enumerate(files.items(), 1):
        facts = (str(number), stem, file["rows"], f"{file['tokens']:,}", f"{file['known_tokens']:,}", file["tokenizer"])
        lines.append(f"| {' | '.join(map(str, facts))} |")
    lines += ["", "**Tokens per pass**, the bonus token included, mean over files and by file:", ""]
    lines.append("| drafter | nodes | mean | " + " | ".join(map(str, range(1, len(files) + 1))) + " |")
    lines.append("|---" * (len(files) + 3) + "|")
    for name in there:
        rates = [by_name[name]["tokens_per_pass"] for by_name in results.values()]
        nodes = mean(by_name[name]["nodes_per_pass"] for by_name in results.values())
        each = " | ".join(f"{rate:.2f}" for rate in rates)
        lines.append(f"| {name} | {nodes:.1f} | {mean(rates):.2f} | {each} |")
    lines += ["", "Skipped:", ""]
    for name, reason in skipped(results).items():
        lines.append(f"- {name}: {reason}")
    lines += ["", "**Where `auto` loses**, drafters that know the same compared:", "", *losses(results, there)]
    lines += [
        "",
        "**Where `auto` gets less out of as many nodes** (its budgets taken in turns; nothing kept or given):",
        "",
    ]
    return lines + dearer(results, there)


def times(made: dict[str, Any]) -> list[str]:
    """Lines of what drafting takes."""
    results = {stem: file["drafters"] for stem, file in made["files"].items()}
    rows = sum(file["rows"] for file in made["files"].values())
    tokens = sum(file["tokens"] for file in made["files"].values())
    lines = [
        f"**Microseconds per pass** (means over files of medians; last: of 99 %), {rows} rows of {len(results)} files "
        f"with {tokens:,} generated tokens:",
        "",
        *head(made),
        "| drafter | nodes | propose | update | both | both, 99 % |",
        "|---|---|---|---|---|---|",
    ]
    for name in measured(results):
        of_files = [by_name[name] for by_name in results.values()]
        figures = [mean(row[what]["p50"] for row in of_files) for what in ("propose_us", "observe_us", "pass_us")]
        figures.append(mean(row["pass_us"]["p99"] for row in of_files))
        nodes = mean(row["nodes_per_pass"] for row in of_files)
        lines.append(f"| {name} | {nodes:.1f} | " + " | ".join(f"{value:,.0f}" for value in figures) + " |")
    return lines


def head(made: dict[str, Any]) -> list[str]:
    """Machine, versions of the peers, command."""
    return [f"{summary(made['machine'])}; {', '.join(made['peers'])}", "", f"`{made['command']}`", ""]


def measured(results: dict[str, dict[str, Any]]) -> list[str]:
    """Drafters that were run on every file."""
    first = next(iter(results.values()))
    return [name for name in first if all("skipped" not in by_name.get(name, SKIPPED) for by_name in results.values())]


def skipped(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Drafters that could not be run, with the reason."""
    rows = ((name, row) for by_name in results.values() for name, row in by_name.items())
    return {name: row["skipped"] for name, row in rows if "skipped" in row}


def losses(results: dict[str, dict[str, Any]], there: list[str]) -> list[str]:
    """Files on which another drafter gets more tokens out of a pass than `auto` with the same knowledge."""
    lines = []
    for number, (stem, by_name) in enumerate(results.items(), 1):
        for name in there:
            mine = f"{OURS}auto{knowledge(name)}"
            if mine not in there or name == mine or name.startswith(f"{OURS}auto"):
                continue
            rates = by_name[name]["tokens_per_pass"], by_name[mine]["tokens_per_pass"]
            if rates[0] > rates[1]:
                lines.append(f"- {number} ({stem}): {name} {rates[0]:.2f}, {mine.removeprefix(OURS)} {rates[1]:.2f}")
    return lines or ["- nowhere"]


def dearer(results: dict[str, dict[str, Any]], there: list[str]) -> list[str]:
    """Drafters that on some files get more tokens out of as many nodes as `auto`, its budgets taken in turns."""
    found = as_many_nodes({stem: {name: by_name[name] for name in there} for stem, by_name in results.items()})
    return [
        f"- {name}: " + ", ".join(f"{number} ({rival:.2f}, auto {mine:.2f})" for number, rival, mine in files)
        for name, files in found
    ] or ["- nowhere"]


def as_many_nodes(results: dict[str, dict[str, Any]]) -> list[tuple[str, list[tuple[int, float, float]]]]:
    """Of each such drafter the files, with its tokens per pass and those of `auto` with as many nodes."""
    there = measured(results)
    autos = [name for name in there if name.startswith(f"{OURS}auto") and not knowledge(name)]
    found = []
    for name in there:
        if name.startswith(f"{OURS}auto") or knowledge(name):
            continue
        files = []
        for number, by_name in enumerate(results.values(), 1):
            points = [(by_name[n]["nodes_per_pass"], by_name[n]["tokens_per_pass"]) for n in autos]
            nodes, rates = zip(*envelope([(0.0, 1.0), *points]), strict=True)
            rival = by_name[name]
            mine = float(np.interp(rival["nodes_per_pass"], nodes, rates))
            if mine < rival["tokens_per_pass"]:
                files.append((number, rival["tokens_per_pass"], mine))
        if files:
            found.append((name, files))
    return found


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
