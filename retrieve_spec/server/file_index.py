"""File index: texts of files, indexed in groups, so that a file that changes costs its group and not the whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from retrieve_spec.server.continuations import Continuation, TextIndex, key_starts

SEGMENT_CHARS = 500_000


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
