"""Changes of a store: one writer at a time, and a new manifest that takes effect at once or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from retrieve_spec._version import __version__
from retrieve_spec.datastore.entry_filter import RULES
from retrieve_spec.datastore.files import replace_file, sync_folder, write_bytes
from retrieve_spec.datastore.manifest import (
    CATALOG,
    GONE,
    MANIFEST,
    PLAN,
    SEGMENTS,
    SKIPPED,
    TOMBSTONES,
    WORK,
    Manifest,
    SegmentEntry,
    content_name,
    drop_stale_files,
    existing_manifest,
    explain_write_errors,
    incomplete,
    read_manifest,
    write_manifest,
)
from retrieve_spec.errors import BuildError, StoreLockedError

LOCK = "lock"
INPUTS = "inputs.jsonl"
STDIN_COPY = "stdin"
_SHORT = ("remove", "sync", "pull")
"""Changes that are run again instead of being resumed."""


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """What a change of a store did.

    Attributes
    ----------
    verb
        build, add, remove, merge, compact, retokenize, sync or pull.
    documents, tokens
        Added by the change (for `remove`: taken out).
    segments
        Segments of the store now.
    skipped
        ``(path, source, reason)`` of everything that was left out.
    seconds
        Wall time by stage.
    dense
        Of dense indexes: vectors, positions that could have one, kinds of index, recall@10 against exact search over
        the same keys, bytes per vector, share of the variance that the keys keep. Empty without.
    """

    verb: str
    documents: int
    tokens: int
    segments: int
    skipped: tuple[tuple[str, str, str], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    dense: dict[str, Any] = field(default_factory=dict)

    @property
    def skipped_by_reason(self) -> dict[str, int]:
        """How many were left out, by reason."""
        return {reason: len(paths) for reason, paths in by_reason(self.skipped).items()}


def report_of(
    verb: str,
    made: Sequence[SegmentEntry],
    segments: int,
    skipped: Iterable[tuple[str, str, str]],
    seconds: dict[str, float],
    dense: dict[str, Any] | None = None,
) -> ChangeReport:
    """Report of a change that made some segments, of a store that has so many now."""
    documents, tokens = sum(entry.documents for entry in made), sum(entry.tokens for entry in made)
    return ChangeReport(verb, documents, tokens, segments, tuple(skipped), seconds, dense or {})


def by_reason(skipped: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Paths of what was left out, by reason; reasons in alphabetical order."""
    paths: dict[str, list[str]] = {}
    for path, _, reason in skipped:
        paths.setdefault(reason, []).append(path)
    return dict(sorted(paths.items()))


def nothing_to_index(skipped: Iterable[tuple[str, str, str]], plan: dict[str, Any], shards: int) -> BuildError:
    """Error about a change that found no text, which says why each kind of file was left out."""
    reasons = [f"{len(paths):,} {reason} (first: {paths[0]})" for reason, paths in by_reason(skipped).items()]
    if reasons:
        got = f"left out {', '.join(reasons)}"
    elif "sources" not in plan:
        return BuildError("documents that are not removed", "none", "Add some first.")
    elif not shards:
        got = "the sources and filters name no file"
    else:
        got = "the files are empty" + (", or the first document exceeds max_tokens" if plan["max_tokens"] else "")
    return BuildError("text to index", f"none: {got}", "Check the sources and filters, or --admit what stays out.")


def utc_now() -> str:
    """Time now in UTC, to the second; ``SOURCE_DATE_EPOCH`` replaces it for reproducible builds."""
    moment = datetime.fromtimestamp(float(os.environ.get("SOURCE_DATE_EPOCH") or time.time()), UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


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
        try:
            yield WorkFolder(store)
        finally:
            left = list(store.iterdir()) if fresh else []
            if fresh and all(path.name == LOCK or path.match("tokenizer-*.json*") for path in left):
                for path in left:  # nothing came of it: leave no folder
                    path.unlink()
                store.rmdir()
            lock.release()


Inputs = Iterable[dict[str, Any]]


def change_store(
    store: Path,
    verb: str,
    make_plan: Callable[[WorkFolder, Any], tuple[dict[str, Any], Inputs]],
    apply: Callable[[WorkFolder, Any, dict[str, Any]], ChangeReport],
    *,
    resume: bool = False,
) -> ChangeReport:
    """Change a store as its only writer: plan the change, or find the plan of the interrupted one, and carry it out.

    Parameters
    ----------
    store, verb
        Folder of the store, and the change.
    make_plan
        Makes the plan of a new change, and a line for every shard of its input, from the work folder and the manifest
        that the change starts from (None where there is no store yet).
    apply
        Carries out a plan, from the same and the plan.
    resume
        Whether to go on with an interrupted one.

    Raises
    ------
    BuildError
        When there is none to resume, it is of another verb, or was begun by another version or under other rules of
        what enters; when the folder cannot be written.
    StoreLockedError
        When another process is writing to the store.
    """
    with writer(store) as work:
        manifest = existing_manifest(store)
        if not resume:
            plan, inputs = make_plan(work, manifest)
            return apply(work, manifest, begin_change(work, manifest, {"verb": verb, **plan}, inputs))
        plan = resumed_plan(work, verb)
        if plan["generation"] == (manifest.generation if manifest else 0):
            check_same_rules(plan, verb, f"the folder {store}")
            return apply(work, manifest, plan)
        work.end()  # the change had taken effect when it was killed, and only tidying up was left
        manifest = read_manifest(store)
        event = manifest.history[-1]
        return ChangeReport(verb, event["documents"], event["tokens"], len(manifest.segments))


def begin_change(
    work: WorkFolder, manifest: Manifest | None, plan: dict[str, Any], inputs: Inputs = ()
) -> dict[str, Any]:
    """Record the plan of a new change, and clear away what interrupted ones left."""
    plan = {**plan, "generation": manifest.generation if manifest else 0, "at": utc_now()}
    plan |= {"version": __version__, "rules": RULES}
    plan = work.begin(plan, inputs)
    drop_stale_files(work.store, manifest)
    return plan


def resumed_plan(work: WorkFolder, verb: str) -> dict[str, Any]:
    """Plan of the interrupted change.

    Raises
    ------
    BuildError
        When there is none, or it is of another verb.
    """
    plan = work.plan()
    if plan is None:
        work.end()
        raise BuildError(f"an interrupted {verb} in {work.store}", "none", "Run the command again without --resume.")
    if plan["verb"] != verb:
        other = plan["verb"]
        remedy = "Run the command without --resume."
        if other not in _SHORT:
            remedy = f"Continue that one with `retrieve-spec {other} {work.store} --resume`, or leave out --resume."
        raise BuildError(f"an interrupted {verb} in {work.store}", f"an interrupted {other}", remedy)
    return plan


def check_same_rules(plan: dict[str, Any], verb: str, place: str) -> None:
    """Check that this version began an interrupted change, and that what enters a store is what entered then."""
    again = f"Delete {place}" if verb in ("build", "merge") else "Leave out --resume"
    if plan["version"] != __version__:
        expected, got = f"a {verb} that version {__version__} began", f"one of {plan['version']}"
        raise BuildError(expected, got, f"{again}, and run the command again.")
    if plan.get("rules") != RULES:  # its inputs were listed as those rules say; what is read would go by these
        expected = f"a {verb} that was begun under the same rules of what enters a store"
        raise BuildError(expected, "one under others", f"{again}, and run the command again.")


def publish(
    work: WorkFolder,
    manifest: Manifest,
    kept: Iterable[SegmentEntry],
    made: Iterable[SegmentEntry],
    plan: dict[str, Any],
    report: ChangeReport,
) -> ChangeReport:
    """Make a change take effect: files in their places, then the manifest, then clearing up.

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
    plan, report
        What was to be done and what was: the entry of the history, and what was left out.

    Returns
    -------
    ChangeReport
        The report.
    """
    named = [(entry.name, replace(entry, name=content_name(entry.files))) for entry in made]
    put_segments(work, [(number, entry.name) for number, entry in named])
    put_tombstones(work)
    segments = {entry.name: entry for entry in (*kept, *(entry for _, entry in named))}
    event = event_of(plan, report) | put_skipped(work.store, report.skipped)
    following = manifest.following(tuple(segments.values()), {"generation": manifest.generation + 1, **event})
    write_manifest(work.store, following)
    drop_stale_files(work.store, following)
    for copy in work.store.glob("tokenizer-*.json"):
        if copy.name != following.tokenizer_name:
            copy.unlink()
    work.end()
    return report


def event_of(plan: dict[str, Any], report: ChangeReport) -> dict[str, Any]:
    """Entry of a store's history."""
    left_out = ("places", "generation", "vocabulary", "tokenizer_before", "rules")
    return {
        **{key: value for key, value in plan.items() if key not in left_out and value not in (None, "")},
        "documents": report.documents,
        "tokens": report.tokens,
        "skipped": report.skipped_by_reason,
        **({"vectors": report.dense} if report.dense else {}),
    }


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

    def begin(self, plan: dict[str, Any], inputs: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
        """Throw away any earlier work and record what is going to be done, and to which inputs, a line per shard.

        Returns the plan, with the bytes of the files that are going to be read.
        """
        size = 0
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        try:
            with (self.path / INPUTS).open("w", encoding="utf-8", errors="surrogateescape") as file:
                for line in inputs:
                    file.write(json.dumps(line) + "\n")
                    size += sum(each["size"] for each in line.get("files", ()) if not each["skip"])
                file.flush()
                os.fsync(file.fileno())
            plan = plan | {"bytes": size} if size else plan
            replace_file(self.path / PLAN, json.dumps(plan).encode())
        except BaseException:
            self.end()  # nothing was begun
            raise
        return plan

    def plan(self) -> dict[str, Any] | None:
        """What is being done, or None when no change was begun."""
        try:
            plan = json.loads((self.path / PLAN).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return plan if isinstance(plan, dict) and "verb" in plan else None

    def inputs(self) -> list[tuple[int, int]]:
        """Where each shard's line stands in the inputs: (offset, bytes)."""
        places, at = [], 0
        with (self.path / INPUTS).open("rb") as file:
            for line in file:
                places.append((at, len(line)))
                at += len(line)
        return places

    def input(self, place: tuple[int, int]) -> dict[str, Any]:
        """One shard's line of the inputs."""
        with (self.path / INPUTS).open("rb") as file:
            file.seek(place[0])
            line: dict[str, Any] = json.loads(file.read(place[1]))
        return line

    def end(self) -> None:
        """Remove the folder; the plan goes first, so that half a removal is no work to resume."""
        (self.path / PLAN).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


def put_segments(work: WorkFolder, names: Iterable[tuple[str, str]]) -> None:
    """Move finished segments, (number in the work folder, name in the store), to their place.

    Some may have been moved before a kill; a segment whose name is there already is the same.
    """
    target = work.store / SEGMENTS
    target.mkdir(exist_ok=True)
    for number, name in names:
        folder = work.path / f"segment-{number}"
        if (target / name).is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.exists():
            os.rename(folder, target / name)
    sync_folder(target)


def put_tombstones(work: WorkFolder) -> None:
    """Move the tombstones that a change wrote to their place."""
    made = work.path / TOMBSTONES
    if made.is_dir():
        target = work.store / TOMBSTONES
        target.mkdir(exist_ok=True)
        for path in sorted(made.iterdir()):
            os.replace(path, target / path.name)
        sync_folder(target)


def put_skipped(store: Path, skipped: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Write the list of what a change left out; returns its record for the history, empty where nothing was."""
    if not skipped:
        return {}
    content = json.dumps(skipped, ensure_ascii=False, indent=0).encode("utf-8", "backslashreplace")
    folder = store / SKIPPED
    folder.mkdir(exist_ok=True)
    written = write_bytes(folder / "list.tmp", content)
    name = f"{written.sha256[:16]}.json"
    os.replace(folder / "list.tmp", folder / name)
    sync_folder(folder)
    return {"listed": {"name": name, "bytes": written.bytes, "sha256": written.sha256}}


_OURS = {
    "": re.compile(
        rf"{LOCK}|{WORK}|{SEGMENTS}|{SKIPPED}|{TOMBSTONES}|(?:{MANIFEST}|tokenizer-\w+\.json)(?:\.tmp)?|{CATALOG}"
    ),
    WORK: re.compile(
        rf"(?:plan|cut|(?:shard|segment|dense|keys)-[\w-]+)\.(?:json|bin)(?:\.tmp)?|{STDIN_COPY}|{INPUTS}"
        rf"|segment-\d+|{TOMBSTONES}|pull"
    ),
    SEGMENTS: re.compile(rf"[0-9a-f]{{32}}(?:{re.escape(GONE)})?"),
    TOMBSTONES: re.compile(r"[0-9a-f]{32}-[0-9a-f]{12}-\w+\.bin"),
    SKIPPED: re.compile(r"[0-9a-f]{16}\.json|list\.tmp"),
}
"""Names that an interrupted first build leaves, by folder."""


def check_folder(store: Path) -> None:
    """Check that a folder holds neither a store nor anything that no build made, before even a lock is put there.

    Raises
    ------
    BuildError
        When there is a store, or files that a build might overwrite.
    """
    if existing_manifest(store) is not None:
        raise BuildError(f"to build a datastore at {store}", "there is one", "Use `add`, or choose another folder.")
    foreign = next(_foreign(store), None)
    if foreign is not None:
        raise BuildError(f"an empty folder at {store}", f"one that holds {foreign.name}", "Choose another folder.")


def check_not_begun(store: Path, work: WorkFolder) -> None:
    """Check, as the only writer, that no build was finished meanwhile and none was interrupted.

    Raises
    ------
    BuildError
        When there is a store.
    StoreIncompleteError
        When an interrupted build lies there.
    """
    check_folder(store)
    if work.plan() is not None:
        raise incomplete(store, f"an empty folder at {store}")


def _foreign(store: Path) -> Iterator[Path]:
    """Files in a folder without a manifest that no build made."""
    for folder, ours in _OURS.items():
        inside = store / folder
        for path in sorted(inside.iterdir()) if inside.is_dir() else ():
            if not ours.fullmatch(path.name):
                yield path


Advance = Callable[[float], object]
"""Told of units of work that are done."""


@contextmanager
def progress_bar(name: str, total: int | None, unit: str, shown: bool) -> Iterator[Advance]:
    """Show a bar with amount and time left, where standard error is a terminal."""
    from rich.console import Console  # takes longer to import than a reader of stores should wait
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
        """Time a stage and show how far it is."""
        started = time.perf_counter()
        with progress_bar(name, total, unit, self.bars) as advance:
            yield advance
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
