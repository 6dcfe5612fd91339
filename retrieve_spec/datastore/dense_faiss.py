"""FAISS indexes: one of a fitting kind for some keys, and how much of the exact answer it finds.

IVF-PQ keeps a key in 40 bytes: 16 bytes of product quantizer over what is left of it beside its cell's centroid, which
are scanned, and 24 bytes of a second one over what the first leaves, which rank the best of the scan (Jégou et al.,
"Searching in one billion vectors: re-rank with source coding", 2011). HNSW keeps it in 64 bytes beside its links.
"""

from __future__ import annotations

import hashlib
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.files import FileEntry
from retrieve_spec.openmp import survive_forks

FLAT_BELOW = 50_000
"""Keys from which on `"auto"` approximates."""
TRAINABLE = 10_000
"""Keys that quantizers of 8 bits need for their training at least."""
SCANNED, REFINED = (16, 8), (32, 6)
"""Parts of a key and bits of each: those that are scanned, and those that rank the best of the scan."""
CELLS = 4
"""IVF cells, as a multiple of the square root of the number of keys."""
PROBES, RANKED = 32, 1.5
"""Cells that are scanned for a query, and how many times the neighbours asked for are ranked."""
ASKED = 50
"""Neighbours asked for at least, since only so many times `RANKED` are ranked."""
LINKS, EXPLORED = 16, 96
"""Of HNSW: links of a node on every layer, and candidates kept while searching."""
QUERIES = 256
"""Keys that recall is measured with."""
_SEED = 1234

Kind = Literal["flat", "ivf-pq", "hnsw"]


def choose_kind(kind: str, count: int) -> Kind:
    """The kind of index for a number of keys; few keys are always searched exactly."""
    if kind == "auto":
        return "flat" if count < FLAT_BELOW else "ivf-pq"
    return "flat" if kind == "ivf-pq" and count < TRAINABLE else kind  # type: ignore[return-value]


def _faiss() -> Any:
    """FAISS, imported on first use; its type stubs lack half of it."""
    survive_forks()
    return import_module("faiss")


def build_index(keys: NDArray[np.float32], kind: Kind) -> Any:
    """Index keys (n, dims) of length one under their numbers from 0."""
    faiss = _faiss()
    dims = keys.shape[1]
    if kind == "flat":
        index = faiss.IndexFlatIP(dims)
    elif kind == "hnsw":
        index = faiss.IndexHNSWSQ(dims, faiss.ScalarQuantizer.QT_8bit, LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efSearch = EXPLORED
        index.train(keys)
    else:
        index = _ivf_pq(keys)
    index.add(keys)
    return index


def _ivf_pq(keys: NDArray[np.float32]) -> Any:
    """A trained, empty IVF index with a re-ranking product quantizer; its distances are 2 - 2 * cosine."""
    faiss = _faiss()
    count, dims = keys.shape
    cells = int(CELLS * count**0.5)
    random = np.random.default_rng(_SEED)
    sample = keys[np.sort(random.choice(count, min(count, max(1 << 16, 64 * cells)), replace=False))]
    # As few points as there are will do: FAISS would print a warning.
    centroids = faiss.Kmeans(dims, cells, niter=10, seed=_SEED, min_points_per_centroid=1, max_points_per_centroid=64)
    centroids.train(sample)
    quantizer = faiss.IndexFlatL2(dims)
    quantizer.add(centroids.centroids)
    scanned, refined = ((_divisor(dims, parts), bits) for parts, bits in (SCANNED, REFINED))
    index = faiss.IndexIVFPQR(quantizer, dims, cells, *scanned, *refined)
    quantizer.this.disown()  # FAISS frees it with the index
    index.own_fields = True
    index.quantizer_trains_alone = 1
    for coder in (index.pq, index.refine_pq):
        coder.cp.niter, coder.cp.seed = 10, _SEED
        coder.cp.min_points_per_centroid, coder.cp.max_points_per_centroid = 1, 256
    index.train(sample[: 1 << 16])
    index.nprobe, index.k_factor = min(PROBES, cells), RANKED
    return index


def _divisor(dims: int, most: int) -> int:
    """Largest number of equal parts of a key, at most `most`."""
    return max(parts for parts in range(1, most + 1) if dims % parts == 0)


def write_index(index: Any, path: Path) -> FileEntry:
    """Write an index and flush it to disk; FAISS itself says nothing when the end of a file finds no room."""
    faiss = _faiss()
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(block: bytes) -> None:
            file.write(block)
            digest.update(block)

        faiss.write_index(index, faiss.PyCallbackIOWriter(write))
        file.flush()
        os.fsync(file.fileno())
        return FileEntry(file.tell(), digest.hexdigest(), "|u1")


def open_index(content: NDArray[np.uint8]) -> Any:
    """Read an index whose arrays stay where they are, in a file mapped into memory; it keeps the content alive.

    Raises
    ------
    RuntimeError
        When it is none, or of a kind that `build_index` does not make.
    """
    faiss = _faiss()
    reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(content), len(content))
    index = faiss.read_index(reader, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)  # a query takes longer with that table
    kinds = ((faiss.IndexFlatIP, True), (faiss.IndexHNSWSQ, True), (faiss.IndexIVFPQR, False))
    if (type(index), index.metric_type == faiss.METRIC_INNER_PRODUCT) not in kinds:
        raise RuntimeError(f"a {type(index).__name__} of metric {index.metric_type}")
    index.referenced_objects = [content]  # as FAISS itself holds what its indexes point into
    return index


def kind_of(index: Any) -> Kind:
    """The kind of an index."""
    faiss = _faiss()
    if isinstance(index, faiss.IndexIVF):
        return "ivf-pq"
    return "hnsw" if isinstance(index, faiss.IndexHNSW) else "flat"


def nearest(index: Any, keys: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Similarities (q, k) and numbers (q, k) of the keys in an index most like some (q, dims); -1 behind the last."""
    if kind_of(index) != "ivf-pq":
        similarity, numbers = index.search(keys, k)
        return similarity, numbers
    distances, numbers = index.search(keys, max(k, ASKED))
    return 1 - distances[:, :k] / 2, numbers[:, :k]  # keys have length one


def recall(index: Any, keys: NDArray[np.float32]) -> float:
    """Share of the ten exact nearest neighbours that an index finds, over keys of it, themselves left out."""
    chosen = np.sort(np.random.default_rng(_SEED).choice(len(keys), min(QUERIES, len(keys)), replace=False))
    flat = _faiss().IndexFlatIP(keys.shape[1])
    flat.add(keys)
    _, exact = flat.search(keys[chosen], 11)
    _, found = nearest(index, keys[chosen], 11)
    hits = wanted = 0
    for own, near, got in zip(chosen.tolist(), exact.tolist(), found.tolist(), strict=True):
        right = set(near) - {own, -1}
        hits += len(right & set(got))
        wanted += len(right)
    return hits / max(wanted, 1)
