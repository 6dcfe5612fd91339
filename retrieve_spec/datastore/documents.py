"""Document tables: which documents a segment holds, as raw arrays beside its text that every reader maps.

A row is a path, a SHA-256 of the text, a length and an *origin*, the number of a (licence, source) pair. The pairs
stand in the manifest: what a source was called on the machine that built the store is no part of a segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError

HASHES, PATHS, PATH_ENDS, ORIGINS = "document_hashes", "document_paths", "document_path_ends", "document_origins"
TABLE = (HASHES, PATHS, PATH_ENDS, ORIGINS)
DIGEST = 32
"""Bytes of a content hash."""
Origin = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a store.

    Attributes
    ----------
    segment, number
        Where it stands: segment folder, and its number there.
    path
        Path relative to its source, or ``file#line`` for one of many in a file.
    licence
        Licence stated when it was added, ``""`` if none was.
    source
        What was given to build from.
    sha256
        Of its text.
    start, tokens
        Position of its first token in the segment, and its length.
    added_at
        UTC time at which its segment joined the store.
    removed
        Whether nothing is drafted from it any more.
    """

    segment: str
    number: int
    path: str
    licence: str
    source: str
    sha256: str
    start: int
    tokens: int
    added_at: str
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A document that is about to be written: path, licence, source, SHA-256 in hexadecimal, tokens."""

    path: str
    licence: str
    source: str
    sha256: str
    tokens: int


def text_hash(text: str) -> str:
    """Content hash of a text: SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def table_arrays(rows: Sequence[Row]) -> tuple[dict[str, NDArray[Any]], tuple[Origin, ...]]:
    """Arrays of a document table by name, and its origins in the order in which they first occur."""
    paths = [row.path.encode("utf-8", "backslashreplace") for row in rows]
    origins: dict[Origin, int] = {}
    numbers = [origins.setdefault((row.licence, row.source), len(origins)) for row in rows]
    arrays: dict[str, NDArray[Any]] = {
        HASHES: np.frombuffer(b"".join(bytes.fromhex(row.sha256) for row in rows), np.uint8),
        PATHS: np.frombuffer(b"".join(paths), np.uint8),
        PATH_ENDS: np.cumsum([len(path) for path in paths], dtype=np.uint64),
        ORIGINS: np.array(numbers, np.uint32),
    }
    return arrays, tuple(origins)


class DocumentTable:
    """The documents of one segment, read from its arrays as they are asked for.

    Parameters
    ----------
    segment, added_at, origins
        Of the segment's entry in the manifest.
    starts
        (d + 1,) uint32, where documents begin.
    arrays
        The arrays of `TABLE`, by name.
    removed
        Numbers of the documents that nothing is drafted from.
    """

    def __init__(
        self,
        segment: str,
        added_at: str,
        origins: Sequence[Origin],
        starts: NDArray[np.uint32],
        arrays: Mapping[str, NDArray[Any]],
        removed: Sequence[int] = (),
    ) -> None:
        self.segment, self.added_at, self.origins = segment, added_at, origins
        self._starts, self._arrays = starts, arrays
        self._removed = frozenset(removed)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def check(self) -> None:
        """Check that the arrays belong together.

        Raises
        ------
        StoreCorruptError
            When they do not.
        """
        ends, origins = self._arrays[PATH_ENDS].astype(np.int64), self._arrays[ORIGINS]
        sound = len(self._arrays[HASHES]) == DIGEST * len(self) and len(ends) == len(origins) == len(self)
        sound = sound and bool((np.diff(ends, prepend=0) >= 0).all()) and bool((origins < len(self.origins)).all())
        if not (sound and (ends[-1] if len(ends) else 0) == len(self._arrays[PATHS])):
            raise self._damaged("arrays of one length")
        for number in range(len(self)):
            self.path(number)

    def path(self, number: int) -> str:
        """Path of one document.

        Raises
        ------
        StoreCorruptError
            When the table is damaged.
        """
        try:
            ends = self._arrays[PATH_ENDS]
            start = int(ends[number - 1]) if number else 0
            return self._arrays[PATHS][start : int(ends[number])].tobytes().decode()
        except (IndexError, UnicodeDecodeError) as error:
            raise self._damaged(f"a path of document {number}") from error

    def __getitem__(self, number: int) -> Document:
        """One document.

        Raises
        ------
        StoreCorruptError
            When the table is damaged.
        """
        try:
            licence, source = self.origins[int(self._arrays[ORIGINS][number])]
            digest = self._arrays[HASHES][DIGEST * number : DIGEST * (number + 1)].tobytes().hex()
            start, end = int(self._starts[number]), int(self._starts[number + 1])
        except IndexError as error:
            raise self._damaged(f"document {number}") from error
        return Document(
            self.segment,
            number,
            self.path(number),
            licence,
            source,
            digest,
            start,
            end - start - 1,
            self.added_at,
            number in self._removed,
        )

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))

    def live(self) -> Iterator[Document]:
        """Documents that can be drafted from, in order."""
        return (self[number] for number in range(len(self)) if number not in self._removed)

    def texts(self) -> Iterator[tuple[int, str, str, str]]:
        """(number, path, source, SHA-256) of the documents that can be drafted from; quicker than one by one.

        Raises
        ------
        StoreCorruptError
            When the table is damaged.
        """
        hashes, origins = self.hashes.tobytes().hex(), self._arrays[ORIGINS].tolist()
        content, ends = self._arrays[PATHS].tobytes(), [0, *self._arrays[PATH_ENDS].tolist()]
        sources = [source for _, source in self.origins]
        for number in range(len(self)):
            if number not in self._removed:
                try:
                    path = content[ends[number] : ends[number + 1]].decode()
                    source = sources[origins[number]]
                except (IndexError, UnicodeDecodeError) as error:
                    raise self._damaged(f"document {number}") from error
                yield number, path, source, hashes[2 * DIGEST * number : 2 * DIGEST * (number + 1)]

    @cached_property
    def hashes(self) -> NDArray[np.uint8]:
        """(d, 32) uint8, content hashes, removed documents' too."""
        found = self._arrays[HASHES]
        if len(found) != DIGEST * len(self):
            raise self._damaged("a hash of every document")
        return found.reshape(-1, DIGEST)

    def _damaged(self, expected: str) -> StoreCorruptError:
        return StoreCorruptError(f"{expected} in the document table of segment {self.segment}", "none")
