"""Benchmark of dense indexes: recall@10, time of a query on one core, bytes per vector, thinning.

    python scripts/bench_dense.py STORE --queries FOLDER --vectors 4e5 [--index ivf-pq hnsw] [--thinning]

STORE is any store that keeps its text; the bundled model computes hidden states of its tokens, which are reduced as a
build does, and indexed. Queries are hidden states of the Python files below FOLDER, which should not be in the store.
Recall is averaged over them; a query includes standardising and projecting the hidden state, asks for 50 neighbours and
has one thread. `--thinning` compares the keys that `--thin` keeps with others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

from retrieve_spec.datastore.dense import continuation
from retrieve_spec.datastore.dense_faiss import ASKED, build_index, choose_kind, nearest, open_index
from retrieve_spec.datastore.dense_keys import HiddenStates, choose_windows, fit_transform, run_windows, windows_of
from retrieve_spec.datastore.dense_thin import hard_positions
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.kernels.suffix_array import sa_longest
from retrieve_spec.reference_model import load_model

WINDOW, OVERLAP, DIMS = 512, 64, 64
SAMPLE = 1 << 15
CHAINS, SPAN = 10, 10
"""Continuations that are compared with what came, and their tokens: DReSD's 10 x 10."""


def text_states(store: Datastore, encoder: HiddenStates, count: int, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states (count, d) float16 of random windows of a store's first segment, and their positions (count,)."""
    segment = store.segments[0]
    windows = windows_of(segment.document_starts, segment.removed, encoder.window(WINDOW), OVERLAP)
    chosen, taken = choose_windows(windows, np.ones(len(segment.tokens), np.bool_), count)
    out = np.memmap(folder / "hidden.f16", "<f2", "w+", shape=(int(taken.sum()), encoder.size))
    where = np.empty(len(out), np.int64)
    done, started = 0, time.perf_counter()
    for part in np.array_split(chosen, max(1, len(chosen) // 64)):
        for hidden, positions in run_windows(encoder, segment, part, taken):
            out[done : done + len(hidden)], where[done : done + len(hidden)] = hidden, positions
            done += len(hidden)
        print(f"{done:,} hidden states, {done / (time.perf_counter() - started):,.0f}/s", file=sys.stderr)
    return out, where


def queries_of(
    folder: Path, store: Datastore, encoder: HiddenStates, count: int
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Hidden states (count, d) of positions with some context, and the text before and behind, in files not stored."""
    states: list[np.ndarray] = []
    texts = []
    for path in sorted(folder.rglob("*.py")):
        ids = np.array(store.tokenizer.encode(path.read_text(errors="replace")).ids[:WINDOW])
        if len(ids) > 2 * OVERLAP:
            states.append(encoder([ids])[0][OVERLAP:-SPAN])
            texts += [(ids[: at + 1], ids[at + 1 : at + 1 + SPAN]) for at in range(OVERLAP, len(ids) - SPAN)]
        if len(states) >= 64:
            break
    hidden = np.concatenate(states)
    chosen = np.random.default_rng(0).choice(len(hidden), min(count, len(hidden)), replace=False)
    return hidden[chosen], [texts[i] for i in chosen]


def thinning(
    store: Datastore, keys: np.ndarray, positions: np.ndarray, queries: np.ndarray, texts: list[Any]
) -> list[dict[str, Any]]:
    """Right tokens of the best of ten continuations, by which keys are kept: alone, and with exact matches' ten."""
    import faiss

    segment = store.segments[0]
    hard = hard_positions(segment)[positions]
    random = np.random.default_rng(1).random(len(keys)) < hard.mean()

    def right(places: Any, behind: np.ndarray) -> int:
        runs = [continuation(segment, int(p), SPAN) for p in places]
        return max((int((np.cumprod(run == behind[: len(run)])).sum()) for run in runs), default=0)

    exact = [right(exact_ends(store, before), behind) for before, behind in texts]
    rows = [{"keys": "none", "share": 0.0, "with_exact": round(float(np.mean(exact)), 3)}]
    for name, kept in (("all", np.ones(len(keys), np.bool_)), ("thinned", hard), ("random", random)):
        flat = faiss.IndexFlatIP(keys.shape[1])
        flat.add(keys[kept])
        near = positions[kept][flat.search(queries, CHAINS)[1]]
        alone = [right(places, behind) for places, (_, behind) in zip(near, texts, strict=True)]
        both = np.maximum(alone, exact)
        means = {"alone": np.mean(alone), "with_exact": np.mean(both)}
        shown = {"share": np.mean(kept)} | means
        rows.append({"keys": name} | {key: round(float(value), 3) for key, value in shown.items()})
    return rows


def exact_ends(store: Datastore, before: np.ndarray) -> list[int]:
    """Positions of the last tokens of the longest matches, spread evenly over them."""
    segment = store.segments[0]
    recent = segment.localise(before)
    n = len(recent)
    lo, hi, depth = sa_longest(segment.tokens, segment.suffix_array, segment.top, segment.bits, recent, n, n)
    if depth == 0:
        return []
    at = np.unique(np.linspace(lo, hi - 1, min(CHAINS, int(hi - lo))).astype(np.int64))
    return [int(p) + int(depth) - 1 for p in segment.suffix_array[at]]


def measure_index(kind: str, keys: np.ndarray, exact: np.ndarray, states: np.ndarray, transform: Any) -> dict[str, Any]:
    """Build an index and query it."""
    import faiss

    chosen, threads = choose_kind(kind, len(keys)), faiss.omp_get_max_threads()
    started = time.perf_counter()
    index = build_index(keys, chosen)
    built = time.perf_counter() - started
    content = faiss.serialize_index(index)
    size = len(content) + 4 * len(keys)  # and their positions
    index = open_index(content)
    _, found = nearest(index, transform(states), ASKED)
    hits = [len(set(a[:10]) & set(b[:10])) / 10 for a, b in zip(exact, found, strict=True)]
    faiss.omp_set_num_threads(1)
    times = []
    for state in states:
        started = time.perf_counter()
        nearest(index, transform(state[None]), ASKED)
        times.append(time.perf_counter() - started)
    faiss.omp_set_num_threads(threads)
    return {
        "index": chosen,
        "recall_at_10": round(float(np.mean(hits)), 4),
        "query_ms": {f"p{q}": round(float(np.percentile(times, q)) * 1e3, 3) for q in (50, 99)},
        "bytes_per_vector": round(size / len(keys), 2),
        "key_bytes": index.code_size + index.refine_pq.code_size if chosen == "ivf-pq" else None,
        "build_s": round(built, 1),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Indexes of all kinds over the same keys."""
    import faiss

    store = open_datastore(options.store)
    model, _ = load_model("reference")
    encoder = HiddenStates(model, "last")
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        hidden, positions = text_states(store, encoder, int(options.vectors), Path(folder))
        seconds = time.perf_counter() - began
        chosen = np.sort(np.random.default_rng(0).choice(len(hidden), min(SAMPLE, len(hidden)), replace=False))
        transform, kept = fit_transform(iter([hidden[chosen].astype(np.float32)]), encoder.size, DIMS)
        blocks = [transform(hidden[at : at + SAMPLE].astype(np.float32)) for at in range(0, len(hidden), SAMPLE)]
        keys = np.concatenate(blocks)
    states, texts = queries_of(options.queries, store, encoder, 1000)
    flat = faiss.IndexFlatIP(DIMS)
    flat.add(keys)
    _, exact = flat.search(transform(states), 10)
    return {
        "vectors": len(keys),
        "dims": DIMS,
        "variance_kept": round(kept, 4),
        "queries": len(states),
        "hidden_size": encoder.size,
        "states_per_second": round(len(keys) / seconds, 1),
        "indexes": [measure_index(kind, keys, exact, states, transform) for kind in options.index],
        "thinning": thinning(store, keys, positions, transform(states), texts) if options.thinning else [],
    }


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, "store", queries=Path, vectors=1e6, index=["auto"], thinning=False)


if __name__ == "__main__":
    main()
