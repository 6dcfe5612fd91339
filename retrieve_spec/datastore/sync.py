"""Synchronise a store with the present contents of folders.

The document tables are authoritative. ``sync.json`` beside the manifest (size, time and SHA-256 of every file) only
saves reading unchanged files again: without it, or after a change of the rules, all files are read once.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import checked, first_manifest, grow, rewrite, small_size
from retrieve_spec.datastore.change import (
    ChangeReport,
    WorkFolder,
    begin_change,
    check_folder,
    nothing_to_index,
    publish,
    writer,
)
from retrieve_spec.datastore.edit import Chosen, is_worn, without
from retrieve_spec.datastore.entry_filter import RULES, EntryFilter, disabled_parts
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.ingest import read_text, texts_of
from retrieve_spec.datastore.licences import allow_list, own_licence
from retrieve_spec.datastore.manifest import Manifest, SegmentEntry, config_of, existing_manifest, read_manifest
from retrieve_spec.datastore.remote import folder_of
from retrieve_spec.datastore.segment import text_hash
from retrieve_spec.datastore.sources import Source, SourceFile, file_shards, list_files
from retrieve_spec.datastore.store import Datastore, check_tokenizer, open_as_written, open_segments
from retrieve_spec.datastore.watching import changes
from retrieve_spec.errors import BuildError, StoreLockedError

STATE = "sync.json"
FOLLOWED_BYTES = 1 << 20
"""Size limit for files of a synchronised folder in bytes."""
RACY_NS = 2_000_000_000
"""A file changed so shortly before it was read may change again without a new time, in nanoseconds."""


FolderState = dict[str, tuple[Any, ...]]
"""Per file, by path: size in bytes, times of the last change of content (0: read again) and of metadata in
nanoseconds, and of each of its texts the suffix of its name, SHA-256 or "", reason for skipping it or "", and its own
licence or None."""


def scan_folder(
    source: Source, before: FolderState, store: Path, most_bytes: float = math.inf
) -> dict[SourceFile, tuple[Any, ...]]:
    """Return the present `FolderState` of a folder, in order of its files; unchanged files are not read.

    Parameters
    ----------
    source
        The folder.
    before
        Its state at the last synchronisation.
    store
        Folder of the store, which is left out.
    most_bytes
        Most bytes of text files; those changed last enter, and the others are left out.
    """
    entries = source.entry_filter(Path(source.path), FOLLOWED_BYTES)
    racy = time.time_ns() - RACY_NS
    files = list(list_files((source,), store))
    now: dict[SourceFile, tuple[Any, ...]] = dict.fromkeys(files, ())
    size = 0
    for file in sorted(files, key=lambda file: file.times, reverse=True):
        reason = file.skip or (str(Reason.BEYOND) if size > most_bytes else "")
        known = before.get(file.location, ())
        if reason:
            now[file] = (0, 0, 0, [["", "", reason, None]])
        # The change time detects a replacement by a file of equal size and modification time.
        elif known[:3] == (file.size, *file.times):
            now[file] = known
        else:
            changed, by_system = file.times
            now[file] = (file.size, 0 if changed >= racy else changed, by_system, list(_texts(entries, file)))
        if any(digest for _, digest, _, _ in now[file][3]):
            size += file.size
    return now


def _texts(entries: EntryFilter, file: SourceFile) -> Iterator[list[Any]]:
    """Yield suffix of the name, SHA-256 or "", reason or "", and own licence of every text in a file."""
    for text in texts_of([file], FOLLOWED_BYTES):
        content, skip = read_text(text, entries)
        rest = text.path[len(file.path) :]
        yield [rest, "", skip, None] if skip else [rest, text_hash(content), "", own_licence(content)]


def read_state(store: Path, rules: str) -> dict[str, FolderState]:
    """Read the folders' states at the last synchronisation, by folder; empty if the rules differed."""
    try:
        raw = json.loads((store / STATE).read_bytes())
        found = {root: {name: tuple(said) for name, said in files.items()} for root, files in raw["folders"].items()}
        return found if raw["rules"] == rules else {}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def write_state(store: Path, states: dict[str, FolderState], rules: str) -> None:
    """Write the folders' states; a file damaged by a power failure reads as empty."""
    content = json.dumps({"rules": rules, "folders": states})
    written = store / f"{STATE}.tmp"
    written.write_bytes(content.encode("utf-8", "surrogateescape"))
    os.replace(written, store / STATE)


MOST_SMALL = 8
"""Most small segments of a store; if there are more, some are merged."""


def sync_datastore(
    path: str | os.PathLike[str],
    folders: Sequence[str | os.PathLike[str]],
    tokenizer: Any = None,
    *,
    licence: str = "",
    licences: Sequence[str] = (),
    admit: Sequence[str] = (),
    config: StoreConfig | None = None,
    most_bytes: float = math.inf,
    workers: int | None = None,
    progress: bool = False,
) -> ChangeReport:
    """Synchronise a store with folders: new, changed, moved and deleted files; other documents stay unchanged.

    `EntryFilter` decides which files may enter. If the process is killed, the store is either the old or the new one.

    Parameters
    ----------
    path
        Folder of the store, which is created if it does not exist.
    folders
        Folders to synchronise with.
    tokenizer
        Tokenizer of the model; only needed for a new store.
    licence
        Licence to record with new documents; with `licences`, only with those that state none.
    licences
        SPDX identifiers of the allowed licences; empty: all files are allowed.
    admit
        Disabled parts of the filter (`retrieve_spec.datastore.entry_filter.PARTS`).
    config
        Settings of a new store.
    most_bytes
        Most bytes per folder; the files changed last enter.
    workers, progress
        As for `build_datastore`.

    Returns
    -------
    ChangeReport
        Numbers of added documents and tokens; `skipped` lists files that may not enter, and why.

    Raises
    ------
    BuildError
        A folder does not exist, a licence is no SPDX identifier, there is no such part of the filter, or nothing of the
        folders may enter a new store.
    TokenizerMismatchError
        The store has another tokenizer.
    StoreLockedError
        Another process is writing to it.
    """
    store = folder_of(path, "sync")
    roots = [_root(folder) for folder in folders]
    if not roots:
        raise BuildError("at least one folder to follow", "none", "Give folders.")
    allowed, parts = allow_list(licences), disabled_parts(admit)
    sources = tuple(
        Source(str(root), licence, licences=allowed, admit=parts, max_bytes=FOLLOWED_BYTES) for root in roots
    )
    if existing_manifest(store) is None:
        check_folder(store)
    elif tokenizer is not None:
        check_tokenizer(store, read_manifest(store), tokenizer)
    with writer(store) as work:
        opened = open_as_written(store) if existing_manifest(store) else _without_documents(store, tokenizer, config)
        report = _synchronised(work, opened, sources, most_bytes, workers, progress)
        while group := list(filter(is_worn, (manifest := read_manifest(store)).segments)) or _small(manifest):
            rewrite(work, manifest, "sync", group, workers=1, progress=progress)
    return report


def _without_documents(store: Path, tokenizer: Any, config: StoreConfig | None) -> Datastore:
    """Return a new store without documents, after writing its tokenizer."""
    settings = checked(config or StoreConfig(), tokenizer)
    return open_segments(store, first_manifest(store, tokenizer, settings), as_written=True)


def _root(folder: str | os.PathLike[str]) -> Path:
    try:
        root = Path(folder).expanduser().resolve(strict=True)
    except (OSError, RuntimeError):  # circular links, before Python 3.13
        root = None
    if root is None or not root.is_dir():
        raise BuildError(f"a folder at {folder}", "none", "Check the path.")
    return root


def _synchronised(
    work: WorkFolder, opened: Datastore, sources: tuple[Source, ...], most_bytes: float, workers: int | None,
    progress: bool,
) -> ChangeReport:  # fmt: skip
    manifest = opened.manifest
    rules = " ".join((RULES, *sources[0].admit))  # states under other rules are ignored
    states = read_state(work.store, rules)
    wanted: Wanted = {}
    first: dict[str, SourceFile] = {}  # the first file with each text, by hash
    skipped: list[tuple[str, str, str]] = []
    found: dict[str, FolderState] = {}
    for source in sources:
        place = source.path
        state = scan_folder(source, states.get(place, {}), work.store, most_bytes)
        found[place] = {file.location: about for file, about in state.items()}
        rule = source.licence_rule(Path(place))
        said = ((one, *text) for one in state for text in state[one][3])
        for file, rest, digest, reason, own in said:
            if rule is not None and digest:
                # The licence of a collection does not apply to its records.
                path = None if rest else Path(file.location)
                reason = str(rule.refuses(rule.licence(path, own)) or "")
            if digest and not reason:
                first.setdefault(digest, file)
                wanted.setdefault((place, file.path + rest), set()).add(digest)
            else:
                skipped.append((file.path + rest, place, reason))
    gone, held = _compare(opened, [source.path for source in sources], wanted)
    fresh = list(dict.fromkeys(file for digest, file in first.items() if digest not in held))
    report = ChangeReport("sync", 0, 0, len(manifest.segments), tuple(skipped))
    if not (manifest.generation or fresh):
        raise nothing_to_index(skipped, {"sources": sources})
    if gone or fresh:
        done = _change(work, opened, gone, held, fresh, sources, workers, progress)
        again = (one for one in done.skipped if one[2] != "duplicate")  # unchanged records of changed files
        report = replace(done, skipped=tuple(dict.fromkeys((*skipped, *again))))
    if {root: states.get(root) for root in found} != found:
        write_state(work.store, states | found, rules)
    return report


Wanted = dict[tuple[str, str], set[str]]
"""Hashes of the folders' texts by folder and name; two files may have the same readable name."""


def _compare(store: Datastore, roots: Sequence[str], wanted: Wanted) -> tuple[Chosen, set[str]]:
    """Return the documents that the folders no longer contain, and hashes of the texts that stay in the store."""
    gone: Chosen = {}
    held = set()
    for document in store.documents():
        if document.source not in roots or document.sha256 in wanted.get((document.source, document.path), ()):
            held.add(document.sha256)
        else:
            gone.setdefault(document.segment, set()).add(document.number)
    return gone, held


def _change(
    work: WorkFolder,
    opened: Datastore,
    gone: Chosen,
    held: set[str],
    files: list[SourceFile],
    sources: tuple[Source, ...],
    workers: int | None,
    progress: bool,
) -> ChangeReport:
    """Remove some documents, and add those of some files, in one change."""
    manifest = opened.manifest
    config = checked(config_of(manifest), work.store / manifest.tokenizer_name)
    event = begin_change(work, "sync", sources=sources)
    kept = tuple(without(work, opened, gone))
    if not files:
        return publish(work, manifest, kept, (), event)
    shards = list(file_shards(files))
    return grow(
        work,
        manifest,
        event,
        shards,
        config,
        workers=workers,
        progress=progress,
        known=held,
        kept=kept,
    )


def _small(manifest: Manifest) -> list[SegmentEntry]:
    """Choose segments to merge: in order of size, while the next is at most twice as large as all before it."""
    limit = small_size(config_of(manifest).segment_tokens)
    small = [entry for entry in manifest.segments if entry.tokens + entry.documents <= limit]
    if len(small) <= MOST_SMALL:
        return []
    rising = sorted(small, key=lambda entry: (entry.tokens, entry.name))
    group = rising[:2]
    for entry in rising[2:]:
        if entry.tokens > 2 * sum(one.tokens for one in group):
            break
        group.append(entry)
    names = {entry.name for entry in group}
    return [entry for entry in small if entry.name in names]


def watch_folders(
    path: str | os.PathLike[str],
    folders: Sequence[str | os.PathLike[str]],
    *,
    tell: Callable[[ChangeReport], object],
    **options: Any,
) -> None:
    """Synchronise a store now and after every change in the folders, until interrupted.

    `tell` is called with the first report and with those that differ from the one before. If another process is writing
    to the store, it waits. Errors are those of `changes` and `sync_datastore`.
    """
    inside, due = folder_of(path, "sync").resolve(), True
    told: tuple[int, object] | None = None
    for changed in changes([_root(folder) for folder in folders]):
        due |= not all(place.is_relative_to(inside) for place in changed)
        if due:
            with suppress(StoreLockedError):
                report = sync_datastore(path, folders, **options)
                due = False
                before, told = told, (read_manifest(inside).generation, report.skipped)
                if told != before:
                    tell(report)
