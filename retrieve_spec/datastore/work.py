"""Work in progress: the folder of a change of a store, and how what it made is put in its place.

A change works in ``STORE/work``: `plan.json` says what is being done, `inputs.jsonl` has a line for every shard of the
input, ``shard-N.*`` hold the tokens of shards, `cut.json` says which documents make which segment, ``segment-N`` are
the files of finished segments. Every record is put in place last and atomically, so a step is either done or not begun;
a resumed change repeats what was not done.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.files import replace_file, sync_folder, write_bytes
from retrieve_spec.datastore.manifest import PLAN, SEGMENTS, SKIPPED, TOMBSTONES, WORK, Manifest

INPUTS = "inputs.jsonl"
STDIN_COPY = "stdin"
GONE = ".gone"


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


def drop_stale_files(store: Path, manifest: Manifest | None) -> None:
    """Delete what no manifest lists: left by an interrupted change, or replaced by one."""
    segments = manifest.segments if manifest else ()
    _keep(store / SEGMENTS, {entry.name for entry in segments})
    _keep(store / TOMBSTONES, {name for entry in segments for name in entry.tombstones})
    events = manifest.history if manifest else ()
    _keep(store / SKIPPED, {event["listed"]["name"] for event in events if "listed" in event})


def _keep(folder: Path, names: set[str]) -> None:
    for path in _entries(folder):
        if path.name in names:
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.suffix == GONE:
            shutil.rmtree(path, ignore_errors=True)
        else:  # at once: half a folder must not be taken for the segment of that name
            gone = path.with_suffix(GONE)
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(path, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(folder.iterdir())
