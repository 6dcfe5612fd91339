"""Exchange: the work folder of a change at a remote, for machines that share no folder.

What stages read and write travels through ``URL/work``: the plan, the inputs, tokens of shards, the cut; segments go to
their place at once, ``URL/segments/HASH``. Every file arrives whole or not at all and is compared with its hash where
it is read: those of the plan and the cut travel with the task, those of a rank's outputs in its *mark*, a small file
that is written last. A rank is done when its mark is there and what it names has the size that it says. Marks name the
change they belong to: where tidying up was interrupted, those of an earlier one may still be there.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from retrieve_spec.datastore.addresses import explain_remote_errors
from retrieve_spec.datastore.files import FileEntry, entries_of, replace_file, sha256_of
from retrieve_spec.datastore.manifest import PLAN, SEGMENTS, WORK, content_name
from retrieve_spec.datastore.remote import Remote
from retrieve_spec.datastore.scratch import scratch_folder
from retrieve_spec.datastore.stages import CUT, Done, Stages, part_of, run_rank
from retrieve_spec.datastore.work import INPUTS, WorkFolder
from retrieve_spec.errors import StoreCorruptError, StoreIncompleteError

_AGAIN = "Delete it, and continue with --resume: it is made again."
_TOKENIZER = "tokenizer"
_ANNOUNCED = "announced"
_P = ParamSpec("_P")
_R = TypeVar("_R")


def _reaching(method: Callable[Concatenate[Exchange, _P], _R]) -> Callable[Concatenate[Exchange, _P], _R]:
    """A method whose errors name the remote."""

    @wraps(method)
    def call(self: Exchange, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with explain_remote_errors(self.url):
            return method(self, *args, **kwargs)

    return call


class Exchange:
    """Moves what stages read and write between a work folder of this machine and a remote.

    Parameters
    ----------
    url
        Folder of the store.
    """

    def __init__(self, url: str) -> None:
        self.url, self.remote = url, Remote(url)
        self._change = ""

    # What the process does that plans.

    @_reaching
    def plan(self) -> dict[str, Any] | None:
        """Plan of the change that is in progress there, or was interrupted; None for none."""
        if not self.remote.fs.exists(self._place(PLAN)):
            return None
        plan: dict[str, Any] = self._opened(PLAN)["plan"]
        return plan

    @_reaching
    def begin(self, work: WorkFolder) -> None:
        """Put the plan there with all that it needs, unless another process has begun a change there.

        Raises
        ------
        StoreIncompleteError
            When one has.
        """
        plan = work.plan()
        assert plan is not None, "a change in progress"
        tokenizer, inputs = work.store / plan["tokenizer"], work.path / INPUTS
        entries = {INPUTS: _entry(inputs), _TOKENIZER: _entry(tokenizer)}
        self.remote.send(inputs, self._inputs_place(entries[INPUTS]), entries[INPUTS])
        self.remote.send(tokenizer, plan["tokenizer"], entries[_TOKENIZER])
        self._change = secrets.token_hex(8)
        files = {name: asdict(entry) for name, entry in entries.items()}
        body = {"plan": plan, "files": files, "change": self._change}
        try:
            self.remote.create_file(self._place(PLAN), _sealed(body))
        except FileExistsError as error:
            raise self.begun() from error

    def begun(self) -> StoreIncompleteError:
        """Error about a change that is there already."""
        return StoreIncompleteError(
            f"nothing begun at {self.url}",
            "an interrupted change, or one that is running",
            f"Wait for it, continue it with --resume, or delete {self.url}/{WORK}.",
        )

    @_reaching
    def resume(self, work: WorkFolder) -> None:
        """Bring what an interrupted change planned into the work folder."""
        body = self._opened(PLAN)
        self._change = body["change"]
        entries = entries_of(body["files"])
        work.path.mkdir(parents=True)
        self.remote.fetch(self._inputs_place(entries[INPUTS]), work.path / INPUTS, entries[INPUTS])
        self.remote.fetch(body["plan"]["tokenizer"], work.store / body["plan"]["tokenizer"], entries[_TOKENIZER])
        replace_file(work.path / PLAN, json.dumps(body["plan"]).encode())

    @_reaching
    def needs(self, stages: Stages, stage: str, ranks: Iterable[int]) -> dict[str, Any]:
        """What a task has to know to run some ranks here: hashes of what it reads, and where its inputs stand.

        The cut is put there for ranks that need it.
        """
        work = stages.work
        tokenizer = _entry(work.store / stages.plan["tokenizer"])
        shared = {"plan": stages.plan, "change": self._change, "tokenizer": asdict(tokenizer)}
        if stage == "segment":
            entry = _entry(work.path / CUT)
            self.remote.send(work.path / CUT, self._name(CUT), entry)
            return {**shared, "cut": asdict(entry)}
        lines = {}
        for rank in ranks:
            at, size = stages.places[rank]
            line = json.dumps(work.input((at, size)))
            lines[str(rank)] = [at, size, hashlib.sha256(line.encode()).hexdigest()]
        return {**shared, "inputs": self._inputs_place(_entry(work.path / INPUTS)), "lines": lines}

    @_reaching
    def collect(self, work: WorkFolder, stage: str, ranks: Iterable[int]) -> None:
        """Bring records of ranks that are done into the work folder; their arrays stay where they are."""
        sizes = self.remote.sizes(WORK) | (self.remote.sizes(SEGMENTS) if stage == "segment" else {})
        for rank in ranks:
            mark = _mark(stage, rank)
            if self._name(mark) not in sizes:
                continue
            files = self._marked(mark)
            if not files or any(sizes.get(place) != entry.bytes for place, entry in files.items()):
                continue  # of another change, or lost since: made again
            for place, entry in files.items():
                if place.startswith(f"{WORK}/") and place.endswith(".json"):
                    self.remote.fetch(place, work.path / place.removeprefix(f"{WORK}/"), entry)

    @_reaching
    def error(self, stage: str, rank: int) -> bytes | None:
        """What a rank wrote down of its error, None for nothing."""
        place = self._place(_error(stage, rank))
        return bytes(self.remote.fs.cat_file(place)) if self.remote.fs.exists(place) else None

    @_reaching
    def forget_errors(self, stage: str, ranks: Iterable[int]) -> None:
        """Remove what ranks wrote down earlier."""
        there = self.remote.sizes(WORK)
        for rank in ranks:
            if self._name(_error(stage, rank)) in there:
                self.remote.fs.rm_file(self._place(_error(stage, rank)))

    @_reaching
    def announce(self, content: str) -> None:
        """Write down what the store is going to hold, before it does (`Manifest.content`)."""
        self.remote.write(self._place(_ANNOUNCED), _sealed({"content": content, "change": self._change}))

    @_reaching
    def announced(self) -> str:
        """What the change in progress was about to make of the store, "" for nothing yet."""
        if not all(self.remote.fs.exists(self._place(name)) for name in (PLAN, _ANNOUNCED)):
            return ""
        found = self._opened(_ANNOUNCED)
        return str(found["content"]) if found["change"] == self._opened(PLAN)["change"] else ""

    @_reaching
    def end(self) -> None:
        """Remove the work folder; the plan goes first."""
        if self.remote.fs.exists(self._place(PLAN)):
            self.remote.fs.rm_file(self._place(PLAN))
        if self.remote.fs.exists(self._place()):
            self.remote.fs.rm(self._place(), recursive=True)

    # What a task does, on any machine.

    @_reaching
    def load(self, work: WorkFolder, stage: str, rank: int, needs: dict[str, Any]) -> None:
        """Bring what a rank reads into the work folder."""
        plan, self._change = needs["plan"], needs["change"]
        work.path.mkdir(parents=True, exist_ok=True)
        replace_file(work.path / PLAN, json.dumps(plan).encode())
        self.remote.fetch(plan["tokenizer"], work.store / plan["tokenizer"], FileEntry(**needs["tokenizer"]))
        if stage == "segment":
            self.remote.fetch(self._name(CUT), work.path / CUT, FileEntry(**needs["cut"]))
            for number, _ in part_of(work, rank).pieces:
                for place, entry in self._marked(_mark("tokens", number)).items():
                    self.remote.fetch(place, work.path / place.removeprefix(f"{WORK}/"), entry)
            (work.path / INPUTS).touch()
            return
        at, size, expected = needs["lines"][str(rank)]
        line = bytes(self.remote.fs.cat_file(self.remote.path(needs["inputs"]), start=at, end=at + size))
        if hashlib.sha256(json.dumps(json.loads(line)).encode()).hexdigest() != expected:
            raise StoreCorruptError(f"the inputs of rank {rank} at {self.url}", "others", _AGAIN)
        (work.path / INPUTS).write_bytes(b"\n" * rank + line)  # its number is its line's

    @_reaching
    def save(self, work: WorkFolder, stage: str, rank: int) -> None:
        """Bring what a rank wrote there, and then the mark that says so."""
        files: dict[str, FileEntry] = {}
        if stage == "tokens":
            written = [work.path / f"shard-{rank:06d}{end}" for end in (".bin", ".json")]
        else:
            written = [work.path / f"segment-{rank:06d}.json"]
            record = json.loads(written[0].read_bytes())
            made = entries_of(record["files"])
            folder = f"{SEGMENTS}/{content_name(made)}"
            there = self.remote.sizes(folder)
            for name, entry in made.items():
                files[f"{folder}/{name}"] = entry
                if there.get(f"{folder}/{name}") != entry.bytes:
                    source = work.path / f"segment-{rank:06d}" / name
                    self.remote.send(source, f"{folder}/{name}", entry)
        for path in written:
            entry = files[self._name(path.name)] = _entry(path)
            self.remote.send(path, self._name(path.name), entry)
        mark = {"files": {place: asdict(entry) for place, entry in files.items()}, "change": self._change}
        self.remote.write(self._place(_mark(stage, rank)), _sealed(mark))

    @_reaching
    def tell_error(self, stage: str, rank: int, content: bytes) -> None:
        """Write down the error of a rank for whoever waits."""
        self.remote.write(self._place(_error(stage, rank)), content)

    def _name(self, *parts: str) -> str:
        return "/".join((WORK, *parts))

    def _place(self, *parts: str) -> str:
        return self.remote.path(WORK, *parts)

    def _inputs_place(self, entry: FileEntry) -> str:
        """By its hash: of two processes that begin at once each has its own."""
        return self._name(f"inputs-{entry.sha256[:12]}.jsonl")

    def _marked(self, mark: str) -> dict[str, FileEntry]:
        """What a mark names; nothing where it is of another change."""
        body = self._opened(mark)
        return entries_of(body["files"]) if body["change"] == self._change else {}

    def _opened(self, name: str) -> dict[str, Any]:
        """Content of a sealed file."""
        try:
            content = bytes(self.remote.fs.cat_file(self._place(name)))
        except FileNotFoundError as error:
            raise StoreCorruptError(f"{self.url}/{WORK}/{name}", "no such file", _AGAIN) from error
        seal, _, body = content.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != seal:
            raise StoreCorruptError(f"{self.url}/{WORK}/{name} as it was written", "other content", _AGAIN)
        found: dict[str, Any] = json.loads(body)
        return found


def run_travelling(url: str, stage: str, rank: int, needs: dict[str, Any], beside: Path | None = None) -> Done:
    """Run one rank in a folder of its own, put below another one or where temporary folders are.

    What it reads and writes travels through the exchange of an address; `needs` is what that asks for
    (`Exchange.needs`).
    """
    exchange = Exchange(url)
    with scratch_folder(beside) as folder:
        work = WorkFolder(folder)
        exchange.load(work, stage, rank, needs)
        done = run_rank(Stages(work), stage, rank)
        exchange.save(work, stage, rank)
    return done


def needs_of(needs: dict[str, Any], rank: int) -> dict[str, Any]:
    """Of what some ranks have to know (`Exchange.needs`) what one has to."""
    return needs | ({"lines": {str(rank): needs["lines"][str(rank)]}} if "lines" in needs else {})


def look(
    stages: Stages, stage: str, waiting: set[int], tell: Callable[[Done], object], exchange: Exchange | None
) -> None:
    """Tell of every rank that is done by now, and wait for it no longer."""
    if exchange is not None and waiting:
        exchange.collect(stages.work, stage, waiting)
    for rank in sorted(waiting):
        if (done := stages.outcome(stage, rank)) is not None:
            waiting.discard(rank)
            tell(done)


def _sealed(content: dict[str, Any]) -> bytes:
    """A small file that says itself whether it is whole."""
    body = json.dumps(content).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, sha256_of(path))


def _mark(stage: str, rank: int) -> str:
    return f"done-{stage}-{rank:06d}"


def _error(stage: str, rank: int) -> str:
    return f"error-{stage}-{rank:06d}.json"
