"""Cut of a build: which documents make which segment, by their order and length alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.shards import Shard


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


class _Hashes:
    """A set of content hashes that takes 14 bytes for each: rows of those whose first two bytes are the same."""

    def __init__(self) -> None:
        self._rows: dict[bytes, bytearray] = {}

    def __contains__(self, digest: str) -> bool:
        first, rest = self._split(digest)
        row = self._rows.get(first, b"")
        at = row.find(rest)
        while at >= 0 and at % len(rest):  # across two of them
            at = row.find(rest, at + 1)
        return at >= 0

    def add(self, digest: str) -> None:
        """Add one that is not in it."""
        first, rest = self._split(digest)
        self._rows.setdefault(first, bytearray()).extend(rest)

    def _split(self, digest: str) -> tuple[bytes, bytes]:
        key = bytes.fromhex(digest[: 2 * _KEY])
        return key[:2], key[2:]


class Choice:
    """Goes through shards in order and chooses documents: each text once, up to a limit of tokens.

    It is the one step that knows of all documents, and holds about 25 bytes of each.
    """

    def __init__(self, known: Iterable[str], most: int | None) -> None:
        self.most, self.full = most, False
        self._known: Set[str] = known if isinstance(known, Set) else frozenset()
        self._seen = _Hashes()
        for digest in () if known is self._known else known:
            self._seen.add(digest)
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
            if row.sha256 in self._known or row.sha256 in self._seen:
                self._skipped.append((row.path, row.source, "duplicate"))
                continue
            if self.most is not None and self._total + row.tokens > self.most:
                self.full = True
                break
            self._seen.add(row.sha256)
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
