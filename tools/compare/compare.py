"""Turn recorded answers into a table of tokens per pass, nodes and times for every peer and every preset of ours.

::

    python tools/compare/compare.py TRACES/*.jsonl --tokenizer TOKENIZER.json [--native 'specbench*=OTHER.json']

A peer that cannot be had is skipped and the reason stands in the table. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from peers import PEERS, ours
from sources import Skipped
from tokenizers import Tokenizer
from tqdm import tqdm

from retrieve_spec.bench.machine import machine_facts, summary
from retrieve_spec.bench.replay import Replay, TraceRow, read_trace
from retrieve_spec.drafting.presets import PRESETS
from retrieve_spec.errors import MissingSourceError

KEPT = ", session kept"
FEW_NODES = (8, 16)  # as many as the wider peers draft


def parse(words: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json for the traces")
    parser.add_argument("--native", action="append", default=[], metavar="PATTERN=FILE", help="another for some files")
    parser.add_argument("--nodes", type=int, default=60, help="draft nodes per pass at most")
    parser.add_argument("--limit", type=int, default=50, help="rows of each file, in order")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only drafters whose name has this")
    parser.add_argument("--out", type=Path, help="write the JSON here and a table beside it")
    return parser.parse_args(words)


def drafters(only: list[str]) -> dict[str, Any]:
    """Factories of peers and of our presets, by name; presets that need a store are left out."""
    found: dict[str, Any] = dict(PEERS)
    for preset in PRESETS:
        found[f"ours: {preset}"] = lambda preset=preset: ours(preset, session=False)
    found[f"ours: auto{KEPT}"] = lambda: ours("auto", session=True)
    found |= {f"ours: auto, {few} nodes": found["ours: auto"] for few in FEW_NODES}
    return {name: make for name, make in found.items() if not only or any(part in name for part in only)}


def measure(make: Any, rows: list[TraceRow], nodes: int) -> dict[str, Any]:
    """Replay one file through one drafter; compiled on the first row, which is then replayed again."""
    try:
        Replay(make(), nodes).run(rows[:1])
        return Replay(make(), nodes).run(rows)
    except (Skipped, MissingSourceError) as reason:
        return {"skipped": str(reason)}


def table(results: dict[str, dict[str, Any]], facts: str, command: str) -> str:
    """Tokens per pass by file, then nodes and times over all files."""
    names = list(next(iter(results.values())))
    there = [name for name in names if "skipped" not in next(iter(results.values()))[name]]
    lines = [f"{facts}\n\n`{command}`\n", "Tokens per pass:\n", "| file | " + " | ".join(there) + " |"]
    lines.append("|---" * (len(there) + 1) + "|")
    for file, by_name in results.items():
        cells = [f"{by_name[name]['tokens_per_pass']:.2f}" for name in there]
        lines.append(f"| {file} | " + " | ".join(cells) + " |")
    lines += ["\nNodes per pass and median microseconds (mean over files):\n", "| drafter | nodes | propose | update |"]
    lines.append("|---|---|---|---|")
    for name in names:
        rows = [by_name[name] for by_name in results.values()]
        if "skipped" in rows[0]:
            lines.append(f"| {name} | skipped: {rows[0]['skipped']} | | |")
            continue
        means = [
            sum(r["nodes_per_pass"] for r in rows) / len(rows),
            sum(r["propose_us"]["p50"] for r in rows) / len(rows),
            sum(r["observe_us"]["p50"] for r in rows) / len(rows),
        ]
        lines.append(f"| {name} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    return "\n".join(lines) + "\n"


def shown_command(words: list[str]) -> str:
    """The command that made the figures, files by their names: where they lie is no one's business."""

    def shown(word: str) -> str:
        pattern, equals, path = word.rpartition("=")
        return pattern + equals + Path(path).name if Path(path).exists() else word

    return shlex.join(["python", "tools/compare/compare.py", *map(shown, words)])


def main(words: list[str] | None = None) -> None:
    """Replay every file through every drafter."""
    args = parse(words)
    native = [entry.split("=", 1) for entry in args.native]
    chosen = drafters(args.only)
    results: dict[str, dict[str, Any]] = {}
    with tqdm(total=len(args.traces) * len(chosen), unit="replay") as bar:
        for path in args.traces:
            file = next((own for pattern, own in native if fnmatch.fnmatch(path.name, pattern)), args.tokenizer)
            rows = list(read_trace(path, Tokenizer.from_file(file), args.limit))
            results[path.stem] = {}
            for name, make in chosen.items():
                bar.set_postfix_str(f"{path.stem}: {name}")
                few = next((n for n in FEW_NODES if name.endswith(f", {n} nodes")), args.nodes)
                results[path.stem][name] = measure(make, rows, few)
                bar.update()
    facts = machine_facts()
    command = shown_command(words if words is not None else sys.argv[1:])
    made = {"machine": facts, "command": command, "nodes": args.nodes, "limit": args.limit, "files": results}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(made, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(table(results, summary(facts), command))
    print(json.dumps(made))


if __name__ == "__main__":
    main()
