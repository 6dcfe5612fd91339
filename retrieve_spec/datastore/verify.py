"""Verification: every byte, every order and every count of a store is as it was built."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.change import progress_bar
from retrieve_spec.datastore.dense import DenseIndex
from retrieve_spec.datastore.files import FileEntry, check_content
from retrieve_spec.datastore.manifest import (
    SEGMENTS,
    SKIPPED,
    Manifest,
    SegmentEntry,
    config_of,
    content_name,
    files_of,
    read_manifest,
)
from retrieve_spec.datastore.remote import explain_remote_errors, is_address, read_remote
from retrieve_spec.datastore.segment import (
    DOCUMENTS,
    RANKS,
    SUFFIX,
    Segment,
    document_tokens,
    find_ranks,
    hidden_of,
    index_text,
    local_ids,
    open_segment,
    tombstones_of,
)
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import StoreCorruptError

_ATTEMPTS = 5
_SLOTS, _GRAMS = f"ngram_slots{SUFFIX}", f"grams{SUFFIX}"


def verify_datastore(path: str | os.PathLike[str], *, progress: bool = False) -> dict[str, Any]:
    """Check a datastore completely: checksums, and whether the arrays belong together.

    Parameters
    ----------
    path
        Folder of the store; of the address of a remote, the checksums of all files there are compared.
    progress
        Show a bar on standard error.

    Returns
    -------
    dict
        ``segments``, ``documents``, ``tokens``, ``files`` and ``bytes`` that were checked.

    Raises
    ------
    StoreCorruptError
        Naming the first file or rule that does not hold.
    StoreNotFoundError, StoreIncompleteError, StoreVersionError
        As `open_datastore`.
    """
    if isinstance(path, str) and is_address(path):
        remote, _, manifest = read_remote(path)
        files = list(files_of(manifest))
        checked = _checked(manifest, files)
        with progress_bar("verifying", checked["bytes"], "B", progress) as advance, explain_remote_errors(path):
            for place, file in files:
                for block in remote.blocks(place, file):
                    advance(len(block))
        return checked
    for _ in range(_ATTEMPTS):
        store = open_datastore(path)
        try:
            return _verify(store, progress)
        except (StoreCorruptError, FileNotFoundError):
            # A change may have taken files away since the store was opened: then the new state is what counts.
            if read_manifest(store.path).generation == store.manifest.generation:
                raise
    raise StoreCorruptError(f"to verify {path}", "another process is changing it", "Verify it when that is done.")


def _checked(manifest: Manifest, files: list[tuple[str, FileEntry]]) -> dict[str, Any]:
    counts = {"segments": len(manifest.segments), "documents": manifest.documents, "tokens": manifest.tokens}
    return {**counts, "files": len(files), "bytes": sum(entry.bytes for _, entry in files)}


def _verify(store: Datastore, progress: bool) -> dict[str, Any]:
    manifest = store.manifest
    files = list(files_of(manifest))
    listed = (event["listed"] for event in manifest.history if "listed" in event)
    files += [(f"{SKIPPED}/{one['name']}", FileEntry(one["bytes"], one["sha256"])) for one in listed]
    checked = _checked(manifest, files)
    with progress_bar("checksums", checked["bytes"], "B", progress) as advance:
        for place, entry in files:
            check_content(store.path / place, entry)
            advance(entry.bytes)
    for part in manifest.segments:
        segment = open_segment(store.path / SEGMENTS / part.name, part, manifest.vocabulary, manifest.dense)
        _require(content_name(part.files) == part.name, segment, "the name of its content")
        _check_text(segment, part, config_of(manifest))
        segment.documents.check()
        _check_tombstones(store.path, segment, part)
        if segment.dense is not None:
            _check_dense(segment, segment.dense)
    return checked


def _require(holds: Any, segment: Segment, rule: str) -> None:
    if not holds:
        raise StoreCorruptError(f"{rule} in segment {segment.name}", "something else")


def _rising(array: NDArray[Any]) -> bool:
    return bool((array[1:] > array[:-1]).all())


def _check_text(segment: Segment, entry: SegmentEntry, config: StoreConfig) -> None:
    """Documents and vocabulary; where the text is kept, that indexing it makes the arrays that there are."""
    starts, ids = segment.document_starts, segment.to_global
    _require(starts[0] == 0 and (np.diff(starts.astype(np.int64)) > 1).all(), segment, "rising document starts")
    _require(ids[0] == 0 and _rising(ids[1:]), segment, "rising token ids")
    if not len(segment.tokens):
        return
    _require(starts[-1] == len(segment.tokens), segment, "documents of its text")
    tokens, used = local_ids(segment.ids_of(segment.tokens), starts)
    _require(np.array_equal(used, ids), segment, "the vocabulary of its text")
    made = {name + SUFFIX: array for name, array in index_text(tokens, ids, config).items()}
    known = entry.files.keys() & made.keys()
    if _SLOTS in known and (_GRAMS not in known or made[_SLOTS].nbytes != entry.files[_SLOTS].bytes):
        # A table of an earlier release, or of other settings, which `add_documents` may have been given.
        known = {name for name in known if not name.startswith("ngram_")}
    for name in sorted(known):
        digest = hashlib.sha256(np.ascontiguousarray(made[name]).data).hexdigest()
        _require(digest == entry.files[name].sha256, segment, f"{name} as its text makes it")


def _check_dense(segment: Segment, dense: DenseIndex) -> None:
    """Keys of tokens that something follows, each once, and a transform and an index that answer."""
    positions, tokens = dense.positions.astype(np.int64), np.asarray(segment.tokens)
    inside = len(positions) > 0 and int(positions[-1]) < len(tokens) - 1 and _rising(positions)
    _require(inside, segment, "dense keys of different positions in the text")
    _require((tokens[positions] != 0).all() and (tokens[positions + 1] != 0).all(), segment, "dense keys of tokens")
    similarity, _ = dense.search(dense.transform.mean[None] + dense.transform.scale[None], 1)
    _require(np.isfinite(similarity).all(), segment, "finite similarities of dense keys")


def _check_tombstones(store: Path, segment: Segment, entry: SegmentEntry) -> None:
    """What counts as removed: documents of the segment, exactly their suffixes, and the counts of what is left."""
    found = tombstones_of(store, entry)
    starts, documents = segment.document_starts, len(segment.documents)
    _require(all(map(_rising, found.values())), segment, "rising tombstones")
    hidden = hidden_of(found, documents, entry.name)
    _require(entry.documents == documents - len(hidden), segment, f"{entry.documents:,} documents that are left")
    left = int(starts[-1]) - documents - document_tokens(starts, hidden)
    _require(entry.tokens == left, segment, f"{entry.tokens:,} tokens that are left")
    ranks = np.empty(0, np.uint32)
    if len(found[DOCUMENTS]) and len(segment.tokens):
        ranks = find_ranks(segment.suffix_array, starts, found[DOCUMENTS].tolist())
    _require(np.array_equal(ranks, found[RANKS]), segment, "the ranks of removed suffixes")
