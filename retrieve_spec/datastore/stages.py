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
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.documents import Row
from retrieve_spec.datastore.files import FileEntry, replace_file, sync_folder
from retrieve_spec.datastore.fingerprint import load_tokenizer
from retrieve_spec.datastore.ingest import Tokenised, encode, ordered_map, texts_of, tokenise
from retrieve_spec.datastore.manifest import SegmentEntry
from retrieve_spec.datastore.segment import write_segment
from retrieve_spec.datastore.shards import SegmentShard, Shard, WrittenShard
from retrieve_spec.datastore.sources import Source, SourceFile
from retrieve_spec.datastore.work import WorkFolder

_CUT = "cut.json"
_SEPARATOR = np.zeros(1, np.uint32)
Done = tuple[int, int, int]
"""What a rank did: bytes read, documents, tokens."""


class Stages:
    """The stages of the change that a work folder plans.

    Parameters
    ----------
    work
        The folder; its plan names the tokenizer, the settings and the sources.
    threads
        Threads that read and encode within one rank.
    """

    def __init__(self, work: WorkFolder, threads: int = 1) -> None:
        plan = work.plan()
        assert plan is not None, "a change in progress"
        self.work, self.plan = work, plan
        self.config = StoreConfig(**plan["config"])
        self._threads = threads

    @cached_property
    def _inputs(self) -> list[tuple[int, int]]:
        return self.work.inputs()

    @property
    def shards(self) -> int:
        """Shards of the input."""
        return len(self._inputs)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.work.store / self.plan["tokenizer"])

    @cached_property
    def _sources(self) -> tuple[Source, ...]:
        listed = self.plan.get("sources", ())
        lists = ("include", "exclude", "licences")
        return tuple(Source(**s | {name: tuple(s[name]) for name in lists}) for s in listed)

    def needs_tokens(self, rank: int) -> bool:
        """Whether the tokens of a shard are still to be written."""
        if (self.work.path / f"shard-{rank:06d}.json").exists():
            return False
        record = self.work.input(self._inputs[rank])
        return "segment" not in record or "documents" in record

    def tokens(self, rank: int) -> Done:
        """Read and encode one shard."""
        record = self.work.input(self._inputs[rank])
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
        limit = self.config.document_bytes
        texts = texts_of(files, self._sources, limit)
        return tokenise(texts, self._sources, self._tokenizer, self._threads, limit)

    def _converted(self, record: dict[str, Any]) -> Iterator[Tokenised]:
        """Documents of a segment, encoded by another tokenizer."""
        shard = SegmentShard(record, self.plan["vocabulary"])
        old = load_tokenizer(shard.store / self.plan["tokenizer_before"])
        rows = shard.rows
        numbers = (number for number in range(*record["documents"]) if number not in shard.left_out)

        def convert(number: int) -> Tokenised:
            row, ids = rows[number], shard.segment.text_ids(number)
            text = old.decode(ids.tolist(), skip_special_tokens=False)
            encoded = encode(self._tokenizer, text)
            return Tokenised(row.path, row.licence, row.source, row.sha256, encoded, 4 * len(ids))

        return ordered_map(convert, numbers, self._threads)

    def shard(self, rank: int) -> Shard:
        """A shard, when its tokens are there."""
        record = self.work.input(self._inputs[rank])
        if "segment" in record and "documents" not in record:
            return SegmentShard(record, self.plan["vocabulary"])
        return WrittenShard(self.work, rank)

    def cut(self, known: Iterable[str], run: Callable[[list[int]], object]) -> Cut:
        """Choose the documents and say which segment each goes into.

        Parameters
        ----------
        known
            Content hashes that count as duplicates.
        run
            Called with ranks whose tokens are needed next; with a limit of tokens, not all may be.
        """
        path = self.work.path / _CUT
        if path.exists():
            return Cut.from_json(json.loads(path.read_bytes()))
        chosen = _Choice(set(known), self.plan.get("max_tokens"))
        step = self.shards if chosen.most is None else 4 * self._threads
        for first in range(0, self.shards, max(step, 1)):
            ranks = range(first, min(first + step, self.shards))
            run([rank for rank in ranks if self.needs_tokens(rank)])
            for rank in ranks:
                chosen.take(rank, self.shard(rank))
            if chosen.full:
                break
        cut = chosen.cut(self.config.segment_tokens)
        replace_file(path, json.dumps(asdict(cut)).encode())
        return cut

    def segment(self, rank: int) -> Done:
        """Index one segment of the cut."""
        part = Cut.from_json(json.loads((self.work.path / _CUT).read_bytes())).segments[rank]
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
        sync_folder(folder)
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
        files = {name: FileEntry(**file) for name, file in record["files"].items()}
        origins = tuple((licence, source) for licence, source in record["origins"])
        at = self.plan["at"]
        return SegmentEntry(f"{rank:06d}", record["documents"], record["tokens"], at, origins, files)


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
        digest = result.sha256 if number == 1 else sha256(f"{result.sha256}#{number}".encode()).hexdigest()
        yield f"{result.path}#part{number}", digest, result.ids[start : start + limit]


@dataclass(frozen=True, slots=True)
class SegmentCut:
    """Documents of one segment: tokens, documents, and ``(shard, [(first, end), …])`` of where they are."""

    tokens: int
    documents: int
    pieces: list[tuple[int, list[tuple[int, int]]]]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which documents make which segment, and ``(path, source, reason)`` of what makes none."""

    segments: list[SegmentCut] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Cut:
        """The cut that was written."""
        skipped = [(path, source, reason) for path, source, reason in record["skipped"]]
        return Cut([SegmentCut(**segment) for segment in record["segments"]], skipped)

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(segment.tokens for segment in self.segments)


class _Choice:
    """Goes through shards in order and chooses documents: each text once, up to a limit of tokens."""

    def __init__(self, known: set[str], most: int | None) -> None:
        self.most, self.full = most, False
        self._seen = {bytes.fromhex(digest) for digest in known}
        self._total = 0
        self._chosen: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = []  # shard, numbers, tokens
        self._skipped: list[tuple[str, str, str]] = []

    def take(self, rank: int, shard: Shard) -> None:
        """Choose among the documents of the next shard."""
        if self.full:
            return
        numbers, lengths = [], []
        left_out = shard.left_out
        for number, row in enumerate(shard.rows):
            if number in left_out:
                continue
            digest = bytes.fromhex(row.sha256)
            if digest in self._seen:
                self._skipped.append((row.path, row.source, "duplicate"))
                continue
            if self.most is not None and self._total + row.tokens > self.most:
                self.full = True
                break
            self._seen.add(digest)
            self._total += row.tokens
            numbers.append(number)
            lengths.append(row.tokens)
        self._chosen.append((rank, np.array(numbers, np.int64), np.array(lengths, np.int64)))
        self._skipped += shard.skipped

    def cut(self, limit: int) -> Cut:
        """Fill as few segments as the limit of entries, separators included, allows, all of about one size."""
        total = sum(int((lengths + 1).sum()) for _, _, lengths in self._chosen)
        size = total / max(1, -(-total // limit))
        segments: list[SegmentCut] = []
        pieces: list[tuple[int, list[tuple[int, int]]]] = []
        held = tokens = documents = at = 0
        for rank, numbers, lengths in self._chosen:
            for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
                if held and (held + length + 1 > limit or at + (length + 1) / 2 > size * (len(segments) + 1)):
                    segments.append(SegmentCut(tokens, documents, pieces))
                    pieces, held, tokens, documents = [], 0, 0, 0
                if not pieces or pieces[-1][0] != rank:
                    pieces.append((rank, []))
                ranges = pieces[-1][1]
                if ranges and ranges[-1][1] == number:
                    ranges[-1] = (ranges[-1][0], number + 1)
                else:
                    ranges.append((number, number + 1))
                held += length + 1
                at += length + 1
                tokens += length
                documents += 1
        if documents:
            segments.append(SegmentCut(tokens, documents, pieces))
        return Cut(segments, self._skipped)
