"""Texts that stay what they are, for prompts of other engines: their greedy text turns on rounding at near ties."""

from __future__ import annotations

import json
from pathlib import Path

_ANSWERS = Path(__file__).parents[1] / "bench" / "guard" / "answers.jsonl"


def recorded_texts() -> list[str]:
    """Prompts of the guard with their answers, about 500 tokens of the bundled model each."""
    rows = map(json.loads, _ANSWERS.read_text(encoding="utf-8").splitlines())
    return [row["prompt"] + row["output"] for row in rows]
