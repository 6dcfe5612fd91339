"""Benchmark of what changes a store: a build by one and by more workers, and what a change of a large store takes.

    python scripts/bench_store_changes.py --text FOLDER [--tokens 100e6] [--workers 1 2] [--files 20000]

The text is the Python source below FOLDER. Every command is run as a user runs it, in a process of its own; the memory
is that of all its processes together (proportional set size, looked at several times a second). The folder that is
followed has `--files` files of that text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import numpy as np

from retrieve_spec.datastore.manifest import SegmentEntry, read_manifest, write_manifest
from retrieve_spec.datastore.segment import suffix_array
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore

COMMAND = [sys.executable, "-c", "import sys; from retrieve_spec.cli import main; sys.exit(main())"]
CHANGES = 5
"""How often a change is measured; the median counts."""


def command(*words: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Run a command of the library: what it says, and its seconds, processor seconds and memory in GB."""
    began, before = time.perf_counter(), os.times()
    peak = 0
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen([*COMMAND, *words, "--json"], stdout=out) as process:
        while process.returncode is None:
            peak = max(peak, sum(map(proportional_size, processes(process.pid))))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        seconds = time.perf_counter() - began
        out.seek(0)
        said = out.read()
    if process.returncode:
        sys.exit(f"{words[0]} failed with {process.returncode}")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return json.loads(said), {"seconds": seconds, "cpu_seconds": used, "memory_gb": peak / 1e9}


def processes(first: int) -> list[int]:
    """A process and all that it started."""
    found = [first]
    for one in found:
        for file in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, file.read_text().split())
            except OSError:
                continue  # it has ended
    return found


def proportional_size(process: int) -> int:
    """Memory of a process in bytes, shared pages in parts; 0 where the system does not say."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def building(folder: Path, text: str, tokens: int, workers: list[int]) -> dict[str, Any]:
    """Build the same store by different numbers of workers."""
    made, contents = {}, set()
    for number in workers:
        store = folder / f"store-{number}"
        words = ["--tokenizer", "reference", "--include", "**/*.py", "--max-tokens", str(tokens)]
        said, took = command("build", str(store), text, *words, "--workers", str(number))
        rate = said["tokens"] / took["seconds"]
        made[str(number)] = {**took, "stages": said["seconds"], "tokens_per_second": rate}
        contents.add(read_manifest(store).content)
    manifest = read_manifest(folder / f"store-{workers[-1]}")
    facts = {"tokens": manifest.tokens, "documents": manifest.documents, "segments": len(manifest.segments)}
    return {**facts, "workers": made, "same": len(contents) == 1}


def sorting(store: Path) -> dict[str, float]:
    """Sort the text of every segment again, on one core."""
    seconds, total = 0.0, 0
    for segment in open_datastore(store).segments:
        tokens = np.array(segment.tokens)
        began = time.process_time()
        suffix_array(tokens)
        seconds += time.process_time() - began
        total += len(tokens)
    return {"tokens": total, "tokens_per_second": total / seconds}


def linked(store: Path, out: Path, segments: tuple[SegmentEntry, ...]) -> Path:
    """A store of some segments of another, with links to its files."""
    manifest = read_manifest(store)
    for entry in segments:
        shutil.copytree(store / "segments" / entry.name, out / "segments" / entry.name, copy_function=os.link)
    shutil.copyfile(store / manifest.tokenizer_name, out / manifest.tokenizer_name)
    write_manifest(out, replace(manifest, segments=segments))
    return out


def removing(folder: Path, store: Path) -> dict[str, float]:
    """Remove one document after the other."""
    manifest = read_manifest(store)
    target = linked(store, folder / "removed", manifest.segments)
    paths = [document.path for document in islice(open_datastore(store).documents(), 0, None, manifest.documents // 9)]
    command("remove", str(target), paths[-1])  # compiles
    return median(command("remove", str(target), path)[1] for path in paths[1 : CHANGES + 1])


def merging(folder: Path, store: Path) -> dict[str, float]:
    """Merge two stores of half the segments each."""
    segments = read_manifest(store).segments
    half = len(segments) // 2
    halves = [linked(store, folder / "first", segments[:half]), linked(store, folder / "second", segments[half:])]
    merged = folder / "merged"

    def one() -> dict[str, float]:
        shutil.rmtree(merged, ignore_errors=True)
        return command("merge", str(merged), *map(str, halves))[1]

    return median(one() for _ in range(CHANGES))


def synchronising(folder: Path, text: str, count: int) -> dict[str, Any]:
    """Change one file of a folder of so many, and make a store say so, by the library call that `--watch` makes."""
    source, store = folder / "source", folder / "followed"
    paths = sorted((path.stat().st_size, path) for path in Path(text).rglob("*.py"))
    for number, (_, path) in enumerate([pair for pair in paths if pair[0] > 200][:count]):
        place = source / f"{number % 100:02}" / str(number // 100 % 20)
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place / f"{number}.py")
    sync_datastore(store, [source], "reference")
    time.sleep(2.5)  # what changed just now is read again next time
    left_out = {name for name, _, _ in sync_datastore(store, [source]).skipped}
    files = sorted(path for path in source.rglob("*.py") if path.relative_to(source).as_posix() not in left_out)
    seconds = []
    for number in range(CHANGES + 1):
        changed = files[(number + 1) * len(files) // (CHANGES + 2)]
        changed.write_text(f"# change {number}\n" + changed.read_text(), encoding="utf-8")
        began = time.perf_counter()
        said = sync_datastore(store, [source])
        seconds.append(time.perf_counter() - began)
        assert said.documents == 1, said
    return {"files": len(files), "seconds": statistics.median(seconds[1:])}


def median(runs: Iterator[dict[str, float]]) -> dict[str, float]:
    """Medians of what runs of a command took."""
    made = list(runs)
    return {name: statistics.median(run[name] for run in made) for name in made[0]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Builds, and changes of what the last of them built."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = building(folder, options.text, int(options.tokens), options.workers)
        store = folder / f"store-{options.workers[-1]}"
        result: dict[str, Any] = {"build": built, "sorting": sorting(store), "remove": removing(folder, store)}
        if built["segments"] > 1:
            result["merge"] = merging(folder, store)
        result["sync"] = synchronising(folder, options.text, options.files)
    return result


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, text=str, tokens=100e6, workers=[1, 2], files=20_000)


if __name__ == "__main__":
    main()
