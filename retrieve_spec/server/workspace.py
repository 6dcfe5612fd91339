"""Keeps the text of opened folders at hand and indexed, and follows what changes.

Nothing is written into a workspace and nothing leaves the machine.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.paths import cache_dir
from retrieve_spec.server.continuations import Continuation, TextIndex, key_starts
from retrieve_spec.server.workspace_files import WorkspaceFiles, looks_secret

log = logging.getLogger("retrieve_spec.server")

_SEGMENT_CHARS = 500_000


@dataclass(frozen=True, slots=True)
class _Segment:
    order: tuple[Path, ...]
    paths: frozenset[Path]
    index: TextIndex


class Workspace:
    """The text of one or more folders, indexed in the background and kept current.

    Parameters
    ----------
    roots
        Folders.
    config
        Bounds.
    on_change
        Called after the text changed, from the indexing thread (a store follows, say); when it answers False it is
        called again a little later.

    Raises
    ------
    ServeError
        A root is not a folder.
    """

    def __init__(
        self, roots: Iterable[Path], config: ServeConfig, on_change: Callable[[Workspace], bool] | None = None
    ) -> None:
        self.roots = [root.expanduser().resolve() for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise ServeError("a folder as workspace", f"{root}", "Give an existing folder.")
        self.config = config
        self.texts: dict[Path, str] = {}
        self.indexed = threading.Event()
        self.progress: Callable[[int, int], None] | None = None
        self.on_change = on_change
        self._dirty = False
        self._segments: list[_Segment] = []
        self._files = WorkspaceFiles(self.roots, config)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, *, watch: bool = True) -> None:
        """Index in the background, then follow changes."""
        self._thread = threading.Thread(target=self._run, args=(watch,), name="retrieve-spec-workspace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the background thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    @property
    def chars(self) -> int:
        """Characters remembered."""
        return sum(map(len, self.texts.values()))

    def scan(self) -> None:
        """Read every file that counts and index it."""
        texts: dict[Path, str] = {}
        total = 0
        for done, path in enumerate(self._files.walk()):
            text = self._files.read(path)
            if self._stop.is_set() or total + len(text) > self.config.workspace_chars:
                break
            if text:
                texts[path] = text
                total += len(text)
            if self.progress is not None and done % 100 == 0:
                self.progress(done, len(texts))
        with self._lock:
            self.texts = texts
        self._segments = self._index(texts)
        self.indexed.set()
        self._changed()

    def update(self, paths: Iterable[Path]) -> bool:
        """Read files again after they changed, appeared or went; whether anything did change."""
        changed: set[Path] = set()
        for path in map(Path, paths):
            if path.name in (".gitignore", ".ignore"):
                self.scan()
                return True
            text = self._files.read(path) if self._files.counts(path) else ""
            if text != self.texts.get(path, ""):
                changed.add(path)
                with self._lock:
                    self.texts.pop(path, None)
                    if text and self.chars + len(text) <= self.config.workspace_chars:
                        self.texts[path] = text
        if changed:
            touched = {path for segment in self._segments if segment.paths & changed for path in segment.paths}
            kept = [segment for segment in self._segments if not segment.paths & changed]
            again = {path: self.texts[path] for path in touched | changed if path in self.texts}
            self._segments = kept + self._index(again)
            self._changed()
        return bool(changed)

    def put(self, path: Path, text: str) -> None:
        """Take the text of a file from an editor (saved or not), if the file counts."""
        if not self._files.counts(path, exists=False) or looks_secret(path, text):
            return
        with self._lock:
            self.texts.pop(path, None)
            self.texts[path] = text

    def forget(self) -> None:
        """Drop everything remembered."""
        with self._lock:
            self.texts = {}
        self._segments = []
        self._changed()

    def find(self, left: str, limit: int) -> list[Continuation]:
        """What followed the text left of the cursor elsewhere in the workspace, longest match first."""
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

    def lines(self, piece: str, limit: int) -> list[tuple[Path, int, str]]:
        """Files and lines where a piece of a line stands: path, line number from 1, the whole line."""
        found: list[tuple[Path, int, str]] = []
        for segment in self._segments:
            for number, at in segment.index.occurrences(piece, limit - len(found)):
                path = segment.order[number]
                text = self.texts.get(path, "")
                if text.startswith(piece, at):  # an edit may not be indexed yet
                    end = text.find("\n", at)
                    line = text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]
                    found.append((path, text.count("\n", 0, at) + 1, line))
            if len(found) >= limit:
                break
        return found

    def _index(self, texts: dict[Path, str]) -> list[_Segment]:
        segments: list[_Segment] = []
        group: dict[Path, str] = {}
        size = 0
        for path, text in texts.items():
            group[path] = text
            size += len(text)
            if size >= _SEGMENT_CHARS:
                segments.append(_Segment(tuple(group), frozenset(group), TextIndex(list(group.values()))))
                group, size = {}, 0
        if group:
            segments.append(_Segment(tuple(group), frozenset(group), TextIndex(list(group.values()))))
        return segments

    def _changed(self) -> None:
        if self.on_change is not None and not self._stop.is_set():
            self._dirty = not self.on_change(self)

    def _run(self, watch: bool) -> None:
        try:
            self.scan()
            if watch:
                self._watch()
        except Exception:
            log.exception("the workspace could not be indexed")
            self.indexed.set()

    def _watch(self) -> None:
        from watchfiles import watch

        for changes in watch(*self.roots, stop_event=self._stop, debounce=400, rust_timeout=500, yield_on_timeout=True):
            if self._stop.is_set():
                return
            if not (changes and self.update(Path(path) for _, path in changes)) and self._dirty:
                self._changed()


def memory_folder(roots: Iterable[Path]) -> Path:
    """Where the store of a workspace lives: the user's cache folder, one entry per set of folders."""
    key = hashlib.sha256("\0".join(sorted(str(root.expanduser().resolve()) for root in roots)).encode()).hexdigest()
    return cache_dir() / "workspaces" / key[:24]


def forget_workspace(roots: Iterable[Path]) -> bool:
    """Delete what is stored on disk about a workspace; whether there was anything."""
    folder = memory_folder(roots)
    if not folder.exists():
        return False
    shutil.rmtree(folder)
    return True
