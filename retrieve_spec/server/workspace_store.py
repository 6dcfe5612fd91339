"""Workspace store: a datastore on disk that follows a workspace's text, so that all of it can be drafted from.

Stores lie in the user's cache folder: one folder for each set of opened folders, which are named in it, and in that one
store for each tokenizer. What may no longer be known, because it was deleted or became secret, is taken out of the
store's files at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from filelock import FileLock, Timeout

from retrieve_spec.config import cache_dir
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.segment import text_hash
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import StoreError, StoreLockedError, TokenizerMismatchError
from retrieve_spec.server.workspace import Workspace

log = logging.getLogger("retrieve_spec.server")

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


def prepare_store(tokenizer: Any, prepare: Callable[[Datastore], object]) -> None:
    """Build a small store, and let somebody prepare to draft from it.

    So the kernels of a first start, six seconds of a core, are compiled before requests could have to wait beside that.
    """
    with tempfile.TemporaryDirectory() as name:
        text, store = Path(name, "text.py"), Path(name, "store")
        text.write_text("def increased(value):\n    return value + 1\n" * 9, "utf-8")
        build_datastore(store, _sources([str(text)]), tokenizer, workers=1)
        prepare(open_datastore(store, tokenizer=tokenizer))


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
