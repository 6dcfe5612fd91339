"""Workspace: the text of opened folders, followed when it changes.

What may be remembered is decided by `retrieve_spec.datastore.entry_filter`. Nothing is written into a workspace and
nothing leaves the machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieve_spec.config import ServeConfig
from retrieve_spec.datastore.entry_filter import EntryFilter
from retrieve_spec.datastore.git_rules import Reason, list_folder
from retrieve_spec.datastore.licences import is_licence_file
from retrieve_spec.datastore.sync import changes
from retrieve_spec.errors import ServeError

if TYPE_CHECKING:
    from retrieve_spec.server.workspace_store import WorkspaceStore

log = logging.getLogger("retrieve_spec.server")

_RULES = (".gitignore", ".ignore", "exclude")
"""Files that say what counts."""
_FULL = 0.99
"""Share of the bound of text from which on no smaller file is looked for that would fit."""
_TOO_MANY, _TOO_MUCH = "beyond the bound of files", "beyond the bound of text"
_PAUSE_S = 1.0
"""Seconds between an error and the next trial, at first; twice as many after each that fails."""
_LONGEST_PAUSE_S = 60.0


class Workspace:
    """The text of one or more folders, read in the background and kept current.

    Raises
    ------
    ServeError
        A root is not a folder.

    Attributes
    ----------
    texts
        What is remembered, by path, what changed last at the end.
    left_out
        How many files the last scan left out, by reason; a folder that is passed over counts as one.
    read
        How many files the scan under way, or the last one, has looked at, and of how many.
    version
        Another number whenever a file appeared, went or changed.
    trouble
        What keeps the workspace from being followed, "" while all is well.
    follower
        Told of every change, if there is one.
    """

    def __init__(self, roots: Iterable[Path], config: ServeConfig) -> None:
        self.roots = [root.expanduser().resolve() for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise ServeError(
                    f"a folder at {root}", "a file" if root.exists() else "nothing there", "Give one as workspace."
                )
        self.config = config
        self.texts: dict[Path, str] = {}
        self.chars = 0
        self.left_out: Counter[str] = Counter()
        self.read = 0, 0
        self.version = 0
        self.trouble = ""
        self.forgotten = False
        self.indexed = threading.Event()
        self.progress: Callable[[int, int], None] | None = None
        self.follower: WorkspaceStore | None = None
        self._pause = _PAUSE_S
        self._filter = EntryFilter(
            self.roots, max_bytes=config.workspace_file_bytes, licences=config.workspace_licences
        )
        self._stop = threading.Event()
        self._lock, self._turn = threading.Lock(), threading.RLock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Read in the background, then follow changes."""
        self._thread = threading.Thread(target=self._run, name="retrieve-spec-workspace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the background threads."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self.follower is not None:
            self.follower.close()

    def scan(self) -> None:
        """Read every file that counts, those that changed last first; what is left out is said."""
        with self._turn:
            found: list[tuple[int, Path]] = []
            left_out: Counter[str] = Counter()
            for name, verdict in self._filter.entries():
                if isinstance(verdict, Reason):
                    left_out[verdict.value] += 1
                else:
                    found.append((-verdict.st_mtime_ns, Path(name)))
            texts: dict[Path, str] = {}
            total = 0
            for done, (_, path) in enumerate(sorted(found)):
                if self._stop.is_set() or self.forgotten:
                    return
                if len(texts) >= self.config.workspace_files:
                    left_out[_TOO_MANY] += len(found) - done
                    break
                text = self._filter.read(path)
                if isinstance(text, Reason):
                    left_out[text.value] += 1
                elif total + len(text) > self.config.workspace_chars:
                    left_out[_TOO_MUCH] += 1
                    if total > _FULL * self.config.workspace_chars:
                        left_out[_TOO_MUCH] += len(found) - done - 1
                        break
                else:
                    texts[path] = text
                    total += len(text)
                self.read = done + 1, len(found)
                if self.progress is not None and done % 100 == 0:
                    self.progress(done, len(texts))
            with self._lock:
                if self.forgotten:
                    return
                self.texts, self.chars, self.left_out = dict(reversed(texts.items())), total, left_out
                self.version += 1
            self.indexed.set()
            if left_out:
                reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
                log.info("workspace: %d files are drafted from; left out: %s", len(texts), reasons)
            self._changed()

    def update(self, paths: Iterable[Path]) -> bool:
        """Read files again after they changed, appeared or went; whether anything did change.

        A folder stands for all that is in it, or was.
        """
        with self._turn:
            if self.forgotten:
                return False
            given = set(paths)
            if any(path.name in _RULES or (self._filter.rule and is_licence_file(path.name)) for path in given):
                self.scan()
                return True
            folders = tuple(f"{path}{os.sep}" for path in given if path not in self.texts and not path.is_file())
            looked_at = given | {path for path in list(self.texts) if str(path).startswith(folders)}
            for path in given:
                if path.is_dir() and not path.is_symlink():
                    looked_at |= set(list_folder(path))
            changed: dict[Path, str] = {}
            for path, verdict in self._filter.verdicts(looked_at).items():
                read = verdict if isinstance(verdict, Reason) else self._filter.read(path)
                if read is Reason.CHANGING:
                    continue  # the next notice of it comes
                text = "" if isinstance(read, Reason) else read
                if text != self.texts.get(path, ""):
                    changed[path] = text
            if changed:
                self._keep(changed)
                self._changed()
            return bool(changed)

    def _keep(self, changed: Mapping[Path, str]) -> None:
        """Remember texts in place of older ones, "" forgets those; the oldest others go to make room."""
        config = self.config
        with self._lock:
            for path in changed:
                self.chars -= len(self.texts.pop(path, ""))
            for path, text in changed.items():
                if text and not self.forgotten and len(text) <= config.workspace_chars:
                    self.texts[path] = text
                    self.chars += len(text)
            while self.chars > config.workspace_chars or len(self.texts) > config.workspace_files:
                self.chars -= len(self.texts.pop(next(iter(self.texts))))
                self.left_out[_TOO_MUCH] += 1
            self.version += 1

    def forget(self) -> None:
        """Drop everything remembered, a scan under way included; nothing is remembered again until the next start."""
        with self._lock:
            self.forgotten = True
            self.texts, self.chars = {}, 0
            self.version += 1
            self.left_out = Counter()
        self.indexed.set()
        if self.follower is not None:
            self.follower.forget()

    def state(self) -> dict[str, Any]:
        """How far it is read and followed, for everybody to see: nothing in it names files."""
        indexed = self.indexed.is_set()
        body: dict[str, Any] = {
            "indexed": indexed and not (self.forgotten or self.trouble),
            "files": len(self.texts),
            **({} if indexed else {"read": self.read[0], "of": self.read[1]}),
            "left_out": dict(self.left_out),
            **({"forgotten": True} if self.forgotten else {}),
        }
        if self.trouble:
            kind = self.trouble.partition(":")[0]
            body["trouble"] = f"{kind}: it is not followed for now; the server's log says more"
        return body

    def lines(self, piece: str, limit: int) -> list[tuple[Path, int, str]]:
        """Files and lines where a piece of a line stands: path, line number from 1, the whole line."""
        found: list[tuple[Path, int, str]] = []
        for path, text in list(self.texts.items()):
            at = text.find(piece)
            while at >= 0 and len(found) < limit:
                end = text.find("\n", at)
                line = text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]
                found.append((path, text.count("\n", 0, at) + 1, line))
                at = text.find(piece, at + len(piece))
        return found

    def _changed(self) -> None:
        if self.follower is not None and not self._stop.is_set():
            self.follower.changed()

    def _run(self) -> None:
        while not (self._stop.is_set() or self.forgotten):
            try:
                self._watch()
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"
                if trouble != self.trouble:  # said once however often it happens
                    log.error("the workspace is not followed for now", exc_info=error)
                self.trouble = trouble
                with contextlib.suppress(Exception):  # what changes between two watchers is found so
                    if not self._stop.is_set():
                        self.scan()
                self.indexed.set()
                self._stop.wait(self._pause)
                self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _watch(self) -> None:
        """Follow changes until the end; a look at everything waits for the watcher, since nobody looks between two."""
        looked = False
        for changed in changes(self.roots, self._stop):
            if self._stop.is_set() or self.forgotten:
                return
            if not looked:
                self.scan()
                looked, self.trouble, self._pause = True, "", _PAUSE_S
            elif changed:
                self.update(changed)
