"""Changes of a store: one writer at a time, published atomically by a new manifest."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from retrieve_spec._version import __version__
from retrieve_spec.datastore.files import sync_folder
from retrieve_spec.datastore.manifest import (
    CATALOG,
    DISTILLED,
    MANIFEST,
    MOST_EVENTS,
    SEGMENTS,
    TOMBSTONES,
    WORK,
    Manifest,
    SegmentEntry,
    content_name,
    drop_stale_files,
    existing_manifest,
    explain_write_errors,
    keep_only,
    write_manifest,
)
from retrieve_spec.errors import BuildError, NothingToIndexError, StoreLockedError

if TYPE_CHECKING:
    from retrieve_spec.datastore.sources import Source

LOCK = "lock"


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """Report of a change of a store.

    Attributes
    ----------
    verb
        build, add, remove, merge, compact, retokenize, sync, pull or distil.
    documents, tokens
        Documents and tokens added by the change (for `remove`: removed).
    segments
        Number of the store's segments after the change.
    skipped
        ``(path, source, reason)`` of everything that was skipped.
    seconds
        Wall time by stage.
    dense
        For dense indexes, the number of vectors and of positions that could have one; else empty.
    """

    verb: str
    documents: int
    tokens: int
    segments: int
    skipped: tuple[tuple[str, str, str], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    dense: dict[str, int] = field(default_factory=dict)

    @property
    def skipped_by_reason(self) -> dict[str, int]:
        """Number of skipped files by reason."""
        return {reason: len(paths) for reason, paths in by_reason(self.skipped).items()}


def by_reason(skipped: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Skipped paths by reason, in alphabetical order of the reasons."""
    paths: dict[str, list[str]] = {}
    for path, _, reason in skipped:
        paths.setdefault(reason, []).append(path)
    return dict(sorted(paths.items()))


def nothing_to_index(skipped: Iterable[tuple[str, str, str]], event: dict[str, Any]) -> NothingToIndexError:
    """Return the error for a change without any text; it lists why files were skipped."""
    found = by_reason(skipped)
    if not found and "sources" not in event:
        return NothingToIndexError("documents that are not removed", "none", "Add some first.")
    reasons = [f"{len(paths):,} {reason} (first: {paths[0]})" for reason, paths in found.items()]
    got = f"left out {', '.join(reasons)}" if reasons else "sources and filters name no file, or max_tokens is too few"
    remedy = "Check the sources and filters, or --admit what stays out."
    return NothingToIndexError(
        "text to index", f"none: {got}", remedy, {why: len(paths) for why, paths in found.items()}
    )


@contextmanager
def writer(store: Path) -> Iterator[WorkFolder]:
    """Hold the write lock of a store.

    Raises
    ------
    StoreLockedError
        Another process is writing to it.
    BuildError
        The folder cannot be written.
    """
    if store.exists() and not store.is_dir():
        raise BuildError(f"a folder at {store}", "a file", "Name the store first, then what to read.")
    with explain_write_errors(store):
        fresh = not store.exists()
        store.mkdir(parents=True, exist_ok=True)
        lock = FileLock(store / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout as error:
            raise StoreLockedError(
                f"to write to {store}",
                "another process is writing to it",
                "Wait until it has finished, then try again.",
            ) from error
        work = WorkFolder(store)
        try:
            yield work
        except BaseException:
            work.abandon()
            raise
        finally:
            if fresh and not (store / MANIFEST).exists() and not work.pulled.exists():
                shutil.rmtree(store, ignore_errors=True)  # nothing was written: leave no folder
            lock.release()


def begin_change(work: WorkFolder, verb: str, *, sources: Sequence[Source] = (), **arguments: Any) -> dict[str, Any]:
    """Begin a change with an empty work folder; return its history entry.

    ``SOURCE_DATE_EPOCH`` replaces the current time, for reproducible builds.
    """
    event = {"verb": verb, **{key: value for key, value in arguments.items() if value}}
    if sources:
        event["sources"] = [asdict(source) for source in sources]
    moment = datetime.fromtimestamp(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time()), UTC)
    event |= {"at": moment.strftime("%Y-%m-%dT%H:%M:%SZ"), "version": __version__}
    work.begin()
    return event


def publish(
    work: WorkFolder,
    manifest: Manifest,
    kept: Sequence[SegmentEntry],
    made: Sequence[SegmentEntry],
    event: dict[str, Any],
    *,
    counts: tuple[int, int] | None = None,
    skipped: Sequence[tuple[str, str, str]] = (),
    seconds: dict[str, float] | None = None,
    dense: dict[str, int] | None = None,
) -> ChangeReport:
    """Publish a change: move files into place, write the manifest, delete stale files; return the report.

    Parameters
    ----------
    work
        Folder of the change, with the new segments.
    manifest
        The manifest that the change starts from.
    kept
        Segments that stay, by name.
    made
        New segments, by their numbers in the work folder.
    event
        The change's history entry.
    counts
        Documents and tokens for the report; by default those of `made`.
    skipped, seconds, dense
        Further fields of the report.
    """
    documents, tokens = counts or (sum(entry.documents for entry in made), sum(entry.tokens for entry in made))
    segments = len(kept) + len(made)
    report = ChangeReport(event["verb"], documents, tokens, segments, tuple(skipped), seconds or {}, dense or {})
    named = [(entry.name, replace(entry, name=content_name(entry.files))) for entry in made]
    put_files(work, [(number, entry.name) for number, entry in named])
    entries = {entry.name: entry for entry in (*kept, *(entry for _, entry in named))}
    event = {
        **event,
        "generation": manifest.generation + 1,
        "documents": report.documents,
        "tokens": report.tokens,
        "skipped": report.skipped_by_reason,
        **({"vectors": report.dense} if report.dense else {}),
    }
    following = replace(
        manifest,
        segments=tuple(entries.values()),
        generation=event["generation"],
        history=(*manifest.history, event)[-MOST_EVENTS:],
    )
    write_manifest(work.store, following)
    drop_stale_files(work.store, following)
    for copy in work.store.glob("tokenizer-*.json"):
        if copy.name != following.tokenizer_name:
            copy.unlink()
    work.end()
    return report


class WorkFolder:
    """Folder of a change in progress.

    Parameters
    ----------
    store
        Folder of the store.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.path = store / WORK

    @property
    def pulled(self) -> Path:
        """Folder of fetched files, with which an interrupted pull continues."""
        return self.path / "pull"

    def begin(self) -> None:
        """Empty the folder, but keep pulled files."""
        self.path.mkdir(exist_ok=True)
        keep_only(self.path, {self.pulled.name})

    def end(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def abandon(self) -> None:
        """Delete the files of a failed change, which may have filled the disk, but keep pulled files."""
        with suppress(OSError):
            keep_only(self.path, {self.pulled.name})
            drop_stale_files(self.store, existing_manifest(self.store))
            self.path.rmdir()


def put_files(work: WorkFolder, names: Iterable[tuple[str, str]]) -> None:
    """Move tombstones and finished segments (number in the work folder, name in the store) into place.

    Some may have been moved before the process was killed. A segment that has the same name is the same.
    """
    segments, tombstones = work.store / SEGMENTS, work.store / TOMBSTONES
    for folder in (segments, tombstones):
        folder.mkdir(exist_ok=True)
    for number, name in names:
        if not (segments / name).is_dir():
            os.rename(work.path / f"segment-{number}", segments / name)
    for path in sorted(work.path.glob(f"{TOMBSTONES}/*")):
        os.replace(path, tombstones / path.name)
    for folder in (segments, tombstones):
        sync_folder(folder)


_OURS = re.compile(
    rf"{LOCK}|{WORK}|{SEGMENTS}|{TOMBSTONES}|{DISTILLED}|(?:{MANIFEST}|tokenizer-\w+\.json)(?:\.tmp)?|{CATALOG}"
)
"""Names of files that an interrupted first build leaves behind."""


def check_folder(store: Path) -> None:
    """Check that a folder holds neither a store nor files of others, before even a lock file is created there.

    Raises
    ------
    BuildError
        It holds a store, or files that a build might overwrite.
    """
    if existing_manifest(store) is not None:
        raise BuildError(f"to build a datastore at {store}", "there is one", "Use `add`, or choose another folder.")
    names = {path.name for path in store.iterdir()} if store.is_dir() else set()
    foreign = sorted(name for name in names if not (LOCK in names and _OURS.fullmatch(name)))
    if foreign:
        raise BuildError(f"an empty folder at {store}", f"one that holds {foreign[0]}", "Choose another folder.")


Advance = Callable[[float], object]
"""Called with the number of finished units of work."""


@contextmanager
def progress_bar(name: str, total: int | None, unit: str, shown: bool) -> Iterator[Advance]:
    """Show a progress bar with amount and time left, if standard error is a terminal."""
    from rich.console import Console  # slow to import: readers of stores need not wait for it
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.completed:,.0f}} {unit}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as progress:
        yield partial(progress.advance, progress.add_task(name, total=total))


class Stopwatch:
    """Measures wall time by stage, with an optional progress bar per stage.

    Parameters
    ----------
    bars
        Show bars on standard error.
    """

    def __init__(self, bars: bool) -> None:
        self.bars = bars
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        """Time a stage, and show its progress."""
        started = time.perf_counter()
        with progress_bar(name, total, unit, self.bars) as advance:
            yield advance
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
