"""The catalogue: an SQLite database of a store's documents that a person can open, made from the segments.

It is a view and never the truth: nothing that drafts reads it, and it can be deleted at any time. `write_catalog` makes
it, or brings one up to date by the segments that have changed since.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.files import FileEntry, check_content
from retrieve_spec.datastore.manifest import CATALOG, SKIPPED, SegmentEntry
from retrieve_spec.datastore.segment import Document
from retrieve_spec.datastore.sources import readable
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import BuildError, StoreError

_COLUMNS = {
    "id": int,
    "segment": str,
    "number": int,
    "path": str,
    "licence": str,
    "source": str,
    "sha256": str,
    "start": int,
    "tokens": int,
    "added_at": str,
    "removed": int,
}
_WRITTEN = tuple(name for name in _COLUMNS if name != "id")
_TABLES = {"documents", "skipped", "store", "segments"}
_NOT_NULL = {"segment", "number", "path", "start", "tokens", "removed"}


def write_catalog(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Make the catalogue of a datastore, or bring it up to date.

    Parameters
    ----------
    path
        Folder of the store.
    out
        Where the database is to be; ``catalog.sqlite`` in the store by default.

    Returns
    -------
    Path
        The database: table `documents` with full-text search over paths, table `skipped` of what recent changes left
        out, and table `store`.

    Raises
    ------
    StoreError
        As `open_datastore`; a store that cannot be written needs `out`.
    BuildError
        When the database cannot be written; nothing is left of it then. When `out` is a file that is no catalogue,
        which stays as it is.
    """
    store = open_datastore(path)
    target = Path(out) if out is not None else store.path / CATALOG
    if out is not None and target.exists() and not _is_catalog(target):
        raise BuildError(f"a catalogue or nothing at {target}", "another file", "Give a place where no file is yet.")
    try:
        try:
            _update(store, target)
        except sqlite3.DatabaseError:  # of another format, or damaged: it is a view
            _discard(target)
            _update(store, target)
    except StoreError:  # of the store itself
        raise
    except (sqlite3.DatabaseError, OSError) as error:
        with suppress(OSError):
            _discard(target)
        remedy = "Check permissions and free space, or give another place with --out."
        raise BuildError(f"to write {target}", str(error), remedy) from error
    return target


def _is_catalog(target: Path) -> bool:
    """Whether a file is a database with a catalogue's tables, or an empty file."""
    if target.is_file() and not target.stat().st_size:
        return True
    try:
        with closing(sqlite3.connect(f"{target.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.DatabaseError:  # no database, or a folder
        return False
    return tables >= _TABLES


def _discard(target: Path) -> None:
    """Delete a database and what SQLite keeps beside it."""
    for name in (target.name, f"{target.name}-journal", f"{target.name}-wal", f"{target.name}-shm"):
        target.with_name(name).unlink(missing_ok=True)


def _update(store: Datastore, target: Path) -> None:
    from sqlite_utils import Database  # takes longer to import than a change of a store to make

    with closing(Database(sqlite3.connect(target))) as database:
        states = database.table("segments")
        if not states.exists():
            _create(database)
        with database.conn:  # one transaction: a kill leaves the old view
            known = dict(database.conn.execute("select name, state from segments").fetchall())
            wanted = {entry.name: _state(entry) for entry in store.manifest.segments}
            for name in (name for name, state in known.items() if wanted.get(name) != state):
                database.conn.execute("delete from documents where segment = ?", (name,))
                database.conn.execute("delete from segments where name = ?", (name,))
            for segment in store.segments:
                if known.get(segment.name) != wanted[segment.name]:
                    rows = map(_row, segment.documents)
                    marks = ",".join("?" * len(_WRITTEN))
                    database.conn.executemany(f"insert into documents ({', '.join(_WRITTEN)}) values ({marks})", rows)
                    database.conn.execute("insert into segments values (?, ?)", (segment.name, wanted[segment.name]))
            database.conn.execute("delete from skipped")
            database.conn.executemany("insert into skipped values (?, ?, ?, ?)", _skipped(store))
            database.conn.execute("delete from store")
            manifest = store.manifest
            database.conn.execute("insert into store values (?, ?)", (manifest.generation, manifest.content))


def _create(database: Any) -> None:
    documents = database.table("documents")
    documents.create(_COLUMNS, pk="id", not_null=_NOT_NULL)
    documents.create_index(["segment", "number"], unique=True)
    documents.create_index(["sha256"])
    documents.enable_fts(["path"], create_triggers=True)
    database.table("skipped").create({"generation": int, "path": str, "source": str, "reason": str})
    database.table("store").create({"generation": int, "content": str})
    database.table("segments").create({"name": str, "state": str}, pk="name")


def _state(entry: SegmentEntry) -> str:
    """What of a segment its rows depend on and its name does not say."""
    return f"{entry.added_at} {sorted(entry.tombstones)} {entry.origins}"


def _row(document: Document) -> tuple[Any, ...]:
    return tuple(_cell(getattr(document, name)) for name in _WRITTEN)


def _cell(value: Any) -> Any:
    return readable(value) if isinstance(value, str) else int(value)


def _skipped(store: Datastore) -> Iterator[tuple[int, str, str, str]]:
    """(generation, path, source, reason) of what the changes of the history left out."""
    for event in store.manifest.history:
        if "listed" in event:
            path = store.path / SKIPPED / event["listed"]["name"]
            check_content(path, FileEntry(event["listed"]["bytes"], event["listed"]["sha256"]))
            for row in json.loads(path.read_bytes()):
                yield (event["generation"], *map(readable, row))
