"""The stages of a build: plan → shards of tokens → cut → segments, each a pure step over the work folder.

`tokens(rank)` and `segment(rank)` read what the plan and earlier stages wrote, and write one output each, whole or not
at all; ranks need nothing of each other, so any number of processes runs them, in any order, with the same bytes as the
result. `cut` is the one step that sees all documents: it drops duplicates and says where segments begin, from the order
and length of the documents alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.change import WorkFolder
from retrieve_spec.datastore.documents import Row
from retrieve_spec.datastore.entry_filter import Reason
from retrieve_spec.datastore.files import replace_file
from retrieve_spec.datastore.fingerprint import encode, load_tokenizer
from retrieve_spec.datastore.ingest import Tokenised, tokenise
from retrieve_spec.datastore.manifest import SegmentEntry, entry_of
from retrieve_spec.datastore.segment import write_segment
from retrieve_spec.datastore.shards import Choice, Cut, SegmentShard, Shard, WrittenShard
from retrieve_spec.datastore.sources import Source, SourceFile

CUT = "cut.json"
_SEPARATOR = np.zeros(1, np.uint32)
Done = tuple[int, int, int]
"""What a rank did: bytes read, documents, tokens."""


class Stages:
    """The stages of the change that a work folder plans.

    Parameters
    ----------
    work
        The folder; its plan names the tokenizer, the settings and the sources.
    workers
        How many shards are read at once at least.
    """

    def __init__(self, work: WorkFolder, workers: int = 1) -> None:
        plan = work.plan()
        assert plan is not None, "a change in progress"
        self.work, self.plan = work, plan
        self.config = StoreConfig(**plan["config"])
        self._workers = workers

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Where each shard's line stands in the inputs."""
        return self.work.inputs()

    @property
    def shards(self) -> int:
        """Shards of the input."""
        return len(self.places)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        path = self.work.store / self.plan["tokenizer"]
        return _kept_tokenizer(path, path.stat().st_mtime_ns if path.exists() else 0)

    @cached_property
    def _sources(self) -> tuple[Source, ...]:
        return tuple(Source(**source) for source in self.plan.get("sources", ()))

    def needs_tokens(self, rank: int) -> bool:
        """Whether the tokens of a shard are still to be written."""
        if (self.work.path / f"shard-{rank:06d}.json").exists():
            return False
        record = self.work.input(self.places[rank])
        return "segment" not in record or "documents" in record

    def tokens(self, rank: int) -> Done:
        """Read and encode one shard."""
        record = self.work.input(self.places[rank])
        results = self._converted(record) if "segment" in record else self._read(record)
        documents: list[tuple[Any, ...]] = []
        skipped: list[tuple[str, str, str]] = []
        size = tokens = 0
        with (self.work.path / f"shard-{rank:06d}.bin").open("wb") as file:
            for result in results:
                size += result.bytes
                if result.skip:
                    skipped.append((result.path, result.source, result.skip))
                for path, digest, part in () if result.skip else _parts(result, self.config.segment_tokens - 1):
                    file.write(np.concatenate([part, _SEPARATOR]).astype("<u4", copy=False).data)
                    documents.append(astuple(Row(path, result.licence, result.source, digest, len(part))))
                    tokens += len(part)
            file.flush()
            os.fsync(file.fileno())
        content = {"documents": documents, "skipped": skipped, "bytes": size, "tokens": tokens}
        replace_file(self.work.path / f"shard-{rank:06d}.json", json.dumps(content).encode())
        return size, len(documents), tokens

    def _read(self, record: dict[str, Any]) -> Iterator[Tokenised]:
        files = [SourceFile(**file) for file in record["files"]]
        return tokenise(files, self._sources, self._tokenizer, self.config.document_bytes)

    def _converted(self, record: dict[str, Any]) -> Iterator[Tokenised]:
        """Documents of a segment, encoded by another tokenizer."""
        shard = SegmentShard(record, self.plan["vocabulary"])
        shard.check()
        old = load_tokenizer(shard.store / self.plan["tokenizer_before"])
        rows = shard.rows
        for number in range(*record["documents"]):
            if number not in shard.left_out:
                row, ids = rows[number], shard.segment.text_ids(number)
                encoded = encode(self._tokenizer, old.decode(ids.tolist(), skip_special_tokens=False))
                skip = "" if len(encoded) else Reason.EMPTY
                yield Tokenised(row.path, row.licence, row.source, row.sha256, encoded, 4 * len(ids), skip)

    def shard(self, rank: int) -> Shard:
        """A shard, when its tokens are there."""
        if (self.work.path / f"shard-{rank:06d}.json").exists():
            return WrittenShard(self.work, rank)
        return SegmentShard(self.work.input(self.places[rank]), self.plan["vocabulary"])

    def cut(self, known: Iterable[str], run: Callable[[list[int]], object]) -> Cut:
        """Choose the documents and say which segment each goes into.

        Parameters
        ----------
        known
            Content hashes that count as duplicates.
        run
            Called with ranks whose tokens are needed next; with a limit of tokens, not all may be.
        """
        path = self.work.path / CUT
        if path.exists():
            return Cut.from_json(json.loads(path.read_bytes()))
        chosen = Choice(known, self.plan.get("max_tokens"))
        first = 0
        while first < self.shards and not chosen.full:
            ranks = range(first, min(first + chosen.expected(first, 4 * self._workers), self.shards))
            run([rank for rank in ranks if self.needs_tokens(rank)])
            for rank in ranks:
                chosen.take(rank, self.shard(rank))
            first = ranks.stop
        cut = chosen.cut(self.config.segment_tokens)
        replace_file(path, json.dumps(asdict(cut)).encode())
        return cut

    def segment(self, rank: int) -> Done:
        """Index one segment of the cut."""
        part = Cut.from_json(json.loads((self.work.path / CUT).read_bytes())).segments[rank]
        rows: list[Row] = []
        ids = np.empty(part.tokens + part.documents, np.uint32)
        at = 0
        for number, ranges in part.pieces:
            shard = self.shard(number)
            listed = shard.rows
            for first, end in ranges:
                rows += listed[first:end]
                found = shard.ids(first, end)
                ids[at : at + len(found)] = found
                at += len(found)
        folder = self.work.path / f"segment-{rank:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        handed = [ids]
        del ids
        files, origins = write_segment(folder, handed.pop(), rows, self.config)
        record = {
            "files": {name: asdict(entry) for name, entry in files.items()},
            "origins": origins,
            "documents": len(rows),
            "tokens": part.tokens,
        }
        replace_file(_record_of(self.work, rank), json.dumps(record).encode())
        return 0, part.documents, part.tokens

    def needs_segment(self, rank: int) -> bool:
        """Whether a segment is still to be indexed."""
        return not _record_of(self.work, rank).exists()

    def entry(self, rank: int) -> SegmentEntry:
        """Entry of an indexed segment, under its number in the work folder."""
        record = json.loads(_record_of(self.work, rank).read_bytes())
        return entry_of({"name": f"{rank:06d}", "added_at": self.plan["at"], "tombstones": {}, **record})


@lru_cache(maxsize=1)
def _kept_tokenizer(path: Path, modified_ns: int) -> Tokenizer:
    """A store's tokenizer, kept for the next change: a large one takes longer to load than a small change to make."""
    return load_tokenizer(path)


def run_rank(stages: Stages, stage: str, rank: int) -> Done:
    """Run one rank of the stage `"tokens"` or `"segment"`."""
    return {"tokens": stages.tokens, "segment": stages.segment}[stage](rank)


def _record_of(work: WorkFolder, rank: int) -> Path:
    return work.path / f"segment-{rank:06d}.json"


def _parts(result: Tokenised, limit: int) -> Iterator[tuple[str, str, NDArray[np.uint32]]]:
    """Path, content hash and ids of a document, or of the parts of one that is longer than a segment."""
    if len(result.ids) <= limit:
        yield result.path, result.sha256, result.ids
        return
    for number, start in enumerate(range(0, len(result.ids), limit), 1):
        yield f"{result.path}#part{number}", part_hash(result.sha256, number), result.ids[start : start + limit]


def part_hash(text: str, number: int) -> str:
    """Content hash of a part of a long text, by the hash of the text: that of the text itself for the first."""
    return text if number == 1 else sha256(f"{text}#{number}".encode()).hexdigest()
