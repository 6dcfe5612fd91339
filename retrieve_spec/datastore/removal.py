"""Removal of documents by path or condition: the store drafts nothing from them any more."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.catalog import write_catalog
from retrieve_spec.datastore.change import ChangeReport, WorkFolder, publish
from retrieve_spec.datastore.dense import INDEX
from retrieve_spec.datastore.documents import Row
from retrieve_spec.datastore.files import check_content
from retrieve_spec.datastore.manifest import TOMBSTONES, SegmentEntry, config_of
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.segment import Segment, write_arrays
from retrieve_spec.datastore.shards import check_text
from retrieve_spec.datastore.sources import glob
from retrieve_spec.datastore.store import Datastore, check_files
from retrieve_spec.datastore.tombstones import (
    COPIES,
    DOCUMENTS,
    MOST_TOKENS,
    RANKS,
    document_tokens,
    find_ranks,
    tombstones_of,
    write_tombstones,
)
from retrieve_spec.errors import BuildError

Chosen = dict[str, set[int]]


def choose_documents(store: Datastore, paths: Sequence[str], where: str) -> Chosen:
    """Numbers of the documents to remove, by segment.

    Raises
    ------
    BuildError
        When neither paths nor a condition is given, or the condition is no SQL.
    """
    if not paths and not where:
        raise BuildError("documents to remove", "neither paths nor a condition", "Give paths, globs or --where SQL.")
    patterns = [glob(path) for path in paths]
    if where:
        return _matching(store, where, paths)
    chosen: Chosen = {}
    for segment in store.segments:
        for number, path, *_ in segment.documents.texts():
            if path in paths or any(pattern.fullmatch(path) for pattern in patterns):
                chosen.setdefault(segment.name, set()).add(number)
    return chosen


def _matching(store: Datastore, where: str, paths: Sequence[str]) -> Chosen:
    """Documents for which an SQL condition holds, in the catalogue, and that have one of the paths, if any is given."""
    catalogue = write_catalog(store.path)
    with closing(sqlite3.connect(f"{catalogue.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            rows = connection.execute(
                f"select segment, number, path from documents where removed = 0 and ({where})"
            ).fetchall()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # by version of Python; text that is none
            raise BuildError(
                "an SQL condition over the documents table", f"{where!r} ({error})", "Correct what follows --where."
            ) from error
    patterns = [glob(path) for path in paths]
    chosen: Chosen = {}
    for segment, number, name in rows:
        if not paths or name in paths or any(pattern.fullmatch(name) for pattern in patterns):
            chosen.setdefault(segment, set()).add(number)
    return chosen


def remove_chosen(
    work: WorkFolder, store: Datastore, plan: dict[str, Any], chosen: Chosen, progress: bool
) -> ChangeReport:
    """Publish a store without some documents."""
    watch = Stopwatch(progress)
    with watch.stage("removing", None, "doc"):
        kept, made = without(work, store, chosen)
    count = sum(len(numbers) for numbers in chosen.values())
    left = sum(entry.tokens for entry in (*kept, *made))
    report = ChangeReport(plan["verb"], count, store.manifest.tokens - left, len(kept) + len(made), (), watch.seconds)
    return publish(work, store.manifest, kept, made, plan, report)


def without(
    work: WorkFolder, store: Datastore, chosen: Chosen, first: int = 0
) -> tuple[list[SegmentEntry], list[SegmentEntry]]:
    """Entries of a store's segments without some documents: those that stay, and those that are written anew.

    Parameters
    ----------
    work, store
        The change, and the store, opened as it was written.
    chosen
        Documents to remove, by segment; copies of their text that are not listed go too.
    first
        Number of the first new segment in the work folder.

    Raises
    ------
    BuildError
        When a segment keeps n-grams only and something of it is to stay.
    """
    chosen = _with_copies(store, chosen)
    kept: list[SegmentEntry] = []
    made: list[SegmentEntry] = []
    for segment, entry in zip(store.segments, store.manifest.segments, strict=True):
        gone = chosen.get(entry.name)
        if not gone:
            kept.append(entry)
            continue
        found = tombstones_of(store.path, entry)
        removed = sorted({*found[DOCUMENTS].tolist(), *gone})
        hidden = {*removed, *found[COPIES].tolist()}
        if len(hidden) == len(segment.documents):
            continue
        check_text(segment, store.path, "Remove all documents of it, or build it again without these.")
        few = INDEX in entry.files or document_tokens(segment.document_starts, removed) <= MOST_TOKENS
        check_files(store.path, entry, text=not few)
        if few:
            for name, file in entry.tombstones.items():  # which stand in the new ones
                check_content(store.path / TOMBSTONES / name, file)
            kept.append(with_tombstones(work, segment, entry, gone, found))
        else:
            made.append(_written_anew(work, segment, entry, hidden, first + len(made), config_of(store.manifest)))
    return kept, made


def _with_copies(store: Datastore, chosen: Chosen) -> Chosen:
    """The chosen documents, and those with the same text that count as copies."""
    texts = {
        segment.documents.hashes[number].tobytes()
        for segment in store.segments
        for number in chosen.get(segment.name, ())
    }
    found = {name: set(numbers) for name, numbers in chosen.items()}
    for segment, entry in zip(store.segments, store.manifest.segments, strict=True):
        if any(name.endswith(f"-{COPIES}.bin") for name in entry.tombstones):
            for number in tombstones_of(store.path, entry)[COPIES].tolist():
                if segment.documents.hashes[number].tobytes() in texts:
                    found.setdefault(entry.name, set()).add(number)
    return found


def with_tombstones(
    work: WorkFolder,
    segment: Segment,
    entry: SegmentEntry,
    gone: Iterable[int],
    found: Mapping[str, NDArray[np.uint32]],
) -> SegmentEntry:
    """Entry of a segment, opened as it was written, of which more documents count as removed than those found."""
    before, copies = found[DOCUMENTS], found[COPIES]
    more = np.array(sorted(set(gone).difference(before.tolist())), np.uint32)
    # Looked for without those found before, which may lie far from them: that is several times as fast.
    ranks = find_ranks(segment.suffix_array, segment.document_starts, more.tolist())
    arrays = {
        DOCUMENTS: np.sort(np.concatenate([before, more])),
        RANKS: np.sort(np.concatenate([found[RANKS], ranks])),
        COPIES: np.setdiff1d(copies, more, assume_unique=True),
    }
    files = write_tombstones(work.path / TOMBSTONES, entry.name, arrays)
    return counted(entry, segment, {*arrays[DOCUMENTS].tolist(), *arrays[COPIES].tolist()}, files)


def counted(entry: SegmentEntry, segment: Segment, hidden: Iterable[int], tombstones: dict[str, Any]) -> SegmentEntry:
    """Entry of a segment with other tombstones, which hide some of its documents."""
    numbers = list(hidden)
    starts = segment.document_starts
    documents = len(starts) - 1
    tokens = int(starts[-1]) - documents - document_tokens(starts, numbers)
    return replace(entry, documents=documents - len(numbers), tokens=tokens, tombstones=tombstones)


def _written_anew(
    work: WorkFolder, segment: Segment, entry: SegmentEntry, hidden: set[int], number: int, config: StoreConfig
) -> SegmentEntry:
    """Write a segment without some documents; what is left is sorted as it was."""
    starts = segment.document_starts.astype(np.int64)
    gone = np.zeros(len(segment.tokens), np.bool_)
    for document in hidden:
        gone[starts[document] : starts[document + 1]] = True
    sa = segment.suffix_array[~gone[segment.suffix_array]]
    sa -= np.cumsum(gone, dtype=np.uint32)[sa]
    tokens = segment.tokens[~gone]
    table = segment.documents
    rows = [Row(d.path, d.licence, d.source, d.sha256, d.tokens) for d in table if d.number not in hidden]
    folder = work.path / f"segment-{number:06d}"
    folder.mkdir()
    files, origins = write_arrays(folder, tokens, segment.to_global, sa, rows, config)
    return SegmentEntry(f"{number:06d}", len(rows), len(sa), entry.added_at, origins, files)
