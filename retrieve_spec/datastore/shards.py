"""Shards: the pieces that a build's input is cut into, and which of their documents make which segment.

A shard is a run of files of about `SHARD_BYTES`, a part of a large file of JSON Lines, or documents of a segment that
is there already. Where shards begin depends on the list of files and their sizes alone, and the cut into segments on
the order and length of the documents.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.addresses import is_address, open_file
from retrieve_spec.datastore.change import STDIN_COPY, WorkFolder
from retrieve_spec.datastore.documents import Row
from retrieve_spec.datastore.entry_filter import is_utf16
from retrieve_spec.datastore.manifest import SEGMENTS, Manifest, entry_of
from retrieve_spec.datastore.segment import Segment, open_segment
from retrieve_spec.datastore.sources import STDIN, SourceFile
from retrieve_spec.datastore.store import check_files
from retrieve_spec.datastore.tombstones import tombstones_of
from retrieve_spec.errors import BuildError

SHARD_BYTES = 1 << 22
"""Bytes of input that make a shard; what an interrupted build reads again is less than this for each worker."""
SHARD_FILES = 1 << 13
SHARD_TOKENS = 1 << 21
"""Tokens of a segment that are converted to another tokenizer at once."""
_BLOCK = 1 << 22


def file_shards(work: WorkFolder, files: Iterable[SourceFile]) -> Iterator[dict[str, Any]]:
    """Inputs of shards of files, in order; standard input is copied, so that any worker can read it, and again."""
    group: list[SourceFile] = []
    size = 0
    for file in chain.from_iterable(_parts(_readable(work, file)) for file in files):
        if group and (size + file.size > SHARD_BYTES or len(group) == SHARD_FILES):
            yield {"files": [asdict(each) for each in group]}
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield {"files": [asdict(each) for each in group]}


def _readable(work: WorkFolder, file: SourceFile) -> SourceFile:
    if file.location != STDIN:
        return file
    copy = work.path / STDIN_COPY
    with copy.open("wb") as out:
        shutil.copyfileobj(sys.stdin.buffer, out)
        out.flush()
        os.fsync(out.fileno())
    return replace(file, location=os.path.realpath(copy), size=copy.stat().st_size)


def _parts(file: SourceFile) -> Iterator[SourceFile]:
    """A file, or the parts of a large file of JSON Lines."""
    remote = is_address(file.location)  # read where it is needed, not here
    if file.kind != "jsonl" or file.compression or file.skip or file.size <= 2 * SHARD_BYTES or remote:
        yield file
        return
    try:
        cuts = list(_line_cuts(file.location))
    except OSError:  # reading it will say so
        cuts = []
    if len(cuts) < 2:
        yield file
        return
    for (start, line), (end, _) in pairwise(cuts):
        yield replace(file, start=start, end=end, line=line, size=end - start)


def _line_cuts(path: str) -> Iterator[tuple[int, int]]:
    """(offset, lines before it) of the beginnings of parts of a file, and of its end."""
    at = lines = 0
    wanted = SHARD_BYTES
    yield 0, 0
    with open_file(path, listed=True) as file:
        while block := file.read(_BLOCK):
            if not at and is_utf16(block):  # whose lines do not end where these bytes stand
                return
            while wanted < at + len(block) and (end := block.find(b"\n", wanted - at)) >= 0:
                yield at + end + 1, lines + block.count(b"\n", 0, end + 1)
                wanted = at + end + 1 + SHARD_BYTES
            lines += block.count(b"\n")
            at += len(block)
    yield max(at, 1), lines


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
_FURTHER = 8
"""How many times the shards that were read are read at once at most, where only so many tokens are wanted."""
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

    def expected(self, taken: int, least: int) -> int:
        """How many more shards are worth reading at once, after some: without a limit of tokens all of them, else
        nine tenths of those that will be needed if they hold what others did, but at least so many.

        No more than eight times those that were read: these may hold next to nothing, as duplicates do.
        """
        if self.most is None:
            return sys.maxsize
        needed = 0.9 * (self.most - self._total) * taken / max(self._total, 1)
        return max(least, int(min(needed, _FURTHER * taken)))

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
