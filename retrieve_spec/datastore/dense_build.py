"""Building dense indexes for the segments of a change, resumable step by step.

The work folder holds, beside the segments, ``dense-transform.bin`` (mean, scale, components), ``keys-N-M.bin``
(checkpoint M of the keys of segment N) and ``dense-N.json``, the record that the index files of segment N are written.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import DenseConfig
from retrieve_spec.datastore.change import WorkFolder
from retrieve_spec.datastore.dense import (
    INDEX,
    POSITIONS,
    TRANSFORM,
    Transform,
    check_model,
    hidden_size_of,
    model_fingerprint,
)
from retrieve_spec.datastore.dense_faiss import build_index, choose_kind, recall, write_index
from retrieve_spec.datastore.dense_keys import (
    HiddenStates,
    Windows,
    check_dims,
    check_layer,
    choose_windows,
    fit_transform,
    hard_positions,
    is_written,
    prefix_of,
    sample_states,
    windows_of,
    write_keys,
)
from retrieve_spec.datastore.files import FileEntry, entries_of, replace_file, write_files
from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.datastore.manifest import SEGMENTS, DenseRecord, Manifest, SegmentEntry
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.segment import Segment, open_segment
from retrieve_spec.errors import BuildError, TokenizerMismatchError
from retrieve_spec.reference_model import REFERENCE, load_config_and_tokenizer, load_model

_RECORD = "dense-record.json"
_FITTED = "dense-transform.bin"

Part = tuple[Segment, Windows, NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class _Change:
    """What `add_dense` was given."""

    work: WorkFolder
    manifest: Manifest
    entries: list[SegmentEntry]
    config: DenseConfig
    watch: Stopwatch
    fresh: bool


def checked_settings(config: DenseConfig, fingerprint: str) -> DenseConfig:
    """Settings that can be built, with the place of the model as it is known from every folder.

    Finds out before any text is read what needs no weights.

    Parameters
    ----------
    config
        Settings as given.
    fingerprint
        Of the store's tokenizer.

    Raises
    ------
    ModelNotFoundError
        When there is no such model.
    TokenizerMismatchError
        When it has another tokenizer.
    ConfigError
        When keys would have more numbers than its hidden states have, or it has no such layer.
    """
    description, tokenizer = load_config_and_tokenizer(config.model)
    _check_tokenizer(config, tokenizer, fingerprint)
    text = description.get_text_config()
    check_dims(config, int(text.hidden_size))
    check_layer(config.layer, int(text.num_hidden_layers))
    folder = Path(config.model).expanduser()
    return replace(config, model=str(folder.resolve())) if config.model != REFERENCE and folder.is_dir() else config


def _check_tokenizer(config: DenseConfig, tokenizer: Any, fingerprint: str) -> None:
    if (found := tokenizer_fingerprint(tokenizer)) != fingerprint:
        raise TokenizerMismatchError(
            f"a model with the store's tokenizer ({fingerprint[7:19]})",
            f"{config.model} with tokenizer {found[7:19]}",
            "Build the store with the tokenizer of the model.",
        )


def add_dense(
    work: WorkFolder,
    manifest: Manifest,
    entries: list[SegmentEntry],
    config: DenseConfig,
    watch: Stopwatch,
    *,
    fresh: bool,
) -> tuple[list[SegmentEntry], DenseRecord, dict[str, Any]]:
    """Add dense indexes to the segments of a change.

    Parameters
    ----------
    work
        Folder of the change, with the finished segments.
    manifest
        The manifest that the change started from.
    entries
        The new segments.
    config
        What to build.
    watch
        Times the stages and shows how far they are.
    fresh
        Nothing of the old store remains, so that the transform is fitted anew and the model may be another.

    Returns
    -------
    tuple
        The segments with their dense files, what the manifest records, and the report.

    Raises
    ------
    ModelMismatchError, TokenizerMismatchError
        When the model is not that of the store.
    BuildError
        When hidden states are not finite, or there is nothing to index.
    """
    done = [work.path / f"dense-{entry.name}.json" for entry in entries]
    if not all(path.exists() for path in done):
        _build(_Change(work, manifest, entries, config, watch, fresh))
    record = DenseRecord(**json.loads((work.path / _RECORD).read_bytes()))
    notes = [json.loads(path.read_bytes()) for path in done]
    files = [entries_of(note["files"]) for note in notes]
    reports = [note["report"] for note in notes]
    extended = [replace(entry, files=entry.files | new) for entry, new in zip(entries, files, strict=True)]
    return extended, record, _summary(reports, work)


def _summary(reports: list[dict[str, Any]], work: WorkFolder) -> dict[str, Any]:
    vectors = sum(report["vectors"] for report in reports)
    weighed = sum(report["recall_at_10"] * report["vectors"] for report in reports)
    fitted = work.path / "dense-fit.json"
    return {
        "vectors": vectors,
        "positions": sum(report["positions"] for report in reports),
        "kinds": sorted({report["kind"] for report in reports if report["vectors"]}),
        "recall_at_10": round(weighed / max(vectors, 1), 4),
        "bytes_per_vector": round(sum(report["bytes"] for report in reports) / max(vectors, 1), 2),
        "variance_kept": json.loads(fitted.read_bytes())["variance_kept"] if fitted.exists() else None,
    }


def _build(change: _Change) -> None:
    config, manifest = change.config, change.manifest
    model, tokenizer = load_model(config.model)
    _check_tokenizer(config, tokenizer, tokenizer_fingerprint(change.work.store / manifest.tokenizer_name))
    old = None if change.fresh else manifest.dense
    begun = change.work.path / _RECORD
    known = DenseRecord(**json.loads(begun.read_bytes())) if begun.exists() else old
    if known is not None:  # keys of two models do not compare
        check_model(known, model, config.model)
        record = known
    else:
        size = hidden_size_of(model)
        check_dims(config, size)
        record = DenseRecord(config.model, model_fingerprint(model), config.layer, config.dims, size)
    replace_file(begun, json.dumps(asdict(record)).encode())
    encoder = HiddenStates(model, record.layer, prefix_of(load_tokenizer(tokenizer), model))
    with change.watch.stage("choosing", None, "tok"):
        parts = _parts(change, encoder)
    if not any(taken.any() for _, _, taken in parts) and old is None:
        raise BuildError("positions to index", "none", "Build from more text, or without --thin.")
    transform = _transform(change, record, encoder, parts)
    for entry, part in zip(change.entries, parts, strict=True):
        if not (change.work.path / f"dense-{entry.name}.json").exists():
            _build_one(change, entry, part, transform, encoder)


def _parts(change: _Change, encoder: HiddenStates) -> list[Part]:
    """Segments, and the windows and positions whose keys are wanted."""
    work, config = change.work, change.config
    size = encoder.window(config.window)
    tokens = sum(entry.tokens for entry in change.entries)
    parts = []
    for entry in change.entries:
        folder = work.path / f"segment-{entry.name}"
        folder = folder if folder.exists() else work.store / SEGMENTS / entry.name  # moved before a kill
        segment = open_segment(folder, entry, change.manifest.vocabulary)
        windows = windows_of(segment.document_starts, segment.removed, size, min(config.overlap, size // 2))
        keep = hard_positions(segment) if config.thin else np.ones(len(segment.tokens), np.bool_)
        share = -(-config.max_vectors * entry.tokens // tokens) if config.max_vectors else 0
        parts.append((segment, *choose_windows(windows, keep, share)))
    return parts


def _transform(change: _Change, record: DenseRecord, encoder: HiddenStates, parts: list[Part]) -> Transform:
    """The store's own transform where it has one, so that similarities compare; otherwise one fitted to a sample."""
    work, manifest, sample = change.work, change.manifest, change.config.sample
    path, size = work.path / _FITTED, record.hidden_size
    if not is_written(path, 2 * size + size * record.dims):
        for entry in manifest.segments if manifest.dense is not None and record == manifest.dense else ():
            segment = open_segment(work.store / SEGMENTS / entry.name, entry, manifest.vocabulary, manifest.dense)
            if segment.dense is not None:
                return segment.dense.transform
        total = min(sample, sum(int(taken.sum()) for _, _, taken in parts))
        with change.watch.stage("fitting", total, "pos") as advance:
            states = sample_states(encoder, parts, sample, advance)
            fitted, kept = fit_transform(states, size, record.dims)
        replace_file(work.path / "dense-fit.json", json.dumps({"variance_kept": round(kept, 4)}).encode())
        replace_file(path, b"".join(a.tobytes() for a in (fitted.mean, fitted.scale, fitted.components)))
    content = np.fromfile(path, np.float32)
    return Transform(content[:size], content[size : 2 * size], content[2 * size :].reshape(size, record.dims))


def _build_one(change: _Change, entry: SegmentEntry, part: Part, transform: Transform, encoder: HiddenStates) -> None:
    work, watch = change.work, change.watch
    with watch.stage("embedding", int(part[2].sum()), "pos") as advance:
        keys, positions = write_keys(work.path, entry.name, encoder, transform, *part, advance)
    report: dict[str, Any] = {"vectors": len(keys), "positions": int(_possible(part[0]))}
    files: dict[str, FileEntry] = {}
    if len(keys):
        kind = choose_kind(change.config.index, len(keys))
        with watch.stage("dense index", None, "key"):
            started = time.perf_counter()
            index = build_index(keys, kind)
            files = _write(work.path / f"segment-{entry.name}", index, positions, transform)
            share = 1.0 if kind == "flat" else recall(index, keys)
        report |= {"kind": kind, "recall_at_10": share, "seconds": round(time.perf_counter() - started, 1)}
    else:
        report |= {"kind": "", "recall_at_10": 0.0}
    report["bytes"] = files[INDEX].bytes + files[POSITIONS].bytes if files else 0
    note = {"files": {name: asdict(file) for name, file in files.items()}, "report": report}
    replace_file(work.path / f"dense-{entry.name}.json", json.dumps(note).encode())
    for path in work.path.glob(f"keys-{entry.name}-*.bin"):
        path.unlink()


def _possible(segment: Segment) -> int:
    """Positions of documents that are followed by something."""
    lengths = np.diff(segment.document_starts.astype(np.int64)) - 2
    return int(np.delete(lengths, list(segment.removed)).sum())


def _write(folder: Path, index: Any, positions: NDArray[np.int64], transform: Transform) -> dict[str, FileEntry]:
    arrays = (positions.astype(np.uint32), transform.mean, transform.scale, transform.components.reshape(-1))
    written = {INDEX: write_index(index, folder / INDEX)}
    return written | write_files(folder, dict(zip((POSITIONS, *TRANSFORM), arrays, strict=True)))
