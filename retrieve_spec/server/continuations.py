"""Continuations: what followed the text left of a cursor when it was written before, by characters.

A cursor stands anywhere in a token: after ``ret`` the model first has to write ``urn``, a token that no tokenised file
has at that place. Characters know no such borders, so the beginning of a draft is looked up in text.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

MAX_KEY = 48
MIN_KEY = 3
CONTINUATION_CHARS = 320
_WORD = re.compile(r"(?<![A-Za-z0-9_])[A-Za-z0-9_]")
_SEPARATOR = "\x00"
_LOOKED_AT = 1000
SEGMENT_CHARS = 500_000
"""Characters of the files that are indexed together: one that changes costs its group and not the whole."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Text that followed an earlier occurrence of the characters left of the cursor.

    Attributes
    ----------
    text
        What followed.
    matched
        How many characters left of the cursor agreed.
    """

    text: str
    matched: int


class TextIndex:
    """All word starts of some texts, the least recent first, sorted by what stands there."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._blob = _SEPARATOR.join(texts)
        self._ends = list(accumulate(len(text) + 1 for text in texts))
        self._starts = sorted_word_starts(self._blob)

    def __len__(self) -> int:
        return len(self._blob)

    def occurrences(self, piece: str, limit: int) -> list[tuple[int, int]]:
        """(number of the text, position in it) of places where a piece with a word in it stands."""
        word = _WORD.search(piece)
        if word is None:
            return []
        key, lead = piece[word.start() :], word.start()
        found: list[tuple[int, int]] = []
        for position in self._from(key, _LOOKED_AT):
            begin = position - lead
            if begin >= 0 and self._blob.startswith(piece, begin):
                number = bisect_right(self._ends, begin)
                found.append((number, begin - (self._ends[number - 1] if number else 0)))
                if len(found) == limit:
                    break
        return found

    def _from(self, key: str, most: int) -> Iterator[int]:
        """Word starts where the beginning of a key stands, a bounded number of them."""
        head, blob = key[:MAX_KEY], self._blob
        at = bisect_left(self._starts, head, key=lambda p: blob[p : p + MAX_KEY])
        for position in self._starts[at : at + most]:
            if not blob.startswith(head, position):
                return
            yield position

    def find(self, left: str, starts: Sequence[int], limit: int) -> list[Continuation]:
        """Continuations of the longest match of the end of ``left``; ``starts`` are its word starts, first first."""
        # Where a key stands, every shorter one does: the longest is found by halving, not one by one.
        found: list[Continuation] = []
        low, high = 0, len(starts)
        while low < high:
            middle = (low + high) // 2
            hits = list(self._lookup(left[starts[middle] :], limit))
            if hits:
                found, high = hits, middle
            else:
                low = middle + 1
        return found

    def _lookup(self, key: str, limit: int) -> Iterator[Continuation]:
        blob, seen = self._blob, set[str]()
        for position in self._from(key, 4 * limit):
            text = _piece(blob, position + len(key)) if blob.startswith(key, position) else ""
            if text and text not in seen:
                seen.add(text)
                yield Continuation(text, len(key))
            if len(seen) >= limit:
                return


def sorted_word_starts(text: str) -> array[int]:
    """Positions where words begin, by the `MAX_KEY` characters that stand there; among equals the last one first.

    Sorting is numpy's, which leaves other threads (the model's) running; a list of positions would take ten times the
    memory.
    """
    units = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    letters = np.zeros(128, bool)
    letters[[ord(c) for c in "_0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]] = True
    word = letters[np.minimum(units, 127)]
    before = np.concatenate(([False], word[:-1]))
    starts = np.flatnonzero(word & ~before)[::-1].astype(np.int32)
    padded = np.concatenate((units, np.zeros(MAX_KEY, np.uint32)))
    keys = np.lib.stride_tricks.sliding_window_view(padded, MAX_KEY)[starts].view(f"U{MAX_KEY}")[:, 0]
    return array("i", starts[np.argsort(keys, kind="stable")].tobytes())


def _piece(text: str, begin: int) -> str:
    """What follows a position, to the end of a line or of the file."""
    piece = text[begin : begin + CONTINUATION_CHARS]
    end = piece.find(_SEPARATOR)
    if end >= 0:
        return piece[:end]
    if len(piece) == CONTINUATION_CHARS:
        cut = piece.rfind("\n")
        return piece[: cut + 1] if cut > 0 else piece
    return piece


def key_starts(left: str) -> list[int]:
    """Where the characters left of a cursor may be looked up from: word starts, the longest match first."""
    window = max(0, len(left) - 2 * MAX_KEY)
    starts = [window + m.start() for m in _WORD.finditer(left[window:])]
    return [start for start in starts if MIN_KEY <= len(left) - start <= 2 * MAX_KEY]


def scan_texts(left: str, texts: Sequence[str], starts: Sequence[int], limit: int) -> list[Continuation]:
    """Continuations found by plain search in a few short texts, most relevant first; longest match wins.

    A bounded number of places is looked at, so that a text which repeats itself (``AAAA…``) holds nobody up.
    """
    places = _LOOKED_AT
    for start in starts:
        key = left[start:]
        found: dict[str, Continuation] = {}
        for text in texts:
            at = text.rfind(key)
            while at >= 0 and len(found) < limit and places:
                places -= 1
                piece = _piece(text, at + len(key))
                if piece and (at == 0 or not (text[at - 1].isalnum() or text[at - 1] == "_")):
                    found.setdefault(piece, Continuation(piece, len(key)))
                at = text.rfind(key, 0, at + len(key) - 1) if at > 0 else -1
        if found:
            return list(found.values())
    return []


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    order: tuple[Path, ...]
    paths: frozenset[Path]
    index: TextIndex


class FileIndex:
    """What stands in some files; it never changes, so that other threads go on reading it: changes make another one."""

    def __init__(self, segments: tuple[_Segment, ...] = ()) -> None:
        self._segments = segments

    def with_files(self, texts: Mapping[Path, str]) -> FileIndex:
        """The same and some files more."""
        return FileIndex((*self._segments, *_segments(texts)))

    def updated(self, changed: Set[Path], texts: Mapping[Path, str]) -> FileIndex:
        """The index with the texts that some changed files have now; those that have none are gone.

        Small groups are joined, so that many changes leave few groups.
        """
        touched = [s for s in self._segments if s.paths & changed or len(s.index) < SEGMENT_CHARS // 2]
        kept = [segment for segment in self._segments if segment not in touched]
        paths = {path: None for segment in touched for path in segment.order} | dict.fromkeys(sorted(changed))
        return FileIndex((*kept, *_segments({path: texts[path] for path in paths if path in texts})))

    def find(self, left: str, limit: int) -> list[Continuation]:
        """What followed the text left of a cursor, longest match first."""
        starts = key_starts(left)
        found: dict[str, Continuation] = {}
        best: list[Continuation] = []
        for segment in self._segments:
            if len(best) == limit:  # of the other segments only longer matches count
                starts = [start for start in starts if len(left) - start > best[-1].matched]
            for hit in segment.index.find(left, starts, limit):
                if hit.text not in found or found[hit.text].matched < hit.matched:
                    found[hit.text] = hit
            best = sorted(found.values(), key=lambda hit: -hit.matched)[:limit]
        return best

    def occurrences(self, piece: str, limit: int) -> Iterator[tuple[Path, int]]:
        """Files and positions in them where a piece with a word in it stands."""
        left = limit
        for segment in self._segments:
            for number, at in segment.index.occurrences(piece, left):
                left -= 1
                yield segment.order[number], at
            if left <= 0:
                return


def _segments(texts: Mapping[Path, str]) -> list[_Segment]:
    segments: list[_Segment] = []
    group: dict[Path, str] = {}
    size = 0
    for path, text in texts.items():
        group[path] = text
        size += len(text)
        if size >= SEGMENT_CHARS:
            segments.append(_segment(group))
            group, size = {}, 0
    if group:
        segments.append(_segment(group))
    return segments


def _segment(group: Mapping[Path, str]) -> _Segment:
    return _Segment(tuple(group), frozenset(group), TextIndex(list(group.values())))


def files_below(folders: Set[Path], files: Iterable[Path]) -> set[Path]:
    """Those of some files that lie in some folders, or would."""
    names = set(map(str, folders))
    inside: dict[str, bool] = {}

    def leads(folder: str) -> bool:
        if folder not in inside:
            above = os.path.dirname(folder)
            inside[folder] = folder in names or (above != folder and leads(above))
        return inside[folder]

    return {file for file in files if leads(os.path.dirname(str(file)))}
