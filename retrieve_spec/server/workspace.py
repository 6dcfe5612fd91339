"""Workspace: the text of open folders as a datastore that follows their changes.

`retrieve_spec.datastore.entry_filter` decides which files are indexed. Nothing is written into a workspace and nothing
leaves the machine. Stores are in the user's cache folder, in one folder for each set of opened folders (whose names are
stored there), with one store per tokenizer. The text of a file that was deleted, or became a secret, is removed from
the store's files at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import Any

from filelock import FileLock, Timeout

from retrieve_spec.config import ServeConfig, cache_dir
from retrieve_spec.datastore.edit import compact_datastore
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.datastore.watching import changes
from retrieve_spec.errors import (
    NothingToIndexError,
    ServeError,
    StoreError,
    StoreLockedError,
    TokenizerMismatchError,
    in_a_line,
)

log = logging.getLogger("retrieve_spec.server")

_FOLDERS = "workspace.json"
_WORKSPACES, _LOCK = "workspaces", "server.lock"
_EVERY_S = 10.0
"""Seconds between changes of the store, and between an error and the next attempt."""
_PATIENCE_S = 1.0
"""Seconds between checks of whether another server still writes the store."""
_END_OF_WRITE_S = 10.0
"""Seconds to wait for another process that writes a store before `forget` fails."""


class Workspace:
    """Folders, and a store of their text that a thread keeps up to date.

    Parameters
    ----------
    roots
        The folders.
    config
        Limits.
    tokenizer
        Tokenizer of the model that drafts from the store.
    attach
        Called with the open store after every change, and with None when it is gone.

    Raises
    ------
    ServeError
        A root is not a folder.

    Attributes
    ----------
    files
        Number of documents in the store.
    left_out
        Number of files left out, by reason; a folder that is skipped counts as one.
    trouble
        The error that keeps the folders from being followed at present, "" for none.
    indexed
        Set after the first attempt to read the folders.
    """

    def __init__(
        self, roots: Iterable[Path], config: ServeConfig, tokenizer: Any, attach: Callable[[Datastore | None], None]
    ) -> None:
        self.roots = [root.expanduser().resolve() for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise ServeError(
                    f"a folder at {root}", "a file" if root.exists() else "nothing there", "Give one as workspace."
                )
        self._home = memory_folder(self.roots)
        self.folder = self._home / tokenizer_fingerprint(tokenizer)[:16]
        self._config, self._tokenizer, self._attach = config, tokenizer, attach
        self.files, self.left_out, self.trouble = 0, dict[str, int](), ""
        self.indexed, self._stop, self._forgotten = threading.Event(), threading.Event(), threading.Event()
        self._store: Datastore | None = None
        self._lock = threading.Lock()
        self._due, self._next_at = True, 0.0
        self._thread = threading.Thread(target=self._run, name="retrieve-spec-workspace", daemon=True)

    def start(self) -> None:
        """Read the folders in the background, then follow changes."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; a running change is interrupted when the process ends."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def forget(self) -> None:
        """Delete the store; a running write fails, or its result is deleted when it ends.

        Nothing is indexed again until the next start.
        """
        self._forgotten.set()
        shutil.rmtree(self._home, ignore_errors=True)
        with self._lock:
            self._delete()

    def state(self) -> dict[str, Any]:
        """Return the progress of indexing, for everybody to see: it names no files."""
        forgotten = self._forgotten.is_set()
        body: dict[str, Any] = {
            "indexed": self.indexed.is_set() and not (forgotten or self.trouble),
            "files": self.files,
            "left_out": self.left_out,
            **({"forgotten": True} if forgotten else {}),
        }
        if self.trouble:
            kind = self.trouble.partition(":")[0]
            body["trouble"] = f"{kind}: it is not followed for now; the server's log says more"
        return body

    def sync(self) -> bool:
        """Bring the store up to date; return False if another server of this workspace is writing it.

        What that server has written is used for drafting. Raises the error if the store cannot be written.
        """
        with self._lock:
            if self._forgotten.is_set():
                return True
            self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with FileLock(self._home / _LOCK, timeout=0):
                    self._synchronise()
            except (StoreLockedError, Timeout):
                return False
            finally:
                if self._forgotten.is_set():
                    self._delete()
                else:
                    self._show()
            return True

    def _run(self) -> None:
        while not (self._stop.is_set() or self._forgotten.is_set()):
            try:
                self._watch()
            except Exception as error:
                self._bring_up_to_date()  # finds changes between two watchers
                self._note(error)
                self._stop.wait(_EVERY_S)
                self._due = True

    def _watch(self) -> None:
        """Follow changes until the end; once the folders are watched, one scan finds what changed before."""
        for changed in changes(self.roots, self._stop):
            if self._stop.is_set() or self._forgotten.is_set():
                return
            self._due |= bool(changed)
            if self._due and monotonic() >= self._next_at:
                self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        try:
            self._due = not self.sync()
            self.trouble = ""
        except Exception as error:
            self._due = False  # until something changes
            self._note(error)
        self._next_at = monotonic() + (_PATIENCE_S if self._due else _EVERY_S)
        self.indexed.set()

    def _note(self, error: Exception) -> None:
        """Keep an error, and log it once however often it occurs."""
        trouble = in_a_line(error)
        if trouble != self.trouble and not self._forgotten.is_set():
            log.error("the workspace is not followed for now: %s", trouble)
        self.trouble = trouble

    def _synchronise(self) -> None:
        roots = {str(root) for root in self.roots}
        before = self._opened()
        if before is None or not {source for source, _ in _texts(before)} <= roots:
            # Interrupted, damaged or of an older release; there is no other writer.
            shutil.rmtree(self.folder, ignore_errors=True)
            before = None
        # So that it can be found when one of the folders is to be forgotten.
        (self._home / _FOLDERS).write_text(json.dumps({"folders": sorted(roots)}), "utf-8")
        try:
            report = sync_datastore(
                self.folder,
                self.roots,
                self._tokenizer,
                licences=self._config.workspace_licences,
                most_bytes=self._config.workspace_bytes,
                workers=1,
            )
            self.left_out = report.skipped_by_reason
        except NothingToIndexError as nothing:  # not yet; the folder is watched all the same
            self.left_out = nothing.left_out
        after = self._opened()
        if after is None or not after.manifest.documents:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif after is not before and _texts(before) - _texts(after):
            # Else text that was deleted, or became secret, stays in the files.
            compact_datastore(self.folder, workers=1)

    def _opened(self) -> Datastore | None:
        """Return the current store, None if there is none; it is opened again if it has changed."""
        try:
            if self._store is None or self._store.manifest != read_manifest(self.folder):
                return open_datastore(self.folder, tokenizer=self._tokenizer)
        except (StoreError, TokenizerMismatchError):
            return None
        return self._store

    def _show(self) -> None:
        """Draft from the current store."""
        store = self._opened()
        if store is not self._store:
            self._store = store
            self.files = 0 if store is None else store.manifest.documents
            self._attach(store)

    def _delete(self) -> None:
        self._store, self.files = None, 0
        try:
            self._attach(None)
        finally:
            shutil.rmtree(self._home, ignore_errors=True)


def _texts(store: Datastore | None) -> set[tuple[str, str]]:
    """Return folder and path of every document."""
    return set() if store is None else {(document.source, document.path) for document in store.documents()}


def memory_folder(roots: Iterable[Path]) -> Path:
    """Return the folder of a workspace's stores: in the user's cache folder, one per set of folders."""
    names = sorted(str(root.expanduser().resolve()) for root in roots)
    key = hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_dir() / _WORKSPACES / key[:24]


def kept_workspaces() -> dict[Path, list[Path]]:
    """Return stores on disk and their folders; none for a folder that cannot be read."""
    kept: dict[Path, list[Path]] = {}
    for home in sorted((cache_dir() / _WORKSPACES).glob("*")):
        if home.is_dir():
            try:
                kept[home] = [Path(folder) for folder in json.loads((home / _FOLDERS).read_text("utf-8"))["folders"]]
            except (OSError, ValueError, KeyError, TypeError):
                kept[home] = []
    return kept


def forget_workspace(folders: Iterable[Path]) -> list[list[Path]]:
    """Delete every store on disk with text of some folders, or of folders inside or above them.

    A store with unknown folders may have such text, so it is deleted, too. Other folders of these stores are indexed
    again when they are opened next. Returns the folders of every deleted workspace.

    Raises
    ------
    StoreLockedError
        Another process is writing one of them and does not finish soon; the stores before it are deleted.
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
    """Delete a store, while no process writes it."""
    gone = home.with_name(f"{home.name}.{secrets.token_hex(4)}.gone")
    try:
        with FileLock(home / _LOCK, timeout=_END_OF_WRITE_S):
            os.rename(home, gone)  # atomically: processes that wait for the lock start again
            shutil.rmtree(gone)
    except Timeout as error:
        expected = f"to forget {', '.join(map(str, folders))}"
        remedy = "End the server that has it open, or wait until it has written, and try again."
        raise StoreLockedError(expected, "another process is writing what it knows of it", remedy) from error
