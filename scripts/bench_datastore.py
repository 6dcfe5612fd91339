"""Benchmark of datastores: size, time to open and time per cursor step, beside what else there is.

    python scripts/bench_datastore.py --tokens 100e6 --text FOLDER [--segments 10]

The corpus is the Python source below FOLDER, encoded with the bundled tokenizer, each text once; where that is not
enough it is continued with copies of its documents in which every tenth token on average was exchanged for another of
the corpus (so that matches stay short, as in text that was not seen). `--real` bounds the real tokens, `--peer-tokens`
those of the comparison with peers (0 for none); `--segments` also makes a store of so many copies of the segment. What
builds take is measured by `bench_store_changes.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numba import njit

from retrieve_spec.bench.machine import resident_bytes
from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.documents import Row
from retrieve_spec.datastore.files import write_files
from retrieve_spec.datastore.fingerprint import load_tokenizer
from retrieve_spec.datastore.fresh import first_manifest, write_tokenizer
from retrieve_spec.datastore.ingest import tokenise
from retrieve_spec.datastore.manifest import SegmentEntry, content_name, read_manifest, write_manifest
from retrieve_spec.datastore.records import texts_of
from retrieve_spec.datastore.segment import write_segment
from retrieve_spec.datastore.sources import Source, list_files
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.kernels.follow import MATCH, follow_all
from retrieve_spec.kernels.source_table import CURSOR, exact_successors
from retrieve_spec.sources.rows import SourceTable
from retrieve_spec.sources.stores import StoreRows

READS = 64
STEPS = 10_000
LIMIT = 1 << 26


def read_corpus(folder: str, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Encode Python source: token ids with a 0 after each document, and where documents start."""
    sources = (Source(folder, include=("**/*.py",)),)
    files = texts_of(list_files(sources), sources, LIMIT)
    parts, seen, total = [], set(), 0
    for result in tokenise(files, sources, load_tokenizer("reference"), os.cpu_count() or 1, LIMIT):
        if result.skip or result.sha256 in seen or total >= limit:
            continue
        seen.add(result.sha256)
        parts.append(np.append(result.ids, np.uint32(0)))
        total += len(parts[-1])
        if total >= limit:
            break
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)])


def continue_corpus(ids: np.ndarray, starts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Append changed copies of random documents until there are `size` entries."""
    random = np.random.default_rng(0)
    lengths = np.diff(starts)
    chosen: list[int] = []
    total = len(ids)
    while total < size:
        chosen.append(int(random.integers(len(lengths))))
        total += int(lengths[chosen[-1]])
    out = np.empty(total, np.uint32)
    out[: len(ids)] = ids
    at = len(ids)
    ends = [at]
    for i in chosen:
        copy = ids[starts[i] : starts[i + 1]].copy()
        swap = np.flatnonzero(random.random(len(copy) - 1) < 0.1)
        copy[swap] = np.maximum(ids[random.integers(0, len(ids), len(swap))], 1)
        out[at : at + len(copy)] = copy
        at += len(copy)
        ends.append(at)
    return out, np.concatenate([starts[:-1], ends])


def write_store(folder: Path, ids: np.ndarray, starts: np.ndarray, config: StoreConfig) -> dict[str, Any]:
    """Index a corpus of token ids and write it as a store of one segment."""
    segment = folder / "segments" / "new"
    segment.mkdir(parents=True)
    rows = [
        Row(f"document-{i}", "", "bench", f"{i:064x}", int(b - a - 1))
        for i, (a, b) in enumerate(pairwise(starts.tolist()))
    ]
    started = time.perf_counter()
    files, origins = write_segment(segment, ids.copy(), rows, config)
    seconds = time.perf_counter() - started
    name = write_tokenizer(folder, "reference")
    tokens = len(ids) - len(rows)
    entry = SegmentEntry(content_name(files), len(rows), tokens, "", origins, files)
    segment.rename(segment.with_name(entry.name))
    write_manifest(folder, first_manifest(folder, name).following((entry,), {"verb": "bench"}))
    exact = sum(
        files[f"{part}.bin"].bytes for part in ("tokens", "suffix_array", "top", "grams", "vocabulary", "documents")
    )
    ngram = sum(file.bytes for part, file in files.items() if part.startswith("ngram"))
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "exact_bytes_per_token": exact / tokens,
        "ngram_share_of_exact": ngram / exact,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Percentiles in microseconds."""
    return {f"p{q}_us": round(float(np.percentile(seconds, q)) * 1e6, 2) for q in (50, 90, 99, 100)}


def copy_segments(folder: Path, out: Path, copies: int) -> None:
    """Write a store whose segments are copies of the one segment of another, each with files and hashes of its own."""
    manifest = read_manifest(folder)
    (entry,) = manifest.segments
    (out / "segments").mkdir(parents=True)
    shutil.copyfile(folder / manifest.tokenizer_name, out / manifest.tokenizer_name)
    entries = []
    for number in range(copies):
        place = out / "segments" / "new"
        shutil.copytree(folder / "segments" / entry.name, place)
        hashes = np.fromfile(place / "document_hashes.bin", np.uint32)
        hashes[::8] = np.arange(len(hashes) // 8) + number * len(hashes)  # documents of their own
        files = entry.files | write_files(place, {"document_hashes.bin": hashes.view(np.uint8)})
        entries.append(replace(entry, name=content_name(files), files=files))
        place.rename(place.with_name(entries[-1].name))
    write_manifest(out, replace(manifest, segments=tuple(entries)))


@njit(nogil=True)
def _followed(table, cursors, window, out_tokens, out_counts):  # type: ignore[no-untyped-def]
    follow_all(table, 0, cursors, window, 1)
    for s in range(len(table)):
        if cursors[s, 2] > 0:
            exact_successors(table, s, cursors[s, 0], cursors[s, 1], cursors[s, 2], out_tokens, out_counts)


def cursor_steps(store: Datastore, text: np.ndarray, segments: int = 0) -> dict[str, Any]:
    """Processor time of every step of the longest-match cursors of all or the first segments, as drafting takes it.

    Next-token counts included; about 1 µs of it is the call from Python.
    """
    rows = StoreRows.of([store], 0, 0).exact[: segments or None]
    table = SourceTable(rows).words
    for row in rows:
        for array in row.arrays:
            np.asarray(array).max()  # warm: pages in memory, but not the lines that the text will touch in the caches
    out = np.zeros(READS, np.int32), np.zeros(READS, np.int32)
    ids = text.astype(np.int32)
    cursors = np.zeros((len(rows), CURSOR), np.int64)
    _followed(table, cursors, ids[:1], *out)  # compiles
    cursors[:] = 0
    seconds, depths = [], []
    for i in range(1, len(ids) + 1):
        window = ids[max(0, i - MATCH) : i]
        started = time.thread_time()
        _followed(table, cursors, window, *out)
        seconds.append(time.thread_time() - started)
        depths.append(int(cursors[:, 2].max()))
    return {
        "steps": len(seconds),
        "mean_match": float(np.mean(depths)),
        "steps_that_fell_off": float(np.mean(np.diff(depths) <= 0)),
        **percentiles(seconds),
    }


def many_segments(folder: Path, text: np.ndarray) -> dict[str, Any]:
    """Open a store of several segments, step through one, ten, … of them, and plan what rewrites all of them."""
    store = open_datastore(folder)
    count = len(store.segments)
    steps = {str(n): cursor_steps(store, text, n) for n in (1, 10, 100, 1000) if n <= count}
    manifest = read_manifest(folder)
    return {
        "segments": count,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
        "open": opening(folder),
        "manifest_ms": opening(folder, read_manifest)["median_ms"],
        "planning": planning(folder),
        "step": steps,
    }


PLANNER = """
import sys, time
from pathlib import Path
from retrieve_spec.datastore.edit import segment_shards
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.stages import Stages
from retrieve_spec.datastore.work import WorkFolder
store = Path(sys.argv[1])
manifest = read_manifest(store)
plan = {"config": manifest.config, "tokenizer": manifest.tokenizer_name, "vocabulary": manifest.vocabulary}
work = WorkFolder(store)
work.begin(plan, segment_shards(store, manifest))
began = time.perf_counter()
cut = Stages(work).cut((), lambda ranks: None)
work.end()
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(time.perf_counter() - began, len(cut.segments), int(status["VmHWM"].split()[0]) / 1e6)
"""


def planning(folder: Path) -> dict[str, float]:
    """Seconds and memory of the process that plans a compaction of a store: it sees every document."""
    done = subprocess.run([sys.executable, "-c", PLANNER, str(folder)], check=True, capture_output=True, text=True)
    seconds, segments, memory = map(float, done.stdout.split())
    return {"seconds": seconds, "segments": segments, "memory_gb": memory}


def opening(folder: Path, opener: Callable[[Path], object] = open_datastore) -> dict[str, float]:
    """Time to open a store, in milliseconds."""
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        opener(folder)
        seconds.append(time.perf_counter() - started)
    return {"first_ms": seconds[0] * 1e3, "median_ms": float(np.median(seconds)) * 1e3}


def resident() -> int:
    """Resident memory of this process in bytes, without what was freed: it would hide what is made next."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # other C libraries keep less, or do not say
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def arctic(ids: np.ndarray, starts: np.ndarray, text: np.ndarray) -> dict[str, Any]:
    """The same of SuffixDecoding's C++ trees; a reason where the package cannot be imported.

    `pip install arctic-inference` needs a compiler; its suffix part can also be built alone and put on PYTHONPATH.
    """
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {error}"}
    before = resident()
    started = time.perf_counter()
    cache = SuffixDecodingCache(max_tree_depth=64)
    for i, (a, b) in enumerate(pairwise(starts.tolist())):
        cache.start_request(i, np.zeros(1, np.int32))
        cache.add_active_response(i, ids[a : b - 1].astype(np.int32))
        cache.stop_request(i)
    seconds = time.perf_counter() - started
    size = resident() - before
    cache.start_request(-1, np.zeros(1, np.int32))
    steps = []
    query = text.astype(np.int32)
    for i in range(1, len(query) + 1):
        context = np.ascontiguousarray(query[max(0, i - 64) : i])
        started = time.perf_counter()
        cache.speculate(-1, context, max_spec_tokens=1, max_spec_factor=1.0, max_spec_offset=1.0, min_token_prob=0.0)
        steps.append(time.perf_counter() - started)
    return {
        "tokens": len(ids),
        "tokens_per_second": len(ids) / seconds,
        "bytes_per_token": size / len(ids),
        **percentiles(steps),
    }


def ours_at(folder: Path, ids: np.ndarray, starts: np.ndarray, text: np.ndarray) -> dict[str, Any]:
    """The same of a store of this library."""
    written = write_store(folder, ids, starts, StoreConfig(index="exact"))
    return {
        "tokens": written["tokens"],
        "tokens_per_second": written["tokens_per_second"],
        "bytes_per_token": written["exact_bytes_per_token"],
        **cursor_steps(open_datastore(folder), text),
    }


def peers(folder: Path, ids: np.ndarray, starts: np.ndarray, text: np.ndarray, limit: int) -> dict[str, Any]:
    """This library and SuffixDecoding's C++ trees over the same documents."""
    last = int(np.searchsorted(starts, limit))
    ids, starts = ids[: starts[last]], starts[: last + 1]
    return {
        "suffix_array": ours_at(folder, ids, starts, text),
        "suffix_decoding": arctic(ids, starts, text),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One large store, and what is asked for beside it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids, starts = read_corpus(options.text, int(min(options.real, options.tokens)))
        held_out = max(2, len(starts) // 50)  # the last documents are what the cursor follows
        parts = [ids[starts[i] : starts[i + 1] - 1] for i in range(len(starts) - held_out, len(starts) - 1)]
        text = np.concatenate([part[:400] for part in parts])[:STEPS]
        ids, starts = ids[: starts[-held_out]], starts[: len(starts) - held_out + 1]
        whole, documents = continue_corpus(ids, starts, int(options.tokens))
        small = np.append(whole[:1000], 0).astype(np.uint32)
        write_store(folder / "compile", small, np.array([0, 1001]), StoreConfig())
        result: dict[str, Any] = {
            "corpus": {"real_tokens": len(ids), "tokens": len(whole), "documents": len(documents) - 1},
            "store": write_store(folder / "store", whole, documents, StoreConfig()),
            "open": opening(folder / "store"),
            "step": cursor_steps(open_datastore(folder / "store"), text),
        }
        if options.segments:
            copy_segments(folder / "store", folder / "many", options.segments)
            result["many_segments"] = many_segments(folder / "many", text)
        if options.peer_tokens:
            result["peers"] = peers(folder / "peer", ids, starts, text, int(options.peer_tokens))
    return result


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, text=str, tokens=100e6, real=40e6, peer_tokens=1e6, segments=0)


if __name__ == "__main__":
    main()
