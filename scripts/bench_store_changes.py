"""Measures what changes of a store cost: remove, merge, sync after one changed file, and opening many segments.

    python scripts/bench_store_changes.py STORE [--files 20000] [--segments 15]

STORE is one that was built before; nothing in it is changed, its files are linked. Wall and processor seconds, the best
of three of each; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from retrieve_spec.bench.machine import machine_facts
from retrieve_spec.datastore.edit import merge_datastores, remove_documents
from retrieve_spec.datastore.manifest import SEGMENTS, SegmentEntry, read_manifest, write_manifest
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore

TIMES = 3


def seconds(change: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Wall and processor time of a change, the best of a few, each after a preparation."""
    wall, cpu = [], []
    for _ in range(TIMES):
        prepare()
        began, used = time.perf_counter(), time.process_time()
        change()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    return {"wall_s": round(min(wall), 4), "cpu_s": round(min(cpu), 4)}


def linked(store: Path, out: Path, entries: list[tuple[SegmentEntry, str]]) -> Path:
    """A store of some segments of another, under names of their own; files are linked."""
    manifest = read_manifest(store)
    shutil.rmtree(out, ignore_errors=True)
    (out / SEGMENTS).mkdir(parents=True)
    shutil.copyfile(store / manifest.tokenizer_name, out / manifest.tokenizer_name)
    for entry, name in entries:
        (out / SEGMENTS / name).mkdir()
        for file in entry.files:
            os.link(store / SEGMENTS / entry.name / file, out / SEGMENTS / name / file)
    write_manifest(out, replace(manifest, segments=tuple(replace(entry, name=name) for entry, name in entries)))
    return out


def same(entries: tuple[SegmentEntry, ...]) -> list[tuple[SegmentEntry, str]]:
    """Segments under the names that they have."""
    return [(entry, entry.name) for entry in entries]


def removing(store: Path, folder: Path) -> dict[str, float]:
    """Remove one document."""
    entries = same(read_manifest(store).segments)
    path = next(islice(open_datastore(store).documents(), 1, None)).path
    return seconds(
        lambda: remove_documents(folder / "removed", [path]), lambda: linked(store, folder / "removed", entries)
    )


def merging(store: Path, folder: Path) -> dict[str, float]:
    """Merge the two halves of a store that has at least two segments."""
    entries = same(read_manifest(store).segments)
    halves = [
        linked(store, folder / f"half{i}", part)
        for i, part in enumerate((entries[: len(entries) // 2], entries[len(entries) // 2 :]))
    ]
    return seconds(
        lambda: merge_datastores(folder / "merged", halves),
        lambda: shutil.rmtree(folder / "merged", ignore_errors=True),
    )


def synchronising(folder: Path, files: int) -> dict[str, float]:
    """Synchronise after one of many files changed."""
    source, number = folder / "files", iter(range(TIMES))
    for i in range(files):
        path = source / f"folder{i % 200}" / f"file{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function{i}():\n    return {i}\n")
        os.utime(path, (1e9, 1e9))
    for _ in range(2):
        sync_datastore(folder / "synced", [source], "reference")
    return seconds(
        lambda: sync_datastore(folder / "synced", [source]),
        lambda: (source / "folder0" / "file0.py").write_text(f"changed = {next(number)}\n"),
    )


def opening(store: Path, folder: Path, segments: int) -> dict[str, Any]:
    """Read the manifest of, and open, a store of so many segments that are one under other names."""
    largest = max(read_manifest(store).segments, key=lambda entry: entry.tokens)
    many = linked(store, folder / "many", [(largest, f"{i:032x}") for i in range(segments)])
    return {
        "segments": segments,
        "tokens": read_manifest(many).tokens,
        "manifest": seconds(lambda: read_manifest(many)),
        "open": seconds(lambda: open_datastore(many)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--segments", type=int, default=15)
    options = parser.parse_args()
    manifest = read_manifest(options.store)
    folder = Path(tempfile.mkdtemp(dir=options.store.resolve().parent))  # links reach no other disk
    try:
        result = {
            "benchmark": "store-changes",
            "machine": machine_facts(),
            "store": {"tokens": manifest.tokens, "segments": len(manifest.segments)},
            "remove_one": removing(options.store, folder),
            "merge_halves": merging(options.store, folder) if len(manifest.segments) > 1 else None,
            "open": opening(options.store, folder, options.segments),
            "sync_one_changed": {"files": options.files, **synchronising(folder, options.files)},
        }
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
