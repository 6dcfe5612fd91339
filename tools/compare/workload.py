"""Workload of one file of recorded answers: the rows that are replayed, and what drafters may know before."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.bench.traces import TraceRow, read_trace

KNOWN_TOKENS = 400_000  # of other answers at most


@dataclass(frozen=True, slots=True)
class Workload:
    """What of a file is replayed.

    Attributes
    ----------
    rows
        Conversations to replay, in the order of the file.
    tokens
        Their generated tokens.
    answers
        Token ids of answers of other groups, one array each.
    texts
        The same answers.
    """

    rows: list[TraceRow]
    tokens: int
    answers: list[NDArray[np.int32]]
    texts: list[str]


def read_workload(path: Path, tokenizer: Tokenizer, rows: int, tokens: int, scratch: Path) -> Workload:
    """Split a file by its leakage groups into halves: one is replayed, the answers of the other may be known.

    Parameters
    ----------
    path
        A trace; `group` of a row says which rows belong together (each row alone where there is none).
    rows, tokens
        Rows replayed and generated tokens at most, drawn with a fixed seed; a row that is begun is replayed whole.
    scratch
        Folder for the chosen lines.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    parsed = [json.loads(line) for line in lines]
    groups = sorted({_group(row, i) for i, row in enumerate(parsed)})
    random.Random(0).shuffle(groups)
    replayed = set(groups[: (len(groups) + 1) // 2])
    order = list(range(len(lines)))
    random.Random(1).shuffle(order)
    mine = [i for i in order if _group(parsed[i], i) in replayed and not (parsed[i].get("meta") or {}).get("loop")]
    chosen: list[int] = []
    spent = 0
    for i in mine[:rows]:
        if spent < tokens:
            chosen.append(i)
            spent += sum(len(_ids(tokenizer, text)) for text in _generated(parsed[i]))
    picked = scratch / path.name
    picked.write_text("".join(lines[i] + "\n" for i in sorted(chosen)), encoding="utf-8")
    texts = [text for i in order if _group(parsed[i], i) not in replayed for text in _generated(parsed[i])]
    answers, known = [], 0
    for text in texts:
        if known >= KNOWN_TOKENS:
            break
        answers.append(_ids(tokenizer, text))
        known += len(answers[-1])
    return Workload(list(read_trace(picked, tokenizer)), spent, answers, texts[: len(answers)])


def build_store(workload: Workload, tokenizer: Tokenizer, scratch: Path) -> Any:
    """An open datastore of the answers that may be known, None when there are none."""
    from retrieve_spec.datastore.build import build_datastore
    from retrieve_spec.datastore.sources import Source
    from retrieve_spec.datastore.store import open_datastore

    if not workload.answers:
        return None
    source = scratch / "answers.jsonl"
    source.write_text("".join(json.dumps({"output": text}) + "\n" for text in workload.texts), encoding="utf-8")
    build_datastore(scratch / "store", Source(str(source), field="output"), tokenizer, workers=1)
    return open_datastore(scratch / "store", tokenizer=tokenizer)


def _group(row: dict[str, Any], number: int) -> str:
    return str(row.get("group") or f"row {number}")


def _generated(row: dict[str, Any]) -> list[str]:
    return [row["output"], *(generated for _, generated in row.get("more") or [])]


def _ids(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
