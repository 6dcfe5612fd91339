"""Keeps a datastore on disk in step with the text of a workspace, so that all of it can be drafted from."""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from retrieve_spec.errors import RetrieveSpecError, StoreError, StoreLockedError, TokenizerMismatchError
from retrieve_spec.server.workspace import Workspace, memory_folder

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

log = logging.getLogger("retrieve_spec.server")

WORKSPACE_LICENCE = "workspace"
_MAX_SEGMENTS = 8
_NAMES_PER_CHANGE = 500


class WorkspaceStore:
    """The store of one workspace, in the user's cache folder.

    Parameters
    ----------
    workspace
        Whose text it holds.
    tokenizer
        Tokenizer of the model that drafts from it.
    attach
        Called with the open store after every change, and with None when it is gone.
    every_s
        Seconds between two changes at least; fresher text is in the workspace's own index.
    """

    def __init__(
        self,
        workspace: Workspace,
        tokenizer: Any,
        attach: Callable[[Datastore | None], None],
        *,
        every_s: float = 10.0,
    ) -> None:
        self.folder = memory_folder(workspace.roots)
        self._workspace, self._tokenizer, self._attach, self._every_s = workspace, tokenizer, attach, every_s
        self._synced_at = -every_s
        self._lock = threading.Lock()

    def follow(self, workspace: Workspace) -> bool:
        """Bring the store up to date (`Workspace.on_change`); False if that was done only a moment ago."""
        if not workspace.texts:
            self.forget()
        elif monotonic() - self._synced_at < self._every_s:
            return False
        else:
            self.sync()
        return True

    def sync(self) -> None:
        """Add, replace and remove documents until the store holds what the workspace holds."""
        with self._lock:
            try:
                self._attach(self._synchronised())
            except StoreLockedError:
                self._attach(self._open())  # another server of this workspace writes; read what it wrote
            except (RetrieveSpecError, OSError):
                log.exception("the workspace's store could not be written; drafting goes on without it")
            self._synced_at = monotonic()

    def forget(self) -> None:
        """Delete the store."""
        with self._lock:
            self._attach(None)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> Datastore | None:
        from retrieve_spec.datastore.store import open_datastore

        try:
            return open_datastore(self.folder, tokenizer=self._tokenizer)
        except (StoreError, TokenizerMismatchError):
            return None

    def _synchronised(self) -> Datastore | None:
        from retrieve_spec.datastore.build import add_documents, build_datastore
        from retrieve_spec.datastore.edit import compact_datastore, remove_documents
        from retrieve_spec.datastore.sources import Source

        wanted = {str(path): _sha256(text) for path, text in self._workspace.texts.items()}
        store = self._open()
        if store is None:
            shutil.rmtree(self.folder, ignore_errors=True)  # interrupted, damaged, or of another tokenizer
            self.folder.mkdir(parents=True, mode=0o700)
            sources: list[Source | str] = [Source(path, WORKSPACE_LICENCE) for path in wanted]
            build_datastore(self.folder, sources, self._tokenizer, workers=1)
            return self._open()
        held = held_documents(store)
        gone = [path for path, sha in held.items() if wanted.get(path) != sha]
        known = set(held.values())  # the same text elsewhere is in the store already
        fresh = [path for path, sha in wanted.items() if sha not in known]
        for at in range(0, len(gone), _NAMES_PER_CHANGE):
            remove_documents(self.folder, where=_any_of(gone[at : at + _NAMES_PER_CHANGE]))
        if fresh:
            add_documents(self.folder, [Source(path, WORKSPACE_LICENCE) for path in fresh], workers=1)
        if not (gone or fresh):
            return store
        store = self._open()
        if store is not None and len(store.segments) > _MAX_SEGMENTS:
            compact_datastore(self.folder)
            store = self._open()
        return store


def held_documents(store: Datastore) -> dict[str, str]:
    """SHA-256 of each file a store drafts from, by the path it was read from."""
    rows = store.catalog.query("select source, sha256 from documents where removed_at is null")
    return {str(source): str(sha) for source, sha in rows}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _any_of(paths: list[str]) -> str:
    quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    return f"source in ({quoted})"
