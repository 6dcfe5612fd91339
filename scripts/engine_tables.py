"""Tables of drafting inside engines of others from docs/data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from published import block, markdown_table

TABLES: dict[str, Callable[[], str]] = {}
"""What can stand between the marks of a page."""
METHODS = {"none": "no drafts", "ngram": "n-grams", "suffix": "suffix decoding", "ours": "ours", "store": "ours, store"}
TOKENS = {"ngram": 8, "suffix": 16, "ours": 16, "store": 16}
"""How many tokens a method drafts at most where its name does not say it, as in `ours:32`."""


@block(TABLES, "vllm")
def vllm(made: dict[str, Any]) -> list[str]:
    """Speed of every method by temperature and number of requests, then what a step accepts and takes to draft."""
    rows = sorted(made["rows"], key=lambda row: (row["temperature"], row["concurrency"]))
    names = list(dict.fromkeys(name for row in rows for name in row["methods"]))
    drafting = [name for name in names if name != "none"]
    lines = []
    for title, figure, shown in (
        ("Tokens per second", "tokens_per_second", names),
        ("Tokens per request and step", "tokens_per_row", drafting),
        ("What `propose` takes per request and step, in microseconds", "propose_ms_per_row", drafting),
    ):
        cells = []
        for row in rows:
            values = [row["methods"].get(name, {}).get(figure) for name in shown]
            cells.append([_temperature(row), str(row["concurrency"]), *(_cell(figure, value) for value in values)])
        lines += [f"{title}:", "", *markdown_table(["", "requests at a time", *map(_label, shown)], cells), ""]
    return lines[:-1]


def _label(method: str) -> str:
    name, _, tokens = method.partition(":")
    return METHODS[name] if name == "none" else f"{METHODS[name]} ({tokens or TOKENS[name]})"


def _cell(figure: str, value: float | None) -> str:
    if value is None:
        return ""
    if figure == "tokens_per_row":
        return f"{value:.2f}"
    return f"{1e3 * value:.0f}" if "_ms_" in figure else f"{value:,.0f}"


@block(TABLES, "vllm-replay")
def vllm_replay(made: dict[str, Any]) -> list[str]:
    """Tokens per step on recorded conversations, of vLLM's suffix decoding and ours."""
    rows = []
    for file, states in made["files"].items():
        for state, found in states.items():
            shown = [f"{found['suffix']:.2f}", f"{found['ours']:.2f}", f"{found['ours'] / found['suffix']:.2f}"]
            rows.append([file, state, f"{found['turns']:,}", f"{found['tokens']:,}", *shown])
    head = ["recorded runs", "what is known of others", "answers", "tokens", "suffix decoding", "ours", "ratio"]
    return [*markdown_table(head, rows), "", f"Both draft {made['tokens']} tokens at most."]


def _temperature(row: dict[str, Any]) -> str:
    return f"T = {row['temperature']:g}" if row["temperature"] else "greedy"
