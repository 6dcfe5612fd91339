"""Workspace: the text of opened folders, followed when it changes, and the datastore on disk that follows it.

What may be remembered is decided by `retrieve_spec.datastore.entry_filter`. Nothing is written into a workspace and
nothing leaves the machine. Stores lie in the user's cache folder: one folder for each set of opened folders, which are
named in it, and in that one store for each tokenizer. What may no longer be known, because it was deleted or became
secret, is taken out of the store's files at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from filelock import FileLock, Timeout

from retrieve_spec.config import ServeConfig, cache_dir
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.entry_filter import EntryFilter
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.datastore.git_rules import Reason, list_folder
from retrieve_spec.datastore.licences import is_licence_file
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.segment import text_hash
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.datastore.sync import changes
from retrieve_spec.errors import ServeError, StoreError, StoreLockedError, TokenizerMismatchError

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
        self.trouble = ""
        self.forgotten = False
        self.indexed = threading.Event()
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
            with self._lock:
                if self.forgotten:
                    return
                self.texts, self.chars, self.left_out = dict(reversed(texts.items())), total, left_out
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

    def forget(self) -> None:
        """Drop everything remembered, a scan under way included; nothing is remembered again until the next start."""
        with self._lock:
            self.forgotten = True
            self.texts, self.chars = {}, 0
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


WORKSPACE_LICENCE = "workspace"
_MAX_SEGMENTS = 8
_NAMES_PER_CHANGE = 500
_FOLDERS = "workspace.json"
_WORKSPACES, _LOCK = "workspaces", "server.lock"
_EVERY_S = 10.0
"""Seconds between two changes at least."""
_PATIENCE_S = 1.0
"""Seconds after which it is looked again whether another server still writes."""
_END_OF_WRITE_S = 10.0
"""Seconds that a write of another process may take before what it writes cannot be forgotten."""


class WorkspaceStore:
    """The store of one workspace, in the user's cache folder, written in a thread of its own.

    Parameters
    ----------
    workspace
        Whose text it holds.
    tokenizer
        Tokenizer of the model that drafts from it.
    attach
        Called with the open store after every change, and with None when it is gone.
    """

    def __init__(self, workspace: Workspace, tokenizer: Any, attach: Callable[[Datastore | None], None]) -> None:
        self._home = memory_folder(workspace.roots)
        self.folder = self._home / tokenizer_fingerprint(tokenizer)[:16]
        self._workspace, self._tokenizer, self._attach = workspace, tokenizer, attach
        self._synced_at = -_EVERY_S
        self._lock = threading.Lock()
        self._refused: dict[str, str] = {}
        self._store: Datastore | None = None
        self._news, self._stop, self._forgotten = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def changed(self) -> None:
        """Have the store brought up to date; returns at once."""
        self._news.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="retrieve-spec-store", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; a change under way is interrupted by the end of the process."""
        self._stop.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def forget(self) -> None:
        """Delete the store, for good: a write under way fails for want of its files, or is deleted when it ends."""
        self._forgotten.set()
        shutil.rmtree(self._home, ignore_errors=True)
        with self._lock:
            self._delete()

    def sync(self) -> bool:
        """Add, replace and remove documents until the store holds what the workspace holds; whether that was done.

        Raises what keeps it from being written.
        """
        with self._lock:
            try:
                if self._forgotten.is_set():
                    return True
                self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
                with FileLock(self._home / _LOCK, timeout=0):
                    self._attach(self._synchronised())
            except (StoreLockedError, Timeout):
                self._attach(self._open())  # another server of this workspace writes; read what it has written
                return False
            finally:
                self._synced_at = monotonic()
                if self._forgotten.is_set() or not self._workspace.texts:
                    self._delete()
            return True

    def _run(self) -> None:
        while True:
            self._news.wait()
            if self._stop.wait(max(0.0, self._synced_at + _EVERY_S - monotonic())):
                return
            self._news.clear()
            try:
                written = self.sync()
            except Exception:
                written = True
                if not self._forgotten.is_set():
                    log.exception("the workspace's store could not be written; drafting goes on without it")
            if not written:
                self._stop.wait(_PATIENCE_S)
                self._news.set()

    def _delete(self) -> None:
        self._store = None
        try:
            self._attach(None)
        finally:
            shutil.rmtree(self._home, ignore_errors=True)

    def _open(self) -> Datastore | None:
        """The store as it is, None where there is none that can be used; opened where it is not what it was."""
        try:
            if self._store is None or self._store.manifest != read_manifest(self.folder):
                self._store = open_datastore(self.folder, tokenizer=self._tokenizer)
        except (StoreError, TokenizerMismatchError):
            self._store = None
        return self._store

    def _synchronised(self) -> Datastore | None:
        wanted = {str(path): text_hash(text) for path, text in self._workspace.texts.items()}
        store = self._open()
        if store is None:
            shutil.rmtree(self.folder, ignore_errors=True)  # interrupted or damaged, and nobody else writes
            self.folder.mkdir(mode=0o700)
            # So that it can be found when one of the folders is to be forgotten.
            roots = [str(root) for root in self._workspace.roots]
            (self._home / _FOLDERS).write_text(json.dumps({"folders": roots}), "utf-8")
            if sources := _sources(wanted):
                build_datastore(self.folder, sources, self._tokenizer, workers=1)
            return self._without(wanted, ())
        held = held_documents(store)
        gone = [path for path, sha in held.items() if wanted.get(path) != sha]
        known = {sha for path, sha in held.items() if wanted.get(path) == sha}  # the same text elsewhere is enough
        fresh = [path for path, sha in wanted.items() if sha not in known and self._refused.get(path) != sha]
        if not (gone or fresh):
            return store
        self._remove(gone)
        if sources := _sources(fresh):
            add_documents(self.folder, sources, workers=1)
        return self._without(wanted, [path for path in gone if path not in wanted])

    def _without(self, wanted: Mapping[str, str], forbidden: Collection[str]) -> Datastore | None:
        """The store, rewritten where something must not stand in its files any longer, or there are many of them.

        Files of which it holds another text than the workspace does are taken out, and not read again: a build reads
        files once more, and what stands there by then (behind a link, say) has not been let in.
        """
        store = self._open()
        held = held_documents(store) if store is not None else {}
        strange = [path for path, sha in held.items() if wanted.get(path) != sha]
        self._refused = {path: sha for path, sha in self._refused.items() if wanted.get(path) == sha}
        self._refused |= {path: wanted[path] for path in strange if path in wanted}
        if strange and len(strange) == len(held):
            shutil.rmtree(self.folder)
        elif store is not None and (strange or forbidden or len(store.segments) > _MAX_SEGMENTS):
            self._remove(strange)
            compact_datastore(self.folder)
        return self._open()

    def _remove(self, paths: Sequence[str]) -> None:
        for at in range(0, len(paths), _NAMES_PER_CHANGE):
            remove_documents(self.folder, where=_any_of(paths[at : at + _NAMES_PER_CHANGE]))


def memory_folder(roots: Iterable[Path]) -> Path:
    """Where the stores of a workspace live: the user's cache folder, one entry per set of folders."""
    names = sorted(str(root.expanduser().resolve()) for root in roots)
    key = hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_dir() / _WORKSPACES / key[:24]


def kept_workspaces() -> dict[Path, list[Path]]:
    """Where something is kept on disk, and about which folders; none where that cannot be read."""
    kept: dict[Path, list[Path]] = {}
    for home in sorted((cache_dir() / _WORKSPACES).glob("*")):
        if home.is_dir():
            try:
                kept[home] = [Path(folder) for folder in json.loads((home / _FOLDERS).read_text("utf-8"))["folders"]]
            except (OSError, ValueError, KeyError, TypeError):
                kept[home] = []
    return kept


def forget_workspace(folders: Iterable[Path]) -> list[list[Path]]:
    """Delete from disk every store that holds text of one of some folders, or of a folder in or around it.

    One whose folders are not known may hold it, and goes too. What else lay in such a store is indexed again when it is
    opened the next time. Returns, for every workspace that was deleted, its folders.

    Raises
    ------
    StoreLockedError
        When another process is writing one of them and does not end soon; those before it are deleted.
    """
    wanted = [folder.expanduser().resolve() for folder in folders]
    gone = []
    for home, held in kept_workspaces().items():
        unknown = not held or home == memory_folder(wanted)
        if unknown or any(a.is_relative_to(b) or b.is_relative_to(a) for a in held for b in wanted):
            _delete(home, held)
            gone.append(held)
    return gone


def _delete(home: Path, folders: Iterable[Path]) -> None:
    """Delete what is kept about some folders, while nobody writes to it."""
    gone = home.with_name(f"{home.name}.{secrets.token_hex(4)}.gone")
    try:
        with FileLock(home / _LOCK, timeout=_END_OF_WRITE_S):
            os.rename(home, gone)  # at once: who waits for the lock begins anew
            shutil.rmtree(gone)
    except Timeout as error:
        expected = f"to forget {', '.join(map(str, folders))}"
        remedy = "End the server that has it open, or wait until it has written, and try again."
        raise StoreLockedError(expected, "another process is writing what it knows of it", remedy) from error


def held_documents(store: Datastore) -> dict[str, str]:
    """SHA-256 of each file a store drafts from, by the path it was read from."""
    return {document.source: document.sha256 for document in store.documents()}


def _sources(paths: Iterable[str]) -> list[Source | str]:
    # one that is gone would keep the others out, and a folder by now would bring all that is in it
    return [Source(path, WORKSPACE_LICENCE) for path in paths if os.path.isfile(path) and not os.path.islink(path)]


def _any_of(paths: Sequence[str]) -> str:
    quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    return f"source in ({quoted})"
