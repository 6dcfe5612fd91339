"""The manifest: from what a store is made of to one JSON file that is put in place atomically, and back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.files import FileEntry, explain_read_errors, replace_file
from retrieve_spec.errors import StoreCorruptError, StoreIncompleteError, StoreNotFoundError, StoreVersionError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
CATALOG = "catalog.sqlite"
WORK = "work"
PLAN = "plan.json"
SEGMENTS = "segments"


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One immutable part of a store.

    Attributes
    ----------
    name
        Folder below ``segments``; never used twice in a store.
    documents, tokens
        Documents and tokens that can be drafted from (removed ones do not count).
    removed
        Numbers of the removed documents, ascending.
    catalog
        SHA-256 over the catalogue's rows of this segment.
    files
        Files of the folder by name.
    """

    name: str
    documents: int
    tokens: int
    removed: tuple[int, ...]
    catalog: str
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class DenseRecord:
    """What the dense indexes of a store were built with.

    Attributes
    ----------
    model, fingerprint
        Name or folder the model was loaded from, and `model_fingerprint` of it.
    layer
        `"last"` (after the final norm), or the number of the layer whose output the keys are.
    dims, hidden_size
        Numbers of a key, and of a hidden state.
    """

    model: str
    fingerprint: str
    layer: int | str
    dims: int
    hidden_size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader has to know before it opens a store.

    Attributes
    ----------
    fingerprint
        Of the tokenizer (`tokenizer_fingerprint`).
    tokenizer
        The copy of the tokenizer that lies in the store.
    vocabulary
        Ids are below this number.
    segments
        In order; their counts add up.
    next_segment
        Number of the next segment folder.
    generation
        Grows with every change of the store.
    history
        One entry per change: verb, time, version, sources or arguments, counts, what was skipped and why.
    dense
        What its dense indexes were built with, or None where there are none.
    """

    fingerprint: str
    tokenizer: FileEntry
    vocabulary: int
    segments: tuple[SegmentEntry, ...] = ()
    next_segment: int = 1
    generation: int = 0
    history: tuple[dict[str, Any], ...] = field(default_factory=tuple)
    dense: DenseRecord | None = None

    @property
    def tokenizer_name(self) -> str:
        """File name of the copy of the tokenizer."""
        return tokenizer_name(self.tokenizer)

    @property
    def documents(self) -> int:
        """Documents that can be drafted from."""
        return sum(segment.documents for segment in self.segments)

    @property
    def tokens(self) -> int:
        """Tokens that can be drafted from."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Size of all arrays."""
        return sum(entry.bytes for segment in self.segments for entry in segment.files.values())

    @property
    def content(self) -> str:
        """SHA-256 over the checksums of all segments: equal stores, equal text in equal order."""
        lines = [
            f"{segment.name} {name} {entry.sha256}"
            for segment in self.segments
            for name, entry in sorted(segment.files.items())
        ]
        return hashlib.sha256("\n".join([self.fingerprint, *lines]).encode()).hexdigest()

    def following(self, segments: tuple[SegmentEntry, ...], next_segment: int, event: dict[str, Any]) -> Manifest:
        """Manifest of the next generation."""
        return replace(
            self,
            segments=segments,
            next_segment=next_segment,
            generation=self.generation + 1,
            history=(*self.history, event),
        )

    def to_json(self) -> dict[str, Any]:
        """JSON object with the format version and a checksum over the rest."""
        body = {
            "format": FORMAT_VERSION,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "content": self.content,
            **asdict(self),
        }
        return {**body, "checksum": _checksum(body)}


def tokenizer_name(entry: FileEntry) -> str:
    """File name of a copy of a tokenizer: by content, so that a store can change to another one atomically."""
    return f"tokenizer-{entry.sha256[:12]}.json"


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def write_manifest(store: Path, manifest: Manifest) -> None:
    """Put a manifest in place at once; from then on the store is what it says."""
    content = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False)
    replace_file(store / MANIFEST, content.encode())


def read_manifest(store: Path) -> Manifest:
    """Read and check the manifest of a store.

    Raises
    ------
    StoreNotFoundError
        When there is no store at the path.
    StoreIncompleteError
        When its first build was interrupted.
    StoreVersionError
        When another version of this library wrote it.
    StoreCorruptError
        When the manifest was altered or cut.
    StoreError
        When it may not be read.
    """
    path = store / MANIFEST
    try:
        with explain_read_errors(path):
            raw = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(store) from error
    except ValueError as error:
        raise StoreCorruptError(f"JSON in {path}", f"{error}", _REBUILD) from error
    version = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise StoreCorruptError(f"a store manifest in {path}", "JSON without a format version", _REBUILD)
    if version != FORMAT_VERSION:
        remedy = "Upgrade retrieve-spec to read it." if version > FORMAT_VERSION else _REBUILD
        raise StoreVersionError(f"format {FORMAT_VERSION} in {path}", f"format {version}", remedy)
    recorded = raw.pop("checksum", None)
    if recorded != _checksum(raw):
        raise StoreCorruptError(
            f"content of checksum {str(recorded)[:12]} in {path}", f"checksum {_checksum(raw)[:12]}", _REBUILD
        )
    return _from_json(raw)


def _from_json(raw: dict[str, Any]) -> Manifest:
    segments = tuple(
        SegmentEntry(
            **{
                **segment,
                "removed": tuple(segment["removed"]),
                "files": {name: FileEntry(**entry) for name, entry in segment["files"].items()},
            }
        )
        for segment in raw["segments"]
    )
    return Manifest(
        raw["fingerprint"],
        FileEntry(**raw["tokenizer"]),
        raw["vocabulary"],
        segments,
        raw["next_segment"],
        raw["generation"],
        tuple(raw["history"]),
        DenseRecord(**raw["dense"]) if raw.get("dense") else None,
    )


def _missing(store: Path) -> StoreNotFoundError | StoreIncompleteError:
    if (store / WORK).is_dir():
        return incomplete(store, f"a finished datastore at {store}")
    return StoreNotFoundError(
        f"a datastore at {store}",
        "a file" if store.is_file() else "no manifest.json there" if store.exists() else "no such folder",
        "Check the path, or build one with `retrieve-spec build`.",
    )


def incomplete(store: Path, expected: str) -> StoreIncompleteError:
    """Error about a folder whose first change was interrupted, naming the command that continues it."""
    try:
        verb = json.loads((store / WORK / PLAN).read_bytes())["verb"]
    except (OSError, ValueError, KeyError, TypeError):
        verb = "build"
    return StoreIncompleteError(
        expected,
        f"an interrupted {verb}, or one that is running",
        f"Wait for it, continue it with `retrieve-spec {verb} {store} --resume`, or delete the folder.",
    )


_REBUILD = "Restore it from a copy, or build the store again."
