"""Changes of a store: one writer at a time, and a new manifest that takes effect at once or not at all."""

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
    """What a change of a store did.

    Attributes
    ----------
    verb
        build, add, remove, merge, compact, retokenize, sync, pull or distil.
    documents, tokens
        Added by the change (for `remove`: taken out).
    segments
        Segments of the store now.
    skipped
        ``(path, source, reason)`` of everything that was left out.
    seconds
        Wall time by stage.
    dense
        Of dense indexes: vectors, and positions that could have one. Empty without.
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
        """How many files were left out, by reason."""
        return {reason: len(paths) for reason, paths in by_reason(self.skipped).items()}


def by_reason(skipped: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Paths of what was left out, by reason; reasons in alphabetical order."""
    paths: dict[str, list[str]] = {}
    for path, _, reason in skipped:
        paths.setdefault(reason, []).append(path)
    return dict(sorted(paths.items()))


def nothing_to_index(skipped: Iterable[tuple[str, str, str]], event: dict[str, Any]) -> NothingToIndexError:
    """Return the error of a change that found no text; it says why each kind of file was left out."""
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
    """Be the only writer of a store.

    Raises
    ------
    StoreLockedError
        When another process is writing to it.
    BuildError
        When the folder cannot be written.
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
    """Begin a change with an empty work folder; return its entry of the history.

    ``SOURCE_DATE_EPOCH`` stands for the time now in reproducible builds.
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
    """Publish a change: move files into place, write the manifest, then delete what is stale; return its report.

    Parameters
    ----------
    work
        Folder of the change; holds the new segments.
    manifest
        The manifest that the change started from.
    kept
        Segments that stay, under their names.
    made
        New segments, under their numbers in the work folder.
    event
        The change's entry of the history.
    counts
        Documents and tokens that the report counts; by default those of `made`.
    skipped, seconds, dense
        Of the report.
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
    """The folder of a change in progress.

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
        """Folder of what a pull has fetched, which an interrupted one goes on with."""
        return self.path / "pull"

    def begin(self) -> None:
        """Delete any earlier work, except for what was pulled."""
        self.path.mkdir(exist_ok=True)
        keep_only(self.path, {self.pulled.name})

    def end(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def abandon(self) -> None:
        """Delete what a failed change has written, except for what was pulled: it may have filled the disk."""
        with suppress(OSError):
            keep_only(self.path, {self.pulled.name})
            drop_stale_files(self.store, existing_manifest(self.store))
            self.path.rmdir()


def put_files(work: WorkFolder, names: Iterable[tuple[str, str]]) -> None:
    """Move finished segments, (number in the work folder, name in the store), and tombstones to their place.

    Some may have been moved before a kill; a segment whose name is there already is the same.
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
"""Names of files that an interrupted first build leaves."""


def check_folder(store: Path) -> None:
    """Check that a folder holds neither a store nor anything that no build made, before even a lock is put there.

    Raises
    ------
    BuildError
        When there is a store, or files that a build might overwrite.
    """
    if existing_manifest(store) is not None:
        raise BuildError(f"to build a datastore at {store}", "there is one", "Use `add`, or choose another folder.")
    names = {path.name for path in store.iterdir()} if store.is_dir() else set()
    foreign = sorted(name for name in names if not (LOCK in names and _OURS.fullmatch(name)))
    if foreign:
        raise BuildError(f"an empty folder at {store}", f"one that holds {foreign[0]}", "Choose another folder.")


Advance = Callable[[float], object]
"""Called with the number of units of work that are done."""


@contextmanager
def progress_bar(name: str, total: int | None, unit: str, shown: bool) -> Iterator[Advance]:
    """Show a bar with amount and time left, where standard error is a terminal."""
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
    """Wall time by stage, with a progress bar per stage when asked for.

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
        """Time a stage and show its progress."""
        started = time.perf_counter()
        with progress_bar(name, total, unit, self.bars) as advance:
            yield advance
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
