"""Measures whole builds, from text to a store: tokens per second by number of workers, memory of all their processes.

    python scripts/bench_build.py FOLDER [--tokens 100e6] [--workers 1 2] [--rounds 1] [--planner 1e6]

The text is the Python source below FOLDER; where that is not enough, copies of its files follow in which one line in
ten was exchanged for another of the corpus. Each number of workers builds it with the command itself, in turn, a round
after another; memory is what the command and its children hold together (shared pages counted once), looked at twice a
second. `--planner N` tells what the step that sees all documents holds of N documents, and the list of files of a file.
The last line is one JSON object; 100 M tokens take some seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from retrieve_spec.bench.machine import machine_facts
from retrieve_spec.datastore.cut import Choice
from retrieve_spec.datastore.documents import Row
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.shards import file_shards
from retrieve_spec.datastore.sort import suffix_array
from retrieve_spec.datastore.sources import Source, list_files
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.work import WorkFolder

COMMAND = "from retrieve_spec.cli import main; main()"
BYTES_PER_TOKEN = 3.9
SHARD = 1000


def write_corpus(folder: Path, out: Path, size: int) -> None:
    """Write JSON Lines of about so many bytes of text."""
    texts = [path.read_text(errors="replace") for path in sorted(folder.rglob("*.py")) if path.is_file()]
    chance = random.Random(0)
    lines = [line for text in texts[:: max(1, len(texts) // 2000)] for line in text.splitlines(keepends=True)]
    written, real = 0, sum(map(len, texts))
    with out.open("w") as file:
        while written < size:
            for text in texts:
                copy = text if written < real else changed(text, lines, chance)
                file.write(json.dumps({"text": copy}) + "\n")
                written += len(text)
                if written >= size:
                    break


def changed(text: str, lines: list[str], chance: random.Random) -> str:
    """A copy of a text in which one line in ten is another."""
    return "".join(chance.choice(lines) if chance.random() < 0.1 else one for one in text.splitlines(keepends=True))


def family(top: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except (OSError, IndexError):
            continue
    found = [top]
    for one in found:
        found += parents.get(one, [])
    return found


def held(top: int) -> int:
    """Bytes of memory that a process and those below it hold, each shared page once."""
    total = 0
    for process in family(top):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return total


def build(corpus: Path, store: Path, workers: int) -> dict[str, Any]:
    """Build with the command; wall and processor seconds, and memory."""
    shutil.rmtree(store, ignore_errors=True)
    command = [sys.executable, "-c", COMMAND, "build", str(store), str(corpus), "--tokenizer", "reference", "-q"]
    before, began, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as said:  # a pipe would fill: what was skipped may be much
        with subprocess.Popen([*command, "--workers", str(workers), "--json"], stdout=said) as child:
            while child.poll() is None:
                peak = max(peak, held(child.pid))
                time.sleep(0.5)
        wall = time.perf_counter() - began
        said.seek(0)
        report = json.loads(said.read().splitlines()[-1])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "workers": workers,
        "tokens": report["tokens"],
        "segments": report["segments"],
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "stages_s": report["seconds"],
        "tokens_per_second": report["tokens"] / wall,
        "anonymous_memory_gb": peak / 1e9,
        "content": read_manifest(store).content,
    }


def sorting(store: Path) -> dict[str, float]:
    """Suffix sorting of the first segment, on one core."""
    tokens = np.array(open_datastore(store).segments[0].tokens)
    began = time.process_time()
    suffix_array(tokens)
    seconds = time.process_time() - began
    return {"tokens": len(tokens), "cpu_s": seconds, "tokens_per_cpu_second": len(tokens) / seconds}


class _Shard:
    """Documents of which only the rows are there."""

    left_out: frozenset[int] = frozenset()
    skipped: tuple[()] = ()

    def __init__(self, first: int, documents: int) -> None:
        names = (f"{i:x}".encode() for i in range(first, first + documents))
        self.rows = [Row("a/path.py", "", "s", sha256(name).hexdigest(), 100) for name in names]


def planner(documents: int, folder: Path) -> dict[str, float]:
    """Bytes per file of listing them and making shards, and bytes per document of the cut."""
    few = min(documents, 20_000)
    for i in range(few):
        path = folder / "files" / f"folder{i % 100:03d}" / f"a_module_of_some_length_{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * 600)
    tracemalloc.start()
    sources = (Source(str(folder / "files")),)
    shards = sum(1 for _ in _inputs(sources, folder))
    listing = tracemalloc.get_traced_memory()[1] / few
    tracemalloc.stop()
    tracemalloc.start()
    choice = Choice(set(), None)
    for rank, first in enumerate(range(0, documents, SHARD)):
        choice.take(rank, _Shard(first, min(SHARD, documents - first)))  # type: ignore[arg-type]
    cut = choice.cut(1 << 26)
    cutting = tracemalloc.get_traced_memory()[1] / documents
    tracemalloc.stop()
    return {
        "files": few,
        "shards": shards,
        "listing_bytes_per_file": listing,
        "documents": documents,
        "segments": len(cut.segments),
        "cut_bytes_per_document": cutting,
    }


def _inputs(sources: tuple[Source, ...], folder: Path) -> Iterator[dict[str, Any]]:
    return file_shards(WorkFolder(folder), list_files(sources))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with Python source")
    parser.add_argument("--tokens", type=float, default=100e6, help="size of the corpus; 0 builds nothing")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--planner", type=float, default=1e6, help="documents; 0 for none")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    facts = {"benchmark": "build", "machine": machine_facts(), "cores": os.cpu_count()}
    result: dict[str, Any] = dict(facts)
    try:
        if options.tokens:
            write_corpus(options.folder, folder / "corpus.jsonl", int(options.tokens * BYTES_PER_TOKEN))
            result["builds"] = [
                build(folder / "corpus.jsonl", folder / "store", workers)
                for _ in range(options.rounds)
                for workers in options.workers
            ]
            assert len({one["content"] for one in result["builds"]}) == 1, "the store depends on the workers"
            result["sorting"] = sorting(folder / "store")
        if options.planner:
            result["planner"] = planner(int(options.planner), folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
