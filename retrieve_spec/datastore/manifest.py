"""Manifest: one JSON file that lists the contents of a store, replaced atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.files import FileEntry, replace_file, unreadable
from retrieve_spec.errors import (
    BuildError,
    RetrieveSpecError,
    StoreCorruptError,
    StoreIncompleteError,
    StoreNotFoundError,
    StoreVersionError,
)

FORMAT_VERSION = 4
"""Format of stores with distilled tables; versions of the library that do not know them refuse it."""
_WITHOUT_TABLES = 3
MANIFEST = "manifest.json"
CATALOG = "catalog.sqlite"
WORK = "work"
SEGMENTS = "segments"
TOMBSTONES = "tombstones"
DISTILLED = "distilled"
GONE = ".gone"
_ESCAPED = "backslashreplace"
"""Error handler for paths that are not UTF-8, which become JSON escapes."""
_REBUILD = "Restore it from a copy, or build the store again."
MOST_EVENTS = 32
"""Most changes in a history."""


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One immutable part of a store.

    Attributes
    ----------
    name
        Folder below ``segments``, named by the hash of its files (`content_name`).
    documents, tokens
        Documents and tokens that can be drafted from; removed ones are not counted.
    added_at
        UTC time at which it was added to the store.
    origins
        (licence, source) pairs, to whose numbers its document table refers.
    files
        Files of the folder by name.
    tombstones
        Files below ``tombstones`` that list what is removed of it, by name; empty if nothing is.
    """

    name: str
    documents: int
    tokens: int
    added_at: str
    origins: tuple[tuple[str, str], ...]
    files: dict[str, FileEntry]
    tombstones: dict[str, FileEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DistilledEntry:
    """Table of one model's next tokens after short contexts (`retrieve_spec.datastore.distilled`).

    Attributes
    ----------
    name
        Folder below ``distilled``, named by the hash of its files (`content_name`).
    model
        Fingerprint of the model (`model_fingerprint`).
    tokens
        Number of tokens that the model generated and read.
    files
        Files of the folder by name.
    title
        Name of the model, and how its weights are quantised, for people; empty in stores of earlier versions.
    contexts
        Number of contexts in the table; 0 in stores of earlier versions.
    """

    name: str
    model: str
    tokens: int
    files: dict[str, FileEntry]
    title: str = ""
    contexts: int = 0


def content_name(files: dict[str, FileEntry]) -> str:
    """Return the name of a folder of files, a hash of their names and contents."""
    lines = (f"{name} {entry.bytes} {entry.sha256} {entry.dtype}\n" for name, entry in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class DenseRecord:
    """Model and settings that the dense indexes of a store were built with.

    Attributes
    ----------
    model, fingerprint
        Name or folder from which the model was loaded, and its `model_fingerprint`.
    layer
        `"last"` (after the final norm), or the number of the layer whose outputs are the keys.
    dims, hidden_size
        Length of a key, and of a hidden state.
    """

    model: str
    fingerprint: str
    layer: int | str
    dims: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a store: everything needed to open it.

    Attributes
    ----------
    fingerprint
        Fingerprint of the tokenizer (`tokenizer_fingerprint`).
    tokenizer
        The tokenizer's copy in the store.
    vocabulary
        Token ids are below this number.
    config
        Settings (`StoreConfig`) of the first build, which later changes use, too.
    segments
        The segments, in order; their counts add up.
    generation
        Increases with every change of the store.
    history
        One entry per change, at most the last `MOST_EVENTS`: verb, time, version, sources or arguments, counts, and
        what was skipped and why.
    dense
        How its dense indexes were built, None without any.
    distilled
        Distilled tables, at most one per model.
    """

    fingerprint: str
    tokenizer: FileEntry
    vocabulary: int
    config: dict[str, Any] = field(default_factory=dict)
    segments: tuple[SegmentEntry, ...] = ()
    generation: int = 0
    history: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    dense: DenseRecord | None = None
    distilled: tuple[DistilledEntry, ...] = ()

    @property
    def tokenizer_name(self) -> str:
        """File name of the tokenizer's copy: a content hash, so that a store can change its tokenizer atomically."""
        return f"tokenizer-{self.tokenizer.sha256[:12]}.json"

    @property
    def documents(self) -> int:
        """Number of documents that can be drafted from."""
        return sum(segment.documents for segment in self.segments)

    @property
    def tokens(self) -> int:
        """Number of tokens that can be drafted from."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Size of the segments' arrays in bytes."""
        return sum(entry.bytes for segment in self.segments for entry in segment.files.values())

    @property
    def content(self) -> str:
        """SHA-256 of the store's contents; equal for equal texts in equal order with equal tables."""
        lines = [
            f"{segment.name} {' '.join(sorted(entry.sha256 for entry in segment.tombstones.values()))}"
            for segment in self.segments
        ]
        lines += [f"{DISTILLED} {entry.name}" for entry in self.distilled]
        return hashlib.sha256("\n".join([self.fingerprint, *lines]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the format version and a checksum of the rest."""
        body = {
            "format": FORMAT_VERSION if self.distilled else _WITHOUT_TABLES,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "content": self.content,
            **asdict(self),
        }
        return {**body, "checksum": _checksum(body)}


def _checksum(body: dict[str, Any]) -> str:
    content = json.dumps(body, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", _ESCAPED)).hexdigest()


def write_manifest(store: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically, which makes a change take effect."""
    replace_file(store / MANIFEST, content_of(manifest))


def files_of(manifest: Manifest) -> Iterator[tuple[str, FileEntry]]:
    """Yield every file that a store consists of: its path below the folder, and its record."""
    yield manifest.tokenizer_name, manifest.tokenizer
    for entry in manifest.segments:
        for name, file in sorted(entry.files.items()):
            yield f"{SEGMENTS}/{entry.name}/{name}", file
        for name, file in sorted(entry.tombstones.items()):
            yield f"{TOMBSTONES}/{name}", file
    for table in manifest.distilled:
        for name, file in sorted(table.files.items()):
            yield f"{DISTILLED}/{table.name}/{name}", file


def content_of(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file."""
    return json.dumps(manifest.to_json(), indent=1, ensure_ascii=False).encode("utf-8", _ESCAPED)


def read_manifest(store: Path) -> Manifest:
    """Read and check the manifest of a store.

    Raises
    ------
    StoreNotFoundError
        There is no store at the path.
    StoreIncompleteError
        Its first build was interrupted.
    StoreVersionError
        Another version of this library wrote it.
    StoreCorruptError
        The manifest is damaged.
    StoreError
        It may not be read.
    """
    path = store / MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(store) from error
    except OSError as error:
        raise unreadable(path, error) from error
    return manifest_of(content, path)


def manifest_of(content: bytes, path: str | Path) -> Manifest:
    """Parse the content of a manifest's file; errors are those of `read_manifest`."""
    try:
        raw = json.loads(content)
    except ValueError as error:
        raise StoreCorruptError(f"JSON in {path}", f"{error}", _REBUILD) from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(found, int):
        raise StoreCorruptError(f"a store manifest in {path}", "JSON without a format version", _REBUILD)
    if found not in (_WITHOUT_TABLES, FORMAT_VERSION):
        remedy = "Upgrade retrieve-spec to read it." if found > FORMAT_VERSION else _REBUILD
        raise StoreVersionError(f"format {FORMAT_VERSION} in {path}", f"format {found}", remedy)
    recorded = raw.pop("checksum", None)
    if recorded != _checksum(raw):
        raise StoreCorruptError(
            f"content of checksum {str(recorded)[:12]} in {path}", f"checksum {_checksum(raw)[:12]}", _REBUILD
        )
    return Manifest(
        raw["fingerprint"],
        FileEntry(**raw["tokenizer"]),
        raw["vocabulary"],
        raw["config"],
        tuple(map(entry_of, raw["segments"])),
        raw["generation"],
        tuple(raw["history"]),
        DenseRecord(**raw["dense"]) if raw.get("dense") else None,
        tuple(DistilledEntry(**{**entry, "files": _files(entry["files"])}) for entry in raw.get("distilled", ())),
    )


def entry_of(record: dict[str, Any]) -> SegmentEntry:
    """Return a segment's entry from its JSON form."""
    pairs = tuple((licence, source) for licence, source in record["origins"])
    kinds = ("files", "tombstones")
    return SegmentEntry(**{**record, "origins": pairs, **{kind: _files(record[kind]) for kind in kinds}})


def _files(record: dict[str, dict[str, Any]]) -> dict[str, FileEntry]:
    return {name: FileEntry(**file) for name, file in record.items()}


def _missing(store: Path) -> StoreNotFoundError | StoreIncompleteError:
    """Return the error for a folder without a manifest."""
    if (store / WORK).is_dir():
        return StoreIncompleteError(
            f"a finished datastore at {store}",
            "an interrupted change, or one that is running",
            "Wait for it, run the command again, or delete the folder.",
        )
    return StoreNotFoundError(
        f"a datastore at {store}",
        "a file" if store.is_file() else "no manifest.json there" if store.exists() else "no such folder",
        "Check the path, or build one with `retrieve-spec build`.",
    )


def existing_manifest(store: Path) -> Manifest | None:
    """Return the manifest of a store, None if no build was ever finished."""
    return read_manifest(store) if (store / MANIFEST).exists() else None


def config_of(manifest: Manifest) -> StoreConfig:
    """Return the settings of the store's first build, without dense indexes if the store no longer has any."""
    known = {each.name for each in fields(StoreConfig)}  # earlier versions had more fields
    config = StoreConfig(**{name: value for name, value in manifest.config.items() if name in known})
    return config if manifest.dense is not None else replace(config, dense=None)


@contextmanager
def explain_write_errors(store: Path) -> Iterator[None]:
    """Raise a `BuildError` for a full disk, a quota or missing permission."""
    try:
        yield
    except RetrieveSpecError:  # some are OSErrors too
        raise
    except OSError as error:
        remedy = (
            "Check permissions and free space, or choose another place; what was written is deleted, and a store that "
            "was there is as it was."
        )
        raise BuildError(f"to write to {store}", str(error), remedy) from error


def drop_stale_files(store: Path, manifest: Manifest | None) -> None:
    """Delete files that the manifest does not list: left by interrupted changes, or replaced."""
    segments = manifest.segments if manifest else ()
    keep_only(store / SEGMENTS, {entry.name for entry in segments})
    keep_only(store / TOMBSTONES, {name for entry in segments for name in entry.tombstones})
    keep_only(store / DISTILLED, {table.name for table in (manifest.distilled if manifest else ())})


def keep_only(folder: Path, names: set[str]) -> None:
    """Delete everything in a folder except for some names."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in names:
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.suffix == GONE:
            shutil.rmtree(path, ignore_errors=True)
        else:  # atomically: half a folder must not be taken for a segment
            gone = path.with_suffix(GONE)
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)
