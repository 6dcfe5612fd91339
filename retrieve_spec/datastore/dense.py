"""Dense indexes: find the positions of a segment at which the model's hidden state is similar to a given one.

A key is the hidden state at one token, standardised, reduced by PCA and scaled to length one (DReSD, arXiv 2502.15572);
similarity is the inner product of keys, their cosine. A key leads to the position of its token, so what followed there
is read from the segment's own text, in any length, and its document is known.

FAISS finds the nearest keys. IVF-PQ keeps a key in 40 bytes: 16 bytes of product quantizer over what is left of it
beside its cell's centroid, which are scanned, and 24 bytes of a second one over what the first leaves, which rank the
best of the scan (Jégou et al., "Searching in one billion vectors: re-rank with source coding", 2011). Few keys are
searched exactly.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.files import FileEntry, check_content, map_array
from retrieve_spec.datastore.manifest import DenseRecord
from retrieve_spec.errors import ConfigError, ModelMismatchError, StoreCorruptError
from retrieve_spec.openmp import survive_forks

if TYPE_CHECKING:
    from retrieve_spec.datastore.segment import Segment


INDEX = "dense_index.faiss"
POSITIONS = "dense_positions.bin"
TRANSFORM = ("dense_mean.bin", "dense_scale.bin", "dense_components.bin")
DENSE_FILES = (INDEX, POSITIONS, *TRANSFORM)
_DTYPES = {INDEX: ("|u1",), POSITIONS: ("<u4",)}
WEIGHTS_SAMPLED = 16
"""How many numbers of each parameter the fingerprint of a model includes."""
_VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


class Transform:
    """Turns hidden states into keys: standardise, project on principal components, scale to length one.

    Parameters
    ----------
    mean, scale
        (hidden_size,) float32.
    components
        (hidden_size, dims) float32, orthonormal columns.
    """

    def __init__(self, mean: NDArray[np.float32], scale: NDArray[np.float32], components: NDArray[np.float32]) -> None:
        self.mean, self.scale, self.components = mean, scale, components
        self._weights = np.ascontiguousarray(components / scale[:, None], np.float32)
        self._offset = np.asarray((mean / scale) @ components, np.float32)

    def __call__(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Turn hidden states (q, hidden_size) into keys (q, dims) float32."""
        keys = hidden @ self._weights - self._offset
        norms = np.sqrt(np.einsum("qd,qd->q", keys, keys))
        return np.asarray(keys / np.maximum(norms, 1e-12)[:, None], np.float32)


class DenseIndex:
    """Hidden states of one segment's tokens, in files mapped into memory.

    The first search compares all checksums, whatever the size of the files: a damaged IVF index can make FAISS end the
    process, and only a checksum detects the damage.

    Attributes
    ----------
    layer
        `"last"` (after the final norm) or the number of the layer whose output the keys are.
    dims, hidden_size
        Length of a key, and of a hidden state.
    model
        Fingerprint of the model (`model_fingerprint`).
    positions
        (count,) uint32, the token position of each key, ascending.
    """

    def __init__(
        self,
        folder: Path,
        files: dict[str, FileEntry],
        record: DenseRecord,
        starts: NDArray[np.uint32],
        removed: tuple[int, ...],
    ) -> None:
        self.layer, self.dims, self.hidden_size, self.model = (
            record.layer,
            record.dims,
            record.hidden_size,
            record.fingerprint,
        )
        self._folder, self._files = folder, files
        # Opened now, since the store may change later.
        self._mapped = {
            name: map_array(folder / name, files[name], _DTYPES.get(name, ("<f4",)), scattered=True)
            for name in DENSE_FILES
        }
        self.positions: NDArray[np.uint32] = self._mapped[POSITIONS]
        self._starts = starts
        self._removed = np.array(removed, np.int64)

    @property
    def count(self) -> int:
        """Number of keys, including those of removed documents."""
        return len(self.positions)

    @cached_property
    def _checked(self) -> dict[str, NDArray[Any]]:
        """Contents of the files, after a comparison of their checksums."""
        for name, array in self._mapped.items():
            check_content(self._folder / name, self._files[name], array)
        return self._mapped

    @cached_property
    def transform(self) -> Transform:
        """Mean, scale and principal components."""
        mean, scale, components = arrays = [self._checked[name] for name in TRANSFORM]
        sizes = (self.hidden_size, self.hidden_size, self.hidden_size * self.dims)
        fit = tuple(map(len, arrays)) == sizes and all(np.isfinite(a).all() for a in arrays) and (scale > 0).all()
        if not fit:
            raise StoreCorruptError(f"a transform of sizes {sizes} and finite numbers in {self._folder}", "another")
        return Transform(mean, scale, components.reshape(self.hidden_size, self.dims))

    @cached_property
    def _faiss(self) -> Any:
        path, content = self._folder / INDEX, self._checked[INDEX]
        try:
            index = open_index(content)
        except (RuntimeError, MemoryError) as error:
            got = next(iter(str(error).splitlines()), "") or "more than the memory holds"
            raise StoreCorruptError(f"a FAISS index in {path}", got) from error
        if not self.count or (index.ntotal, index.d) != (self.count, self.dims):
            expected = f"{self.count:,} keys of {self.dims} dimensions in {path}"
            raise StoreCorruptError(expected, f"{index.ntotal:,} of {index.d}")
        return index

    def prepare(self) -> None:
        """Compare the checksums and open the index now instead of at the first search.

        Raises
        ------
        StoreCorruptError
            When the files are damaged.
        """
        _ = self.transform, self._faiss

    def search(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the positions whose keys are most similar to hidden states.

        Parameters
        ----------
        hidden
            (q, hidden_size) float32, of the model and the layer the index was built with.
        k
            Number of neighbours.

        Returns
        -------
        tuple
            Similarities (q, k) float32, descending, and positions (q, k) int64 of the tokens with similar hidden
            states in the segment's token array; continuations begin at the next position. Both are -1 after the last
            match.

        Raises
        ------
        ModelMismatchError
            When the hidden states have another size.
        ConfigError
            When a hidden state is not finite.
        StoreCorruptError
            When the files of the index are damaged.
        """
        hidden = np.ascontiguousarray(hidden, np.float32)
        if hidden.ndim != 2 or hidden.shape[1] != self.hidden_size:
            raise ModelMismatchError(
                f"hidden states of {self.hidden_size} numbers, as those of the model of the dense index",
                f"shape {hidden.shape}",
                "Use the model the store was built with, or build the store again with `--dense MODEL`.",
            )
        if not np.isfinite(hidden).all():
            raise ConfigError(
                "finite hidden states to search for", "NaN or infinity", "Run the model in bfloat16 or float32."
            )
        keys, wanted = self.transform(hidden), k
        while True:
            similarity, numbers = nearest(self._faiss, keys, wanted)
            valid = (numbers >= 0) & (numbers < self.count)
            positions = np.where(valid, self.positions[np.where(valid, numbers, 0)], -1).astype(np.int64)
            valid &= (positions < int(self._starts[-1])) & np.isfinite(similarity)
            valid &= ~np.isin(np.searchsorted(self._starts, positions, side="right") - 1, self._removed)
            if wanted >= self.count or not len(self._removed) or (valid.sum(1) >= k).all():
                break
            wanted = min(2 * wanted, self.count)
        order = np.argsort(~valid, axis=1, kind="stable")[:, :k]
        similarity = np.take_along_axis(np.where(valid, similarity, -1), order, 1)
        return similarity.astype(np.float32, copy=False), np.take_along_axis(np.where(valid, positions, -1), order, 1)


def continuation(segment: Segment, position: int, most: int) -> NDArray[np.int32]:
    """Return the token ids that follow a position in its document, (n,) int32 with n ≤ `most`.

    Raises
    ------
    StoreCorruptError
        The segment is damaged: no document contains the position, or the text has undefined local ids.
    """
    number = segment.document_of(position)
    if not 0 <= number < len(segment.document_starts) - 1:
        raise StoreCorruptError(f"a document at position {position} of segment {segment.name}", "none")
    end = int(segment.document_starts[number + 1]) - 1
    return segment.ids_of(segment.tokens[position + 1 : min(position + 1 + most, end)]).astype(np.int32)


def model_fingerprint(model: Any) -> str:
    """Return the fingerprint of a model: SHA-256 over its configuration and a sample of its weights, in bfloat16.

    It does not depend on the dtype of the loaded weights, nor on where they were loaded from.
    """
    import torch

    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            if weight.device.type == "meta":  # offloaded
                continue
            try:
                flat = weight.detach().reshape(-1)
            except (RuntimeError, NotImplementedError):  # consists of other tensors, as torchao's quantised ones do
                continue
            at = torch.linspace(0, len(flat) - 1, min(WEIGHTS_SAMPLED, len(flat)), dtype=torch.float64).long()
            sample = flat[at.to(flat.device)].to(torch.bfloat16).view(torch.int16)
            digest.update(sample.cpu().numpy().astype("<i2").tobytes())
    return f"sha256:{digest.hexdigest()}"


def check_model(record: DenseRecord, model: Any, name: str = "") -> None:
    """Check that a store's dense indexes were built with a given model.

    Raises
    ------
    ModelMismatchError
        They were built with another model; the message names both.
    """
    fingerprint = model_fingerprint(model)
    if fingerprint == record.fingerprint:
        return
    size = hidden_size_of(model)
    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    raise ModelMismatchError(
        f"the model of the dense index ({record.model}, {record.fingerprint[7:19]}, hidden size {record.hidden_size})",
        f"{name} ({fingerprint[7:19]}, hidden size {size})",
        "Use that model, build the store again with `--dense` and this one, or draft with dense='off'.",
    )


def hidden_size_of(model: Any) -> int:
    """Return the size of the hidden states of a model's text part."""
    return int(model.config.get_text_config().hidden_size)


FLAT_BELOW = 50_000
"""Smallest number of keys for which the index is approximate."""
SCANNED, REFINED = (16, 8), (32, 6)
"""Parts of a key and bits per part, of the codes that are scanned and of those that re-rank the best matches."""
CELLS = 4
"""Number of IVF cells divided by the square root of the number of keys."""
PROBES, RANKED = 32, 1.5
"""Cells scanned per query, and candidates re-ranked per requested neighbour."""
ASKED = 50
"""Fewest neighbours requested of FAISS, which re-ranks `RANKED` times as many."""
_SEED = 1234


def _faiss() -> Any:
    """Import FAISS on first use; its type stubs are incomplete."""
    survive_forks()
    return import_module("faiss")


def build_index(keys: NDArray[np.float32]) -> Any:
    """Build an index of keys (n, dims) of length one, numbered from 0."""
    index = _faiss().IndexFlatIP(keys.shape[1]) if len(keys) < FLAT_BELOW else _ivf_pq(keys)
    index.add(keys)
    return index


def _ivf_pq(keys: NDArray[np.float32]) -> Any:
    """Return a trained, empty IVF index that re-ranks by a product quantizer; distances are 2 - 2 * cosine."""
    faiss = _faiss()
    count, dims = keys.shape
    cells = int(CELLS * count**0.5)
    random = np.random.default_rng(_SEED)
    sample = keys[np.sort(random.choice(count, min(count, max(1 << 16, 64 * cells)), replace=False))]
    # Few points are enough; FAISS would print a warning.
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
    """Return the largest divisor of a key's length that is at most `most`."""
    return max(parts for parts in range(1, most + 1) if dims % parts == 0)


def index_content(index: Any) -> NDArray[np.uint8]:
    """Return an index as bytes: when FAISS writes a file itself, it may not report a full disk."""
    content: NDArray[np.uint8] = _faiss().serialize_index(index)
    return content


def open_index(content: NDArray[np.uint8]) -> Any:
    """Open an index in memory-mapped content without copying its arrays; it keeps the content alive.

    Raises
    ------
    RuntimeError
        The content is not an index, or of a kind that no release wrote.
    """
    faiss = _faiss()
    reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(content), len(content))
    index = faiss.read_index(reader, faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)  # this table makes queries slower
    kinds = ((faiss.IndexFlatIP, True), (faiss.IndexHNSWSQ, True), (faiss.IndexIVFPQR, False))
    if (type(index), index.metric_type == faiss.METRIC_INNER_PRODUCT) not in kinds:
        raise RuntimeError(f"a {type(index).__name__} of metric {index.metric_type}")
    index.referenced_objects = [content]  # FAISS keeps alive what its indexes point into in the same way
    return index


def nearest(index: Any, keys: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return similarities (q, k) and numbers (q, k) of the keys most similar to (q, dims); -1 after the last."""
    if not isinstance(index, _faiss().IndexIVF):
        similarity, numbers = index.search(keys, k)
        return similarity, numbers
    distances, numbers = index.search(keys, max(k, ASKED))
    return 1 - distances[:, :k] / 2, numbers[:, :k]  # keys have length one
