"""Spec-Bench answer files, as its own `speed.py` reads them.

One file per method and run; a line has the answers of one question with passes, new tokens, seconds and accepted
lengths per turn. Spec-Bench counts a baseline's tokens by tokenising its text again, less one; here ids are counted on
both sides, and both definitions of the speed-up are in `summary.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieve_spec.bench.results import Record


def write_answers(folder: Path, header: dict[str, Any], records: Sequence[Record]) -> list[Path]:
    """Write `METHOD.run-N.jsonl` for every method and run; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[Path, list[str]] = {}
    for record in records:
        path = folder / f"{re.sub('[:/]', '-', record.method)}.run-{record.run}.jsonl"
        lines.setdefault(path, []).append(json.dumps(answer_line(record, header)))
    for path, rows in lines.items():
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return list(lines)


def answer_line(record: Record, header: dict[str, Any]) -> dict[str, Any]:
    """One line of an answer file."""
    choice = {
        "index": 0,
        "turns": record.texts,
        "decoding_steps": record.turn_passes,
        "new_tokens": [len(ids) for ids in record.token_ids],
        "wall_time": record.turn_seconds,
        "accept_lengths": accept_lengths(record),
    }
    return {
        "question_id": int(record.prompt) if record.prompt.isdigit() else record.prompt,
        "category": record.task,
        "answer_id": f"{record.method}-{record.run}-{record.prompt}",
        "model_id": f"{header['model']}-{record.method}",
        "choices": [choice],
        "tstamp": header["machine"]["date"],
    }


def accept_lengths(record: Record) -> list[int]:
    """Tokens that each pass yielded, the bonus token included.

    Methods that do not say get their mean in whole tokens, so that the mean over passes stays exact.
    """
    if record.per_pass:
        first = [1] * len(record.token_ids)  # the prompt's pass of each turn yields one token
        return [*first, *(int(accepted) + 1 for _, accepted, *_ in record.per_pass)]
    if not record.passes:
        return []
    edges = np.linspace(0, record.new_tokens, record.passes + 1).round().astype(int)
    return [int(step) for step in np.diff(edges)]
