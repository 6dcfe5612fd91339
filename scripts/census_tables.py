"""Tables of the census of architectures (docs/data/census.json), for docs/conformance.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "docs" / "data" / "census.json"
MAPPINGS = {"causal": "Causal language models", "image": "Image and text to text", "seq2seq": "Sequence to sequence"}
_NOT_COUNTED = ("not built", "plain raises")


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))["entries"]
    return entries


def _counted(entries: list[dict[str, Any]], mode: str, call: str) -> int:
    return sum(entry[call] == mode for entry in entries)


def counts() -> str:
    """How many entries of each mapping are decoded how."""
    lines = [
        "| mapping | entries | decode text | trees | chains | plain | left to `generate` | wrong | "
        "with a picture: tried | trees | chains |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mapping, title in MAPPINGS.items():
        entries = [entry for entry in _entries() if entry["mapping"] == mapping]
        text = [_counted(entries, mode, "text") for mode in ("tree", "chain", "plain", "delegated")]
        shown = [_counted(entries, mode, "picture") for mode in ("tree", "chain", "plain", "delegated")]
        wrong = sum(bool(entry["wrong"]) for entry in entries)
        cells = [title, len(entries), sum(text), *text, wrong, sum(shown), *shown[:2]]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def entries() -> str:
    """Every entry: those with trees by name, the others with why."""
    parts = []
    for mapping, title in MAPPINGS.items():
        known = [entry for entry in _entries() if entry["mapping"] == mapping]
        trees = [entry["name"] for entry in known if entry["text"] == "tree"]
        rows = [
            f"| {entry['name']} | {entry['text']} | {entry['why'].replace('|', '/')} |"
            for entry in known
            if entry["text"] != "tree"
        ]
        pictures = [entry["name"] for entry in known if entry["picture"] in ("tree", "chain")]
        parts += [f"**{title}.** Trees: {', '.join(trees)}.", ""]
        if pictures:
            parts += [f"Drafted for behind a picture: {', '.join(pictures)}.", ""]
        parts += ["| others | how | why |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


TABLES: dict[str, Callable[[], str]] = {"census-counts": counts, "census": entries}
