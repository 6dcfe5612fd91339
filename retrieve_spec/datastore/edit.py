"""Edit stores: remove documents, compact, merge, and convert to another tokenizer."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import DenseConfig
from retrieve_spec.datastore.build import (
    changing,
    check_text,
    checked,
    first_manifest,
    grow,
    rewrite,
    segment_shards,
)
from retrieve_spec.datastore.change import (
    ChangeReport,
    Stopwatch,
    WorkFolder,
    begin_change,
    check_folder,
    nothing_to_index,
    publish,
    writer,
)
from retrieve_spec.datastore.dense import INDEX
from retrieve_spec.datastore.distilled import copy_tables
from retrieve_spec.datastore.files import check_content, link_files
from retrieve_spec.datastore.inspection import list_documents
from retrieve_spec.datastore.manifest import (
    SEGMENTS,
    TOMBSTONES,
    Manifest,
    SegmentEntry,
    config_of,
    read_manifest,
)
from retrieve_spec.datastore.remote import folder_of, local_folder
from retrieve_spec.datastore.segment import (
    COPIES,
    DOCUMENTS,
    MOST_TOKENS,
    RANKS,
    SUFFIX,
    Segment,
    document_tokens,
    find_ranks,
    tombstones_of,
    write_tombstones,
)
from retrieve_spec.datastore.sources import glob
from retrieve_spec.datastore.store import Datastore, check_files, check_tokenizer, open_as_written
from retrieve_spec.errors import BuildError


def remove_documents(
    path: str | os.PathLike[str],
    documents: Sequence[str] = (),
    *,
    where: str = "",
    progress: bool = False,
) -> ChangeReport:
    """Remove documents from a datastore, so that they are no longer drafted from.

    Their text stays in the token arrays until `compact_datastore`, but no index finds it.

    Parameters
    ----------
    path
        Folder of the store.
    documents
        Paths as listed in the document tables, or globs over them; or files and folders the documents came from.
    where
        SQL condition on the catalogue's `documents` table, such as ``licence like 'GPL%'``.
    progress
        Show bars on standard error.

    Raises
    ------
    BuildError
        Nothing matches, the condition is invalid SQL, or the store keeps n-grams only.
    """
    with changing(path, "remove") as (work, _):
        opened = open_as_written(work.store)
        chosen = choose_documents(opened, documents, where)
        if not chosen:
            remedy = f"`retrieve-spec catalog {path}` makes a database that lists them."
            raise BuildError("documents that match", f"none for {', '.join(documents) or where}", remedy)
        event = begin_change(work, "remove", documents=list(documents), where=where)
        watch = Stopwatch(progress)
        with watch.stage("removing", None, "doc"):
            kept = without(work, opened, chosen)
        count = sum(len(numbers) for numbers in chosen.values())
        tokens = opened.manifest.tokens - sum(entry.tokens for entry in kept)
        report = publish(work, opened.manifest, kept, (), event, counts=(count, tokens), seconds=watch.seconds)
        return _rewrite_worn(work, report, progress)


def compact_datastore(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: bool = False,
) -> ChangeReport:
    """Rewrite a datastore as a build would write it, without the text of removed documents.

    Open readers keep what they have opened. Dense indexes are computed again with the model they were built with.

    Parameters
    ----------
    path
        Folder of the store.
    workers, progress
        As for `build_datastore`.

    Raises
    ------
    BuildError
        When the store keeps n-grams only, or the disk cannot be written.
    StoreLockedError
        When another process is writing to it.
    """
    with changing(path, "compact") as (work, manifest):
        return rewrite(work, manifest, "compact", manifest.segments, workers=workers, progress=progress)


def merge_datastores(
    out: str | os.PathLike[str],
    stores: Sequence[str | os.PathLike[str]],
    *,
    progress: bool = False,
) -> ChangeReport:
    """Merge datastores of one tokenizer into a new one; a text that occurs in several is listed once.

    Segments are reused unchanged, by hard links if the file system has them. With dense indexes, everything is indexed
    again, since keys of separately built stores are not comparable.

    Parameters
    ----------
    out
        Folder to create.
    stores
        Folders or remote addresses of the stores, in order.
    progress
        As for `build_datastore`.

    Raises
    ------
    TokenizerMismatchError
        Their tokenizers differ.
    BuildError
        `out` is a store already, or no store is given.
    """
    target = folder_of(out, "merge into")
    check_folder(target)
    with writer(target) as work:
        check_folder(target)
        if not stores:
            raise BuildError("at least one store to merge", "none", "Give the folders of the stores.")
        folders = [local_folder(store) for store in stores]
        manifests = [read_manifest(folder) for folder in folders]
        for folder, manifest in zip(folders, manifests, strict=True):
            check_tokenizer(folder, manifest, folders[0] / manifests[0].tokenizer_name)
        if not any(manifest.segments or manifest.distilled for manifest in manifests):
            raise nothing_to_index((), {})
        dense = _common_dense(folders, manifests)
        widest = max(range(len(folders)), key=lambda i: manifests[i].vocabulary)  # fingerprints omit added tokens
        tokenizer = folders[widest] / manifests[widest].tokenizer_name
        config = checked(replace(config_of(manifests[0]), dense=dense), tokenizer)
        first = first_manifest(target, tokenizer, config)
        event = begin_change(work, "merge", stores=[str(store) for store in stores])
        if dense is None:
            return _rewrite_worn(work, unite(work, first, event, folders, progress), progress)
        first = replace(first, distilled=copy_tables(work, zip(folders, manifests, strict=True)))
        shards = list(chain.from_iterable(map(segment_shards, folders, manifests)))
        return grow(work, first, event, shards, config, workers=None, progress=progress)


def _common_dense(stores: list[Path], manifests: list[Manifest]) -> DenseConfig | None:
    """Return the settings of the dense indexes of stores to merge, None if no store has any.

    Raises
    ------
    BuildError
        They differ in model, layer or dims.
    """
    dense = [(s, m, m.dense) for s, m in zip(stores, manifests, strict=True) if m.dense is not None]
    for store, _, record in dense:
        if replace(record, model="") != replace(dense[0][2], model=""):
            raise BuildError(
                f"stores with dense indexes of one model, layer and number of dims, as {dense[0][0]} "
                f"({dense[0][2].model}, layer {dense[0][2].layer}, {dense[0][2].dims} dims)",
                f"{store} ({record.model}, layer {record.layer}, {record.dims} dims)",
                "Build one of them again with the other's `--dense`, `--layer` and `--dims`.",
            )
    return config_of(dense[0][1]).dense if dense else None


def retokenize_datastore(
    path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    workers: int | None = None,
    progress: bool = False,
) -> ChangeReport:
    """Convert a datastore to another tokenizer, from its own text; its sources are not needed.

    The new store has no dense indexes: they belong to the model of the old tokenizer.

    Parameters
    ----------
    path
        Folder of the store.
    tokenizer
        The tokenizer to convert to (anything `load_tokenizer` takes).
    workers, progress
        As for `build_datastore`.

    Raises
    ------
    BuildError
        When the store keeps n-grams only, no tokenizer is given, or the disk cannot be written.
    StoreLockedError
        When another process is writing to it.
    """
    with changing(path, "retokenize") as (work, manifest):
        shards = list(segment_shards(work.store, manifest, convert=True))
        config = replace(config_of(manifest), dense=None)  # they belong to another tokenizer's model
        new = first_manifest(work.store, tokenizer, config)
        base = replace(new, generation=manifest.generation, history=manifest.history)
        event = begin_change(work, "retokenize")
        return grow(work, base, event, shards, config, workers=workers, progress=progress, kept=())


_COUNTED_TWICE = "duplicate, but counted twice: of its segment n-grams alone are kept"
Chosen = dict[str, set[int]]


def choose_documents(store: Datastore, paths: Sequence[str], where: str) -> Chosen:
    """Return the numbers of the documents to remove, by segment.

    A document is chosen if it has one of the paths, if any are given, and fulfils the condition, if there is one.

    Raises
    ------
    BuildError
        Neither paths nor a condition are given, or the condition is invalid SQL.
    """
    if not paths and not where:
        raise BuildError("documents to remove", "neither paths nor a condition", "Give paths, globs or --where SQL.")
    patterns, places = [glob(path) for path in paths], [os.path.realpath(path) for path in paths]
    chosen: Chosen = {}
    rows: Iterable[tuple[str, int, str, str]] = ((d.segment, d.number, d.path, d.source) for d in store.documents())
    if where:
        with closing(sqlite3.connect(":memory:")) as database:
            list_documents(database, store.documents())
            try:
                rows = database.execute(f"select segment, number, path, source from documents where {where}").fetchall()
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # which one depends on Python
                raise BuildError(
                    "an SQL condition over the documents table", f"{where!r} ({error})", "Correct what follows --where."
                ) from error
    for segment, number, path, source in rows:
        named = path in paths or any(pattern.fullmatch(path) for pattern in patterns)
        if named or not paths or any(_came_from(place, source, path) for place in places):
            chosen.setdefault(segment, set()).add(number)
    return chosen


def _came_from(place: str, source: str, path: str) -> bool:
    """Whether a document of a source (a file or folder) came from a given file or from below a given folder."""
    whole = os.path.join(source, path.partition("#")[0])
    return any(one == place or one.startswith(os.path.join(place, "")) for one in (source, whole))


def without(work: WorkFolder, store: Datastore, chosen: Chosen) -> list[SegmentEntry]:
    """Remove documents from a store's segments; return the entries of segments of which anything is left.

    Parameters
    ----------
    work, store
        Folder of the change, and the store, opened by `open_as_written`.
    chosen
        Documents to remove, by segment; unlisted copies of their text are removed, too.

    Raises
    ------
    BuildError
        A segment keeps n-grams only, and a part of it is to stay.
    """
    chosen = _with_copies(store, chosen)
    kept: list[SegmentEntry] = []
    for segment, entry in zip(store.segments, store.manifest.segments, strict=True):
        gone = chosen.get(entry.name)
        if not gone:
            kept.append(entry)
            continue
        found = tombstones_of(store.path, entry)
        if len({*segment.removed, *gone}) == len(segment.documents):
            continue
        check_text(segment, store.path, "Remove all documents of it, or build it again without these.")
        check_files(store.path, entry)
        for name, file in entry.tombstones.items():  # the new ones include these
            check_content(store.path / TOMBSTONES / name, file)
        more = np.setdiff1d(np.array(list(gone), np.uint32), found[DOCUMENTS])
        # Without those found before, which may be far away: several times as fast.
        ranks = find_ranks(segment.suffix_array, segment.document_starts, more.tolist())
        documents, copies = np.union1d(found[DOCUMENTS], more), np.setdiff1d(found[COPIES], more)
        kept.append(hiding(work, segment, entry, documents, np.union1d(found[RANKS], ranks), copies))
    return kept


def _rewrite_worn(work: WorkFolder, report: ChangeReport, progress: bool) -> ChangeReport:
    """Rewrite segments of which too much was removed; return the report with the new number of segments."""
    manifest = read_manifest(work.store)
    worn = list(filter(is_worn, manifest.segments))
    if not worn:
        return report
    done = rewrite(work, manifest, "compact", worn, workers=1, progress=progress)
    return replace(report, segments=done.segments)


def is_worn(entry: SegmentEntry) -> bool:
    """Whether so much of a segment is removed that it is rewritten; never with a dense index, which needs a model."""
    sizes = [file.bytes for name, file in entry.tombstones.items() if name.endswith(f"-{RANKS}{SUFFIX}")]
    return sum(sizes) > 4 * MOST_TOKENS and INDEX not in entry.files


def _with_copies(store: Datastore, chosen: Chosen) -> Chosen:
    """Add the hidden copies of the chosen documents, which have the same text."""
    texts = {
        segment.documents.hashes[number].tobytes()
        for segment in store.segments
        for number in chosen.get(segment.name, ())
    }
    found = {name: set(numbers) for name, numbers in chosen.items()}
    for segment, entry in zip(store.segments, store.manifest.segments, strict=True):
        for number in tombstones_of(store.path, entry)[COPIES].tolist():
            if segment.documents.hashes[number].tobytes() in texts:
                found.setdefault(entry.name, set()).add(number)
    return found


def hiding(
    work: WorkFolder,
    segment: Segment,
    entry: SegmentEntry,
    documents: NDArray[np.uint32],
    ranks: NDArray[np.uint32],
    copies: NDArray[np.uint32],
) -> SegmentEntry:
    """Write new tombstones of a segment to the work folder; return its entry with them."""
    arrays = {DOCUMENTS: documents, RANKS: ranks, COPIES: copies}
    files = write_tombstones(work.path / TOMBSTONES, entry.name, arrays)
    hidden, starts = np.union1d(documents, copies).tolist(), segment.document_starts
    left = len(starts) - 1 - len(hidden)
    tokens = int(starts[-1]) - (len(starts) - 1) - document_tokens(starts, hidden)
    return replace(entry, documents=left, tokens=tokens, tombstones=files)


def unite(
    work: WorkFolder, manifest: Manifest, event: dict[str, Any], stores: Sequence[Path], progress: bool
) -> ChangeReport:
    """Publish a store made of the segments and distilled tables of other stores.

    If an earlier segment has the same text, a document is a copy and is hidden, except in n-gram counts without text. A
    segment of several stores is taken once, without anything that one of them removed.

    Parameters
    ----------
    work, manifest, event
        Folder of the change, the manifest that it starts from, and its history entry.
    stores
        Folders of the stores, in order.
    progress
        Show bars on standard error.
    """
    watch = Stopwatch(progress)
    opened = [open_as_written(store) for store in stores]
    removed: dict[str, set[int]] = {}
    for store in opened:
        for entry in store.manifest.segments:
            documents = tombstones_of(store.path, entry)[DOCUMENTS]
            removed.setdefault(entry.name, set()).update(documents.tolist())
    known: set[bytes] = set()
    entries: list[SegmentEntry] = []
    skipped: list[tuple[str, str, str]] = []
    pairs = [(s, *pair) for s in opened for pair in zip(s.segments, s.manifest.segments, strict=True)]
    with watch.stage("joining", sum(store.manifest.bytes for store in opened), "B") as advance:
        for store, segment, entry in pairs:
            if entry.name not in removed:
                continue  # an earlier store has this segment
            dropped = removed.pop(entry.name)
            texts = {n: text.tobytes() for n, text in enumerate(segment.documents.hashes) if n not in dropped}
            copies = [number for number, text in texts.items() if text in known]
            known.update(texts.values())
            is_whole = len(copies) < len(texts)
            reason = _COUNTED_TWICE if is_whole and not len(segment.tokens) else "duplicate"
            skipped += [(row.path, row.source, reason) for row in map(segment.documents.__getitem__, copies)]
            if is_whole:
                link_files(store.path / SEGMENTS / entry.name, entry.files, work.path / f"segment-{len(entries):06d}")
                hidden = sorted({*dropped, *copies})
                if hidden:
                    check_files(store.path, entry)
                ranks = find_ranks(segment.suffix_array, segment.document_starts, hidden)
                taken = hiding(
                    work, segment, entry, np.array(sorted(dropped), np.uint32), ranks, np.array(copies, np.uint32)
                )
                entries.append(replace(taken, name=f"{len(entries):06d}"))
            advance(sum(file.bytes for file in entry.files.values()))
    distilled = copy_tables(work, ((store.path, store.manifest) for store in opened))
    if not (entries or distilled):
        work.end()
        raise nothing_to_index((), {})
    manifest = replace(manifest, distilled=distilled)
    return publish(work, manifest, (), entries, event, skipped=skipped, seconds=watch.seconds)
