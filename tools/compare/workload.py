"""Workload of one file of recorded answers: the rows that are replayed, and what drafters may know before."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.bench.replay import TraceRow, read_trace

KNOWN_TOKENS = 400_000  # of other answers at most


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to replay, how many generated tokens they have, and token ids of answers of other groups."""

    rows: list[TraceRow]
    tokens: int
    answers: list[NDArray[np.int32]]


def read_workload(path: Path, tokenizer: Tokenizer, rows: int, tokens: int) -> Workload:
    """Split a file by its leakage groups into halves: one is replayed, the answers of the other may be known.

    Rows replayed and generated tokens are bounded, drawn with a fixed seed; a row that is begun is replayed whole.
    """
    groups: dict[str, list[TraceRow]] = defaultdict(list)
    for row in read_trace(path, tokenizer):
        groups[row.group].append(row)
    names = sorted(groups)
    random.Random(0).shuffle(names)
    half = (len(names) + 1) // 2
    candidates = [row for name in names[:half] for row in groups[name]]
    random.Random(1).shuffle(candidates)
    chosen: list[TraceRow] = []
    spent = known = 0
    for row in candidates[:rows]:
        if spent < tokens:
            chosen.append(row)
            spent += sum(map(len, generated(row)))
    answers: list[NDArray[np.int32]] = []
    for answer in (answer for name in names[half:] for row in groups[name] for answer in generated(row)):
        if known < KNOWN_TOKENS:
            answers.append(answer)
            known += len(answer)
    return Workload(chosen, spent, answers)


def generated(row: TraceRow) -> list[NDArray[np.int32]]:
    """What the model wrote of a conversation."""
    return [ids for ids, is_generated in row.segments if is_generated]


def build_store(workload: Workload, tokenizer: Tokenizer, scratch: Path) -> Any:
    """An open datastore of the answers that may be known, None when there are none."""
    from retrieve_spec.datastore.build import build_datastore
    from retrieve_spec.datastore.sources import Source
    from retrieve_spec.datastore.store import open_datastore

    if not workload.answers:
        return None
    source = scratch / "answers.jsonl"
    texts = tokenizer.decode_batch([answer.tolist() for answer in workload.answers], skip_special_tokens=False)
    source.write_text("".join(json.dumps({"output": text}) + "\n" for text in texts), encoding="utf-8")
    build_datastore(scratch / "store", Source(str(source), field="output"), tokenizer, workers=1)
    return open_datastore(scratch / "store", tokenizer=tokenizer)
