"""Removing: from paths or a condition to documents, and to a store whose indexes leave them out."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.catalog import Catalog, Document, rows_checksum
from retrieve_spec.datastore.change import ChangeReport, publish
from retrieve_spec.datastore.dense import DENSE_FILES
from retrieve_spec.datastore.files import FileEntry, sync_folder
from retrieve_spec.datastore.fresh import config_of
from retrieve_spec.datastore.manifest import CATALOG, SEGMENTS, Manifest, SegmentEntry
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.segment import SUFFIX, Segment, write_arrays
from retrieve_spec.datastore.sources import glob
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError

_SHARED = ("tokens", "vocabulary", "documents")


def choose_documents(store: Path, manifest: Manifest, paths: Sequence[str], where: str) -> dict[str, set[int]]:
    """Numbers of the documents to remove, by segment.

    Raises
    ------
    BuildError
        When neither paths nor a condition is given, or the condition is no SQL.
    """
    if not paths and not where:
        raise BuildError("documents to remove", "neither paths nor a condition", "Give paths, globs or --where SQL.")
    patterns = [glob(path) for path in paths]
    chosen: dict[str, set[int]] = {}
    with Catalog(store / CATALOG) as catalog:
        try:
            rows = catalog.db.conn.execute(
                f"select segment, number, path from documents where removed_at is null and ({where or '1'})"
            ).fetchall()
        except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.Warning) as error:  # by version of Python
            raise BuildError("an SQL condition over the documents table", f"{where!r} ({error})", "Mend it.") from error
    live = {segment.name for segment in manifest.segments}
    for segment, number, name in rows:
        if segment in live and (not paths or name in paths or any(p.fullmatch(name) for p in patterns)):
            chosen.setdefault(segment, set()).add(number)
    return chosen


def remove_chosen(
    work: WorkFolder, manifest: Manifest, plan: dict[str, Any], chosen: dict[str, set[int]], progress: bool
) -> ChangeReport:
    """Write the segments of chosen documents anew, leave out those of which nothing is left, and publish the rest."""
    store = open_datastore(work.store)
    config = config_of(manifest)
    watch = Stopwatch(progress)
    segments = []
    catalog: dict[str, list[Document]] = {}
    with watch.stage("indexing", sum(s.tokens for s in manifest.segments if s.name in chosen), "tok") as bar:
        for segment, entry in zip(store.segments, manifest.segments, strict=True):
            gone = chosen.get(entry.name, set())
            if not gone:
                segments.append(entry)
            elif len(gone) < entry.documents:
                store.check_text(entry)
                name = f"{manifest.next_segment + len(catalog):06d}"
                rows = [
                    replace(row, segment=name, removed_at=plan["at"] if row.number in gone else row.removed_at)
                    for row in store.documents(entry)
                ]
                rewritten = without_documents(work, name, segment, entry, gone, config)
                segments.append(replace(rewritten, catalog=rows_checksum(rows)))
                catalog[name] = rows
            bar.update(entry.tokens if gone else 0)
    store.catalog.close()
    count = sum(len(numbers) for numbers in chosen.values())
    removed = manifest.tokens - sum(segment.tokens for segment in segments)
    report = ChangeReport("remove", count, removed, len(segments), (), watch.seconds)
    return publish(work, manifest, tuple(segments), catalog, plan, report)


def without_documents(
    work: WorkFolder, name: str, segment: Segment, entry: SegmentEntry, numbers: set[int], config: StoreConfig
) -> SegmentEntry:
    """Write a segment anew whose index leaves out some documents; the text is shared through hard links.

    Raises
    ------
    BuildError
        When the segment keeps n-grams only.
    """
    if not len(segment.tokens):
        raise BuildError(
            "a store that keeps its text, or all documents of a segment",
            f"{work.store}, which keeps n-grams only",
            "Build it again without these documents.",
        )
    removed = sorted({*entry.removed, *numbers})
    starts = segment.document_starts.astype(np.int64)
    gone = np.zeros(len(segment.tokens), np.bool_)
    for number in removed:
        gone[starts[number] : starts[number + 1]] = True
    sa = segment.suffix_array[~gone[segment.suffix_array]]
    folder = work.path / f"segment-{name}"
    folder.mkdir()
    shared: dict[str, FileEntry] = {}
    for file in (*(part + SUFFIX for part in _SHARED), *(part for part in DENSE_FILES if part in entry.files)):
        _link(work.store / SEGMENTS / entry.name / file, folder / file)
        shared[file] = entry.files[file]
    written = write_arrays(folder, segment.tokens, segment.to_global, segment.document_starts, sa, config, skip=_SHARED)
    sync_folder(folder)
    return SegmentEntry(name, len(starts) - 1 - len(removed), len(sa), tuple(removed), "", shared | written)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
