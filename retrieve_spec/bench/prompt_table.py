"""Table `prompts.csv`: a line for each answer, for spreadsheets and for those who trust no median."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrieve_spec.bench.results import PARTS, Record


def write_prompt_table(path: Path, records: Sequence[Record]) -> None:
    """Write one line per run, prompt and method; a cell stays empty where a method does not say."""
    lines = [prompt_line(record) for record in records]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def prompt_line(record: Record) -> dict[str, Any]:
    """One answer's figures: counts, milliseconds over all turns, and where it leaves the reference's answer."""
    left = record.divergence or {"turn": "", "position": "", "gap": ""}
    return {
        "run": record.run,
        "prompt": record.prompt,
        "task": record.task,
        "method": record.method,
        "prompt_tokens": record.prompt_tokens,
        "new_tokens": record.new_tokens,
        "passes": record.passes,
        "tokens_per_pass": round(record.tokens_per_pass, 4),
        "nodes": "" if record.nodes is None else record.nodes,
        "wall_ms": round(record.seconds * 1e3, 3),
        "first_token_ms": round(record.first_token_s * 1e3, 3),
        **{f"{part}_ms": round(record.split_ms[part], 3) if part in record.split_ms else "" for part in PARTS},
        "diverges_in_turn": left["turn"],
        "diverges_at_token": left["position"],
        "top_2_gap": left["gap"],
        "looping": int(record.looping),
        **{f"peak_{name}_bytes": size for name, size in record.memory.items()},
    }
