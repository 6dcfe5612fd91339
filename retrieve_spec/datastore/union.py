"""Unions: the segments of several stores in one, each text listed once, nothing indexed anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.change import ChangeReport, WorkFolder, nothing_to_index, publish, report_of
from retrieve_spec.datastore.files import FileEntry, sha256_of, sync_folder
from retrieve_spec.datastore.manifest import SEGMENTS, TOMBSTONES, Manifest, SegmentEntry, content_name
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.removal import counted
from retrieve_spec.datastore.segment import Segment
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.datastore.tombstones import COPIES, DOCUMENTS, RANKS, tombstones_of, write_tombstones
from retrieve_spec.errors import StoreCorruptError


def unite(
    work: WorkFolder, manifest: Manifest, plan: dict[str, Any], stores: Sequence[Path], progress: bool
) -> ChangeReport:
    """Publish a store of the segments of other stores.

    A text that an earlier segment has counts as a copy: it is not listed and not counted as a document. A segment that
    several stores have is taken once, and what one of them removed of it is removed.

    Parameters
    ----------
    work, manifest, plan
        The change, and the manifest that it starts from.
    stores
        Folders of the stores, in order.
    progress
        Show bars on standard error.
    """
    watch = Stopwatch(progress)
    opened = [open_datastore(store, tokenizer=work.store / manifest.tokenizer_name) for store in stores]
    known: set[bytes] = set()
    entries: list[SegmentEntry] = []
    skipped: list[tuple[str, str, str]] = []
    with watch.stage("joining", sum(store.manifest.bytes for store in opened), "B") as advance:
        for store, segment, entry, removed in _segments(opened):
            copies, listed = _copies(segment, removed, known)
            skipped += [(row.path, row.source, "duplicate") for row in map(segment.documents.__getitem__, copies)]
            if listed:
                link_files(store.path / SEGMENTS / entry.name, entry.files, work.path / f"segment-{len(entries):06d}")
                ranks = _ranks(opened, entry.name)
                arrays = {
                    DOCUMENTS: np.array(sorted(removed), np.uint32),
                    RANKS: ranks,
                    COPIES: np.array(copies, np.uint32),
                }
                files = write_tombstones(work.path / TOMBSTONES, entry.name, arrays)
                taken = counted(entry, segment, {*removed, *copies}, files)
                entries.append(renumbered(taken, len(entries)))
            advance(sum(file.bytes for file in entry.files.values()))
    if not entries:
        work.end()
        raise nothing_to_index((), {}, 0)
    report = report_of(plan["verb"], entries, len(entries), skipped, watch.seconds)
    return publish(work, manifest, (), entries, plan, report)


def renumbered(entry: SegmentEntry, number: int) -> SegmentEntry:
    """An entry under its number in the work folder; its name must be that of its content.

    Raises
    ------
    StoreCorruptError
        When it is not.
    """
    if content_name(entry.files) != entry.name:
        raise StoreCorruptError(f"the files of segment {entry.name}", content_name(entry.files))
    return replace(entry, name=f"{number:06d}")


def _segments(stores: Sequence[Datastore]) -> Iterator[tuple[Datastore, Segment, SegmentEntry, set[int]]]:
    """Every segment once, with the documents that any of the stores removed from it."""
    removed: dict[str, set[int]] = {}
    for store in stores:
        for entry in store.manifest.segments:
            numbers = tombstones_of(store.path, entry)[DOCUMENTS].tolist() if entry.tombstones else ()
            removed.setdefault(entry.name, set()).update(numbers)
    for store in stores:
        for segment, entry in zip(store.segments, store.manifest.segments, strict=True):
            if entry.name in removed:
                yield store, segment, entry, removed.pop(entry.name)


def _ranks(stores: Sequence[Datastore], name: str) -> NDArray[np.uint32]:
    """Ranks that any of the stores hides of a segment."""
    found = [np.empty(0, np.uint32)]
    for store in stores:
        for entry in store.manifest.segments:
            if entry.name == name and entry.tombstones:
                found.append(tombstones_of(store.path, entry)[RANKS])
    return np.unique(np.concatenate(found)).astype(np.uint32)


def _copies(segment: Segment, removed: set[int], known: set[bytes]) -> tuple[list[int], int]:
    """Numbers of the documents whose text is known, and how many are listed; the latter become known."""
    copies = []
    listed = 0
    for number, digest in enumerate(segment.documents.hashes):
        if number in removed:
            continue
        text = digest.tobytes()
        if text in known:
            copies.append(number)
        else:
            known.add(text)
            listed += 1
    return copies, listed


def link_files(source: Path, files: dict[str, FileEntry], folder: Path) -> None:
    """Put the files of a segment into a new folder: links where they can be, otherwise copies that were checked."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, file in files.items():
        link_file(source / name, folder / name, file)
    sync_folder(folder)


def link_file(source: Path, target: Path, file: FileEntry) -> None:
    """Put a file of a store in a second place: as a link where it can be, otherwise as a copy that was checked."""
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise StoreCorruptError(f"{file.bytes:,} bytes in {source}", "no such file") from error
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        with target.open("r+b") as written:
            os.fsync(written.fileno())
        if (found := sha256_of(target)) != file.sha256:
            raise StoreCorruptError(f"checksum {file.sha256[:12]} of {source}", found[:12]) from None
