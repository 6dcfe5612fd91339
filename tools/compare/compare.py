"""Comparison with peers on recorded answers: tokens per pass, nodes and times of every peer and every preset.

::

    python tools/compare/compare.py TRACES/*.jsonl --tokenizer TOKENIZER.json [--native 'specbench*=OTHER.json']

Of every file, half of its groups are replayed (bounded by --limit rows and --tokens generated tokens, the same for all
drafters, --nodes drafted per pass at most); the answers of the other half are what drafters with `other answers given`
know: ours as a datastore, SuffixDecoding in its tree of all requests. A peer that cannot be fetched is skipped with its
reason. --native names other tokenizers for some files, --only drafters by parts of their names. The last line that is
printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "scripts"))

import harness
import numpy as np
from numpy.typing import NDArray
from peers import GIVEN, KEPT, PEERS, PHRASES, ArcticSuffix, ours
from sources import ARCTIC, VLLM, Skipped
from tokenizers import Tokenizer

from retrieve_spec.bench.replay import Replay, TraceRow, read_trace
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.presets import PRESETS
from retrieve_spec.errors import MissingSourceError

FEW_NODES = (8, 16)  # as many as the wider peers draft
PRICES = {f", a node at {price:.0%}": price for price in (0.02, 0.1, 0.2)}  # of a pass: auto sizes its own trees
NEED_STORE = ("rest", "hierarchy")
READ_STORE = ("auto", "sam", "adaptive-trigram", *NEED_STORE)
WARM_UP_TOKENS = 32
KNOWN_TOKENS = 400_000  # of other answers at most

Factory = Callable[[], Any]


class Workload(NamedTuple):
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
    lengths = [sum(map(len, generated(row))) for row in candidates]
    chosen = begun_within(candidates[:rows], lengths, tokens)
    answers = [answer for name in names[half:] for row in groups[name] for answer in generated(row)]
    known = begun_within(answers, [len(answer) for answer in answers], KNOWN_TOKENS)
    return Workload(chosen, sum(lengths[: len(chosen)]), known)


def begun_within(things: list[Any], lengths: list[int], most: int) -> list[Any]:
    """The first things, as long as those before them are shorter than so much together."""
    before = accumulate(lengths, initial=0)
    return [thing for thing, spent in zip(things, before, strict=False) if spent < most]


def generated(row: TraceRow) -> list[NDArray[np.int32]]:
    """What the model wrote of a conversation."""
    return [ids for ids, is_generated in row.segments if is_generated]


def build_store(workload: Workload, tokenizer: Tokenizer, scratch: Path) -> Any:
    """An open datastore of the answers that may be known, None when there are none."""
    if not workload.answers:
        return None
    source = scratch / "answers.jsonl"
    texts = tokenizer.decode_batch([answer.tolist() for answer in workload.answers], skip_special_tokens=False)
    source.write_text("".join(json.dumps({"output": text}) + "\n" for text in texts), encoding="utf-8")
    build_datastore(scratch / "store", Source(str(source), field="output"), tokenizer, workers=1)
    return open_datastore(scratch / "store", tokenizer=tokenizer)


def drafters(only: list[str], workload: Workload, store: Any) -> dict[str, Factory]:
    """Factories of peers and of our presets, by name."""
    found: dict[str, Factory] = dict(PEERS)
    for preset in PRESETS:
        if preset not in NEED_STORE:
            found[f"ours: {preset}"] = lambda preset=preset: ours(preset)
    for end in (*(f", {few} nodes" for few in FEW_NODES), *PRICES):
        found[f"ours: auto{end}"] = found["ours: auto"]
    found[f"ours: auto{PHRASES}"] = lambda: ours("auto", phrases=True)
    for preset in ("suffix", "auto"):
        found[f"ours: {preset}{KEPT}"] = lambda preset=preset: ours(preset, session=True, phrases=True)
    found[f"suffix-decoding tree, wide{GIVEN}"] = lambda: ArcticSuffix(
        tree=True, keep=False, factor=4.0, least=0.0, answers=workload.answers
    )
    stores = [store] if store is not None else []
    for preset in READ_STORE:
        found[f"ours: {preset}{GIVEN}"] = lambda preset=preset: ours(preset, datastores=stores)
    return {name: make for name, make in found.items() if not only or any(part in name for part in only)}


def measure_drafter(make: Factory, rows: list[TraceRow], nodes: int, price: float | None = None) -> dict[str, Any]:
    """Replay rows through one drafter; kernels are compiled on the beginning of the first."""
    first = TraceRow(rows[0].task, rows[0].prompt, [(rows[0].segments[0][0][:WARM_UP_TOKENS], True)])
    try:
        Replay(make(), nodes, price).run([first])
        return Replay(make(), nodes, price).run(rows)
    except (Skipped, MissingSourceError) as reason:
        return {"skipped": str(reason)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Replay every file through every drafter."""
    files = {}
    for path in map(Path, args.traces):
        tokenizer = harness.tokenizer_of(path.name, args.native, args.tokenizer)
        encoder, results = Tokenizer.from_file(tokenizer), {}
        with tempfile.TemporaryDirectory() as folder:
            workload = read_workload(path, encoder, args.limit, args.tokens)
            store = build_store(workload, encoder, Path(folder))
            for name, make in drafters(args.only, workload, store).items():
                print(f"{path.stem}: {name}", file=sys.stderr)
                few = next((n for n in FEW_NODES if name.endswith(f", {n} nodes")), args.nodes)
                price = next((PRICES[end] for end in PRICES if name.endswith(end)), None)
                results[name] = measure_drafter(make, workload.rows, few, price)
        files[path.stem] = {
            "rows": len(workload.rows),
            "tokens": workload.tokens,
            "known_tokens": sum(map(len, workload.answers)),
            "tokenizer": Path(tokenizer).name,
            "drafters": results,
        }
    limits = {name: getattr(args, name) for name in ("nodes", "limit", "tokens")}
    return {"peers": [ARCTIC, VLLM], **limits, "files": files}


def main() -> None:
    """Measure and print."""
    limits = {"nodes": 60, "limit": 60, "tokens": 20_000}
    harness.run(measure, __doc__, "traces+", tokenizer=str, **limits, native=[""], only=[""])


if __name__ == "__main__":
    main()
