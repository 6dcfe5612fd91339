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
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.change import WorkFolder
from retrieve_spec.datastore.entry_filter import Reason
from retrieve_spec.datastore.files import replace_file
from retrieve_spec.datastore.fingerprint import encode, load_tokenizer
from retrieve_spec.datastore.ingest import Tokenised, tokenise
from retrieve_spec.datastore.manifest import SEGMENTS, Manifest, SegmentEntry, entry_of
from retrieve_spec.datastore.segment import Row, Segment, open_segment, tombstones_of, write_segment
from retrieve_spec.datastore.sources import Source, SourceFile
from retrieve_spec.datastore.store import check_files
from retrieve_spec.errors import BuildError

SHARD_TOKENS = 1 << 21
"""Tokens of a segment that are converted to another tokenizer at once."""


def segment_shards(store: Path, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Inputs of shards that are the segments of a store, taken over as they are."""
    for entry in manifest.segments:
        yield {"store": os.path.abspath(store), "segment": asdict(entry)}


def conversion_shards(store: Path, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Inputs of shards whose documents are decoded from a store and encoded anew."""
    for entry in manifest.segments:
        starts = open_segment(store / SEGMENTS / entry.name, entry, manifest.vocabulary).document_starts
        first = 0
        for end in range(1, len(starts)):
            if end == len(starts) - 1 or int(starts[end + 1]) - int(starts[first]) > SHARD_TOKENS:
                yield {"store": os.path.abspath(store), "segment": asdict(entry), "documents": [first, end]}
                first = end


class WrittenShard:
    """A shard whose tokens an earlier stage wrote into the work folder.

    Attributes
    ----------
    rows
        All documents, in order.
    left_out
        Numbers of those that do not count.
    skipped
        ``(path, source, reason)`` of what was no document.
    """

    left_out: frozenset[int] = frozenset()

    def __init__(self, work: WorkFolder, rank: int) -> None:
        self._path = work.path / f"shard-{rank:06d}.bin"
        record = json.loads(work.path.joinpath(f"shard-{rank:06d}.json").read_bytes())
        self.rows = [Row(*row) for row in record["documents"]]
        self.skipped = [(path, source, reason) for path, source, reason in record["skipped"]]
        self._starts = np.cumsum([0, *(row.tokens + 1 for row in self.rows)], dtype=np.int64)

    def ids(self, first: int, end: int) -> NDArray[np.uint32]:
        """Token ids of the documents ``[first, end)``, each with an entry for its separator after it."""
        a, b = int(self._starts[first]), int(self._starts[end])
        found = np.fromfile(self._path, "<u4", b - a, offset=4 * a)
        if len(found) != b - a:
            raise BuildError(f"{b:,} tokens in {self._path}", "fewer", "Start the change again without --resume.")
        return found


class SegmentShard:
    """A shard that is a segment of a store, without what counts as removed there; otherwise as `WrittenShard`."""

    skipped: list[tuple[str, str, str]] = []  # noqa: RUF012 (never altered)

    def __init__(self, record: dict[str, Any], vocabulary: int) -> None:
        self.store = Path(record["store"])
        self.entry = entry_of(record["segment"])
        self._vocabulary = vocabulary
        self._checked = False

    @cached_property
    def segment(self) -> Segment:
        """The segment as its files are."""
        return open_segment(self.store / SEGMENTS / self.entry.name, self.entry, self._vocabulary)

    @cached_property
    def left_out(self) -> frozenset[int]:
        """As of a `WrittenShard`."""
        found = tombstones_of(self.store, self.entry)
        return frozenset(number for array in found.values() if array is not found["ranks"] for number in array.tolist())

    @cached_property
    def rows(self) -> list[Row]:
        """As of a `WrittenShard`; of the files only the document table is checked."""
        check_text(self.segment, self.store)
        check_files(self.store, self.entry, text=False)
        return [Row(d.path, d.licence, d.source, d.sha256, d.tokens) for d in self.segment.documents]

    def check(self) -> None:
        """Check, once, the files whose content is going to be written under new checksums."""
        if not self._checked:
            check_text(self.segment, self.store)
            check_files(self.store, self.entry)
            self._checked = True

    def ids(self, first: int, end: int) -> NDArray[np.uint32]:
        """As of a `WrittenShard`."""
        self.check()
        starts = self.segment.document_starts
        return self.segment.ids_of(self.segment.tokens[int(starts[first]) : int(starts[end])])


Shard = WrittenShard | SegmentShard


def check_text(segment: Segment, store: Path, remedy: str = "Build it again from sources.") -> None:
    """Check that a segment keeps its text.

    Raises
    ------
    BuildError
        When it keeps n-grams only.
    """
    if not len(segment.tokens):
        raise BuildError("a store that keeps its text", f"{store}, which keeps n-grams only", remedy)


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


_PIECE, _PIECES = 1 << 24, 8
"""Entries that each of several segments has at least, and segments that a text is divided into without need."""
_SMALL_SHARE = 16
"""A segment is small if so many of it would make the largest one."""
_KEY = 16
"""Bytes of a content hash that tell texts apart: among 10^12 of them two are alike with a chance of 10^-15."""


def small_size(limit: int) -> int:
    """Entries of the largest segment that is small, where one has at most `limit` of them.

    Segments that a text was divided into without need are not: joined, they would be divided again.
    """
    return min(limit, _PIECES * _PIECE) // _SMALL_SHARE


def _key(digest: str) -> bytes:
    return bytes.fromhex(digest[: 2 * _KEY])


class Choice:
    """Goes through shards in order and chooses documents: each text once, up to a limit of tokens.

    It is the one step that knows of all documents, and holds their hashes.
    """

    def __init__(self, known: Iterable[str], most: int | None) -> None:
        self.most, self.full = most, False
        self._seen = {_key(digest) for digest in known}
        self._total = 0
        self._chosen: list[tuple[int, NDArray[np.uint32], NDArray[np.uint32]]] = []  # shard, numbers, tokens
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
            if (key := _key(row.sha256)) in self._seen:
                self._skipped.append((row.path, row.source, "duplicate"))
                continue
            if self.most is not None and self._total + row.tokens > self.most:
                self.full = True
                break
            self._seen.add(key)
            self._total += row.tokens
            numbers.append(number)
            lengths.append(row.tokens)
        self._chosen.append((rank, np.array(numbers, np.uint32), np.array(lengths, np.uint32)))
        self._skipped += shard.skipped

    def cut(self, limit: int) -> Cut:
        """Divide what was chosen into segments of about one size, each of at most `limit` entries with separators.

        As few as that allows, or more, so that cores can share the indexing: a power of two up to `_PIECES`, as long as
        each has `_PIECE` entries.
        """
        total = sum(int(lengths.sum(dtype=np.int64)) + len(lengths) for _, _, lengths in self._chosen)
        shared = 1 << (min(_PIECES, max(1, total // _PIECE)).bit_length() - 1)
        size = total / max(shared, -(-total // limit))
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
        step = self.shards if chosen.most is None else 4 * self._workers
        while first < self.shards and not chosen.full:
            ranks = range(first, min(first + step, self.shards))
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
