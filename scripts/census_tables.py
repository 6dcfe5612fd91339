"""Tables of the census of architectures (docs/data/census.json), for docs/conformance.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from published import block, markdown_table

MAPPINGS = {"causal": "Causal language models", "image": "Image and text to text", "seq2seq": "Sequence to sequence"}
TABLES: dict[str, Callable[[], str]] = {}
"""What can stand between the marks of a page."""


def _counted(entries: list[dict[str, Any]], call: str) -> list[int]:
    return [sum(entry[call] == mode for entry in entries) for mode in ("tree", "chain", "plain", "delegated")]


@block(TABLES, "census", name="census-counts", alone=False)
def counts(made: dict[str, Any]) -> list[str]:
    """How many entries of each mapping are decoded how."""
    rows = []
    for mapping, title in MAPPINGS.items():
        entries = [entry for entry in made["entries"] if entry["mapping"] == mapping]
        text, shown = _counted(entries, "text"), _counted(entries, "picture")
        wrong = sum(bool(entry["wrong"]) for entry in entries)
        rows.append([title, *map(str, [len(entries), sum(text), *text, wrong, sum(shown), *shown[:2]])])
    head = ["mapping", "entries", "decode text", "trees", "chains", "plain", "left to `generate`", "wrong"]
    return markdown_table([*head, "with a picture: tried", "trees", "chains"], rows)


@block(TABLES, "census", alone=False)
def entries(made: dict[str, Any]) -> list[str]:
    """Every entry: those with trees by name, the others with why."""
    lines = []
    for mapping, title in MAPPINGS.items():
        known = [entry for entry in made["entries"] if entry["mapping"] == mapping]
        trees = ", ".join(entry["name"] for entry in known if entry["text"] == "tree")
        pictures = ", ".join(entry["name"] for entry in known if entry["picture"] in ("tree", "chain"))
        others = [entry for entry in known if entry["text"] != "tree"]
        lines += [f"**{title}.** Trees: {trees}.", ""]
        if pictures:
            lines += [f"Drafted for behind a picture: {pictures}.", ""]
        rows = [[entry["name"], entry["text"], entry["why"].replace("|", "/")] for entry in others]
        lines += [*markdown_table(["others", "how", "why"], rows), ""]
    return lines
