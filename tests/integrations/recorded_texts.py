"""Texts that stay what they are, for prompts of other engines: their greedy text turns on rounding at near ties."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

_ANSWERS = Path(__file__).parents[1] / "bench" / "guard" / "answers.jsonl"


def recorded_texts() -> list[str]:
    """Prompts of the guard with their answers, about 500 tokens of the bundled model each."""
    rows = map(json.loads, _ANSWERS.read_text(encoding="utf-8").splitlines())
    return [row["prompt"] + row["output"] for row in rows]


def token_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """64 prompts of token ids: of one token, of as many as a draft and one more, alike, longer than a step reads."""
    ids = [token for text in recorded_texts() for token in encode(text)]
    made = [ids[80 * i :][: (1, 9, 60, 200, 300)[i % 5]] for i in range(60)]
    return [*made, *made[2:6]]
