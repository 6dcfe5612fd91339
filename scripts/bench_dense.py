"""Measures dense indexes: recall@10 against exact search, time of a query on one core, bytes per vector, thinning.

    OMP_NUM_THREADS=1 python scripts/bench_dense.py STORE --queries FOLDER --vectors 1e6 [--index ivf-pq] [--cache DIR]

STORE is any store that keeps its text; hidden states of its tokens are computed (or read from `--cache`, where they
are left), reduced as a build does, and indexed. Queries are hidden states of the Python files below FOLDER, which
should not be in the store. Recall is averaged over them; a query includes standardising and projecting the hidden
state, and asks for 50 neighbours. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrieve_spec.datastore.dense_faiss import ASKED, build_index, choose_kind, nearest, open_index
from retrieve_spec.datastore.dense_keys import HiddenStates, choose_windows, fit_transform, run_windows, windows_of
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.reference_model import load_model

WINDOW, OVERLAP = 512, 64
SAMPLE = 1 << 15


def text_states(store: Datastore, encoder: HiddenStates, count: int, cache: Path) -> np.ndarray:
    """Hidden states (count, d) float16 of random windows of a store's first segment."""
    path = cache / "hidden.f16"
    size = encoder.size
    if path.exists() and path.stat().st_size >= 2 * size * count:
        return np.memmap(path, "<f2", "r", shape=(count, size))
    segment = store.segments[0]
    windows = windows_of(segment.document_starts, segment.removed, encoder.window(WINDOW), OVERLAP)
    chosen, taken = choose_windows(windows, np.ones(len(segment.tokens), np.bool_), count)
    out = np.memmap(path, "<f2", "w+", shape=(count, size))
    done, started = 0, time.perf_counter()
    for part in np.array_split(chosen, max(1, len(chosen) // 64)):
        for hidden, _ in run_windows(encoder, segment, part, taken):
            out[done : done + len(hidden)] = hidden[: count - done]
            done = min(done + len(hidden), count)
        print(f"{done:,} hidden states, {done / (time.perf_counter() - started):,.0f}/s", file=sys.stderr)
    return out[:done]


def query_states(folder: Path, store: Datastore, encoder: HiddenStates, count: int) -> np.ndarray:
    """Hidden states (count, d) of positions with some context in files that are not in the store."""
    found: list[np.ndarray] = []
    for path in sorted(folder.rglob("*.py")):
        ids = np.array(store.tokenizer.encode(path.read_text(errors="replace")).ids[:WINDOW])
        if len(ids) > 2 * OVERLAP:
            found.append(encoder([ids])[0][OVERLAP:])
        if len(found) >= 64:
            break
    states = np.concatenate(found)
    return states[np.random.default_rng(0).choice(len(states), min(count, len(states)), replace=False)]


def measure(kind: str, keys: np.ndarray, exact: np.ndarray, states: np.ndarray, transform: Any) -> dict[str, Any]:
    """Build an index and query it."""
    import faiss

    chosen = choose_kind(kind, len(keys))
    started = time.perf_counter()
    index = build_index(keys, chosen)
    built = time.perf_counter() - started
    content = faiss.serialize_index(index)
    size = len(content) + 4 * len(keys)  # and their positions
    index = open_index(content)
    _, found = nearest(index, transform(states), ASKED)
    hits = [len(set(a[:10]) & set(b[:10])) / 10 for a, b in zip(exact, found, strict=True)]
    times = []
    for state in states:
        started = time.perf_counter()
        nearest(index, transform(state[None]), ASKED)
        times.append(time.perf_counter() - started)
    batch = []
    for at in range(0, len(states) - 4, 4):
        started = time.perf_counter()
        nearest(index, transform(states[at : at + 4]), ASKED)
        batch.append((time.perf_counter() - started) / 4)
    return {
        "index": chosen,
        "recall_at_10": round(float(np.mean(hits)), 4),
        "query_ms": {
            p: round(float(np.percentile(times, q)) * 1e3, 3) for p, q in [("p10", 10), ("p50", 50), ("p99", 99)]
        },
        "query_ms_in_batches_of_4": round(float(np.median(batch)) * 1e3, 3),
        "bytes_per_vector": round(size / len(keys), 2),
        "key_bytes": index.code_size + index.refine_pq.code_size if chosen == "ivf-pq" else None,
        "build_s": round(built, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--queries", type=Path, required=True)
    parser.add_argument("--model", default="reference")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--vectors", type=float, default=1e6)
    parser.add_argument("--dims", type=int, default=64)
    parser.add_argument("--index", nargs="+", default=["auto"])
    parser.add_argument("--cache", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    import faiss

    store = open_datastore(arguments.store)
    model, _ = load_model(arguments.model, dtype=arguments.dtype)
    encoder = HiddenStates(model, "last")
    with tempfile.TemporaryDirectory() as temporary:
        hidden = text_states(store, encoder, int(arguments.vectors), arguments.cache or Path(temporary))
        chosen = np.sort(np.random.default_rng(0).choice(len(hidden), min(SAMPLE, len(hidden)), replace=False))
        transform, kept = fit_transform(iter([hidden[chosen].astype(np.float32)]), encoder.size, arguments.dims)
        blocks = [transform(hidden[at : at + SAMPLE].astype(np.float32)) for at in range(0, len(hidden), SAMPLE)]
        keys = np.concatenate(blocks)
    states = query_states(arguments.queries, store, encoder, 1000)
    flat = faiss.IndexFlatIP(arguments.dims)
    flat.add(keys)
    _, exact = flat.search(transform(states), 10)
    results = [measure(kind, keys, exact, states, transform) for kind in arguments.index]
    report = {
        "vectors": len(keys),
        "dims": arguments.dims,
        "variance_kept": round(kept, 4),
        "queries": len(states),
        "threads": faiss.omp_get_max_threads(),
        "load": os.getloadavg()[0],
        "machine": platform.processor() or platform.machine(),
        "results": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
