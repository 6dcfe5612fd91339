"""Conversion of stores in the previous format; the arrays stay as they are.

Format 2 kept the documents in one SQLite catalogue, and wrote segments anew whenever documents were removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieve_spec._version import __version__
from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.addresses import folder_of
from retrieve_spec.datastore.change import ChangeReport, publish, report_of, utc_now, writer
from retrieve_spec.datastore.dense import DENSE_FILES
from retrieve_spec.datastore.documents import Origin, Row, table_arrays
from retrieve_spec.datastore.files import FileEntry, check_content, entries_of, map_array, write_files
from retrieve_spec.datastore.manifest import (
    CATALOG,
    SEGMENTS,
    DenseRecord,
    Manifest,
    SegmentEntry,
    checked_body,
    content_name,
)
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.removal import with_tombstones
from retrieve_spec.datastore.segment import SUFFIX, open_segment, write_segment
from retrieve_spec.datastore.tombstones import no_tombstones
from retrieve_spec.datastore.union import link_files
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import StoreCorruptError

_BEFORE = 2
_COLUMNS = ("number", "path", "licence", "source", "sha256", "start", "tokens", "added_at", "removed_at")


def convert_datastore(path: str | os.PathLike[str], *, progress: bool = False) -> ChangeReport:
    """Bring a datastore of format 2 up to the format of this version.

    Killed at any moment, it leaves the old store or the new one. Segments of which documents had been removed are
    indexed anew without them.

    Parameters
    ----------
    path
        Folder of the store.
    progress
        Show bars on standard error.

    Raises
    ------
    StoreVersionError
        When the store has another format, as this one.
    StoreCorruptError
        When its catalogue or a file is damaged.
    """
    store = folder_of(path, "convert")
    with writer(store) as work:
        raw = checked_body(store, _BEFORE)
        recorded = (raw["history"][0].get("config") if raw["history"] else None) or {}
        known = {name: value for name, value in recorded.items() if name in StoreConfig.__dataclass_fields__}
        config = asdict(StoreConfig(**known))
        manifest = Manifest(
            raw["fingerprint"],
            FileEntry(**raw["tokenizer"]),
            raw["vocabulary"],
            config,
            (),
            raw["generation"],
            tuple({"generation": number, **event} for number, event in enumerate(raw["history"], 1)),
            DenseRecord(**raw["dense"]) if raw.get("dense") else None,
        )
        plan = {"verb": "convert", "generation": manifest.generation, "at": utc_now(), "version": __version__}
        work.begin(plan)
        watch = Stopwatch(progress)
        entries: list[SegmentEntry] = []
        with watch.stage("converting", raw["tokens"], "tok") as bar, closing(_catalogue(store)) as rows:
            for segment in raw["segments"]:
                entries.append(_converted(work, manifest, segment, rows, len(entries)))
                bar.update(segment["tokens"])
        report = report_of("convert", entries, len(entries), (), watch.seconds)
        publish(work, manifest, (), entries, plan, report)
        (store / CATALOG).unlink(missing_ok=True)
        return report


def _catalogue(store: Path) -> sqlite3.Connection:
    path = store / CATALOG
    if not path.is_file():
        raise StoreCorruptError(f"a catalogue at {path}", "no file")
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def _rows(connection: sqlite3.Connection, segment: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Documents of a segment as the catalogue lists them."""
    query = f"select {', '.join(_COLUMNS)} from documents where segment = ? order by number"
    try:
        rows = connection.execute(query, (segment["name"],)).fetchall()
    except sqlite3.DatabaseError as error:
        raise StoreCorruptError("a readable catalogue", str(error)) from error
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(list(row)).encode())
    if digest.hexdigest() != segment["catalog"]:
        raise StoreCorruptError(f"the rows of segment {segment['name']} as they were written", "others")
    return rows


def _converted(
    work: WorkFolder, manifest: Manifest, segment: dict[str, Any], connection: sqlite3.Connection, number: int
) -> SegmentEntry:
    """Put a segment of the format before into the work folder, in this one's form."""
    source = work.store / SEGMENTS / segment["name"]
    files = entries_of(segment["files"])
    listed = _rows(connection, segment)
    added_at = max((str(row[_COLUMNS.index("added_at")]) for row in listed), default="")
    rows = [Row(row[1], row[2], row[3], row[4], row[6]) for row in listed]
    removed = segment["removed"]
    if removed:
        return _sorted_again(work, manifest, files, source, rows, removed, number, added_at)
    folder = work.path / f"segment-{number:06d}"
    link_files(source, files, folder)
    arrays, origins = table_arrays(rows)
    files |= write_files(folder, {name + SUFFIX: array for name, array in sorted(arrays.items())})
    return _entry(number, rows, added_at, origins, files)


def _entry(
    number: int, rows: list[Row], added_at: str, origins: tuple[Origin, ...], files: dict[str, FileEntry]
) -> SegmentEntry:
    tokens = sum(row.tokens for row in rows)
    return SegmentEntry(f"{number:06d}", len(rows), tokens, added_at, origins, files)


def _sorted_again(
    work: WorkFolder,
    manifest: Manifest,
    files: dict[str, FileEntry],
    source: Path,
    rows: list[Row],
    removed: list[int],
    number: int,
    added_at: str,
) -> SegmentEntry:
    """A segment of which documents had been removed: without their text, or with tombstones where keys point there."""
    for name in ("tokens", "vocabulary", "documents"):
        check_content(source / (name + SUFFIX), files[name + SUFFIX])
    to_global = map_array(source / "vocabulary.bin", files["vocabulary.bin"])
    ids = to_global[map_array(source / "tokens.bin", files["tokens.bin"])].astype(np.uint32)
    dense = {name: files[name] for name in DENSE_FILES if name in files}
    starts = map_array(source / "documents.bin", files["documents.bin"]).astype(np.int64)
    if not dense:
        keep = np.ones(len(ids), np.bool_)
        for document in removed:
            keep[starts[document] : starts[document + 1]] = False
        ids = ids[keep]
        gone = set(removed)
        rows = [row for document, row in enumerate(rows) if document not in gone]
    folder = work.path / f"segment-{number:06d}"
    link_files(source, dense, folder)
    written, origins = write_segment(folder, ids, rows, StoreConfig(**manifest.config))
    entry = _entry(number, rows, added_at, origins, written | dense)
    if not dense:
        return entry
    named = replace(entry, name=content_name(entry.files))
    opened = open_segment(folder, named, manifest.vocabulary)
    return replace(with_tombstones(work, opened, named, removed, no_tombstones()), name=entry.name)
