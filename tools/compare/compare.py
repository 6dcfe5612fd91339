"""Comparison with peers on recorded answers: tokens per pass, nodes and times of every peer and every preset.

::

    python tools/compare/compare.py TRACES/*.jsonl --tokenizer TOKENIZER.json [--native 'specbench*=OTHER.json']

Of every file, half of its groups are replayed (bounded by --limit rows and --tokens generated tokens, the same for all
drafters, --nodes drafted per pass at most); the answers of the other half are what drafters with `other answers given`
know: ours as a datastore, SuffixDecoding in its tree of all requests. A peer that cannot be had is skipped with its
reason. --native names other tokenizers for some files, --only drafters by parts of their names. With --out, what is
done is kept, and --resume goes on. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "scripts"))

import harness
from peers import GIVEN, KEPT, PEERS, PHRASES, ArcticSuffix, ours
from sources import ARCTIC, LLAMA, VLLM, Skipped
from tokenizers import Tokenizer
from tqdm import tqdm
from workload import Workload, build_store, read_workload

from retrieve_spec.bench.machine import OtherWork, machine_facts
from retrieve_spec.bench.replay import Replay, TraceRow
from retrieve_spec.drafting.presets import PRESETS
from retrieve_spec.errors import MissingSourceError

FEW_NODES = (8, 16)  # as many as the wider peers draft
PRICES = {f", a node at {price:.0%}": price for price in (0.02, 0.1, 0.2)}  # of a pass: auto sizes its own trees
NEED_STORE = ("rest", "hierarchy")
READ_STORE = ("auto", "sam", "adaptive-trigram", *NEED_STORE)
WARM_UP_TOKENS = 32
_SAME = ("nodes", "limit", "tokens")

Factory = Callable[[], Any]


def drafters(only: list[str], workload: Workload, store: Any) -> dict[str, Factory]:
    """Factories of peers and of our presets, by name."""
    found: dict[str, Factory] = dict(PEERS)
    for preset in PRESETS:
        if preset not in NEED_STORE:
            found[f"ours: {preset}"] = lambda preset=preset: ours(preset)
    for few in FEW_NODES:
        found[f"ours: auto, {few} nodes"] = found["ours: auto"]
    for price in PRICES:
        found[f"ours: auto{price}"] = found["ours: auto"]
    found[f"ours: auto{PHRASES}"] = lambda: ours("auto", phrases=True)
    for preset in ("suffix", "auto"):
        found[f"ours: {preset}{KEPT}"] = lambda preset=preset: ours(preset, session=True, phrases=True)
    found[f"suffix-decoding tree, wide{GIVEN}"] = lambda: ArcticSuffix(
        tree=True, keep=False, factor=4.0, least=0.0, answers=workload.answers
    )
    for preset in READ_STORE:
        stores = [store] if store is not None else []
        found[f"ours: {preset}{GIVEN}"] = lambda preset=preset, stores=stores: ours(preset, datastores=stores)
    return {name: make for name, make in found.items() if not only or any(part in name for part in only)}


def measure(make: Factory, rows: list[TraceRow], nodes: int, price: float | None = None) -> dict[str, Any]:
    """Replay rows through one drafter; kernels are compiled on the beginning of the first."""
    first = TraceRow(rows[0].task, rows[0].prompt, [(rows[0].segments[0][0][:WARM_UP_TOKENS], True)])
    try:
        Replay(make(), nodes, price).run([first])
        return Replay(make(), nodes, price).run(rows)
    except (Skipped, MissingSourceError) as reason:
        return {"skipped": str(reason)}


def measure_file(path: Path, args: argparse.Namespace, tokenizer: str, bar: Any) -> dict[str, Any]:
    """Everything of one file."""
    with tempfile.TemporaryDirectory() as folder:
        encoder = Tokenizer.from_file(tokenizer)
        workload = read_workload(path, encoder, args.limit, args.tokens, Path(folder))
        store = build_store(workload, encoder, Path(folder))
        results = {}
        for name, make in drafters(args.only, workload, store).items():
            bar.set_postfix_str(f"{path.stem}: {name}")
            few = next((n for n in FEW_NODES if name.endswith(f", {n} nodes")), args.nodes)
            price = next((PRICES[end] for end in PRICES if name.endswith(end)), None)
            results[name] = measure(make, workload.rows, few, price)
            bar.update()
        return {
            "rows": len(workload.rows),
            "tokens": workload.tokens,
            "known_tokens": sum(map(len, workload.answers)),
            "tokenizer": Path(tokenizer).name,
            "drafters": results,
        }


def shown_command(words: list[str]) -> str:
    """The command that made the figures, files by their names: where they lie is no one's business."""

    def shown(word: str) -> str:
        pattern, equals, path = word.rpartition("=")
        return pattern + equals + Path(path).name if Path(path).is_absolute() else word

    traces = [word for word in words if word.endswith(".jsonl") and Path(word).exists()]
    rest = [shown(word) for word in words if word not in traces]
    files = [Path(traces[0]).name] if len(traces) == 1 else ["TRACES/*.jsonl"]
    return shlex.join(["python", "tools/compare/compare.py"]) + f" {' '.join(files)} {shlex.join(rest)}"


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """The comparison with the files that an interrupted one with the same limits has done."""
    made = {
        "machine": machine_facts(),
        "peers": [ARCTIC, VLLM, LLAMA],
        "command": shown_command([word for word in sys.argv[1:] if word != "--resume"]),
        **{name: getattr(args, name) for name in _SAME},
        "files": {},
    }
    if args.resume and Path(args.out).is_file():
        old = json.loads(Path(args.out).read_text(encoding="utf-8"))
        if all(old.get(name) == made[name] for name in _SAME):
            return {**made, "machine": old["machine"], "files": old["files"]}
    return made


def main() -> None:
    """Replay every file through every drafter."""
    limits = {"nodes": 60, "limit": 60, "tokens": 20_000}
    places = {"native": [""], "only": [""], "out": "", "resume": False}
    args = harness.arguments(__doc__, "traces+", tokenizer=str, **limits, **places)
    native = [entry.split("=", 1) for entry in filter(None, args.native)]
    made, out = begun(args), Path(args.out)
    todo = [path for path in map(Path, args.traces) if path.stem not in made["files"]]
    number = len(drafters(args.only, Workload([], 0, [], []), None))
    others, machine = OtherWork(), made["machine"]
    with tqdm(total=len(todo) * number, unit="replay") as bar:
        for path in todo:
            file = next((own for pattern, own in native if fnmatch.fnmatch(path.name, pattern)), args.tokenizer)
            made["files"][path.stem] = measure_file(path, args, file, bar)
            machine["others"] = max(others.cores() or 0.0, machine.get("others", 0.0))
            if args.out:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(made) + "\n", encoding="utf-8")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
