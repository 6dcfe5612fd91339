"""The catalogue: an SQLite database of a store's documents that a person can open, made from the segments.

It is a view and never the truth: nothing that drafts reads it, and it can be deleted at any time.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.files import FileEntry, check_content
from retrieve_spec.datastore.manifest import CATALOG, SKIPPED
from retrieve_spec.datastore.segment import Document
from retrieve_spec.datastore.sources import readable
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import BuildError, StoreError

_COLUMNS = ("segment", "number", "path", "licence", "source", "sha256", "start", "tokens", "added_at", "removed")
_DOCUMENTS = """
create table documents (
    id integer primary key, segment text not null, number integer not null, path text not null, licence text,
    source text, sha256 text, start integer not null, tokens integer not null, added_at text, removed integer not null
);
"""
_OTHERS = """
create unique index documents_number on documents (segment, number);
create index documents_sha256 on documents (sha256);
create virtual table documents_fts using fts5 (path, content = "documents", content_rowid = "id");
insert into documents_fts (documents_fts) values ('rebuild');
create table skipped (generation integer, path text, source text, reason text);
create table store (generation integer, content text);
"""


def write_catalog(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Make the catalogue of a datastore, in place of an older one.

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
    written = target.with_name(target.name + ".tmp")
    try:
        written.unlink(missing_ok=True)
        with closing(sqlite3.connect(written)) as database, database:
            database.execute("pragma journal_mode = off")  # what is interrupted is made anew
            list_documents(database, (document for segment in store.segments for document in segment.documents))
            database.executescript(_OTHERS)
            database.executemany("insert into skipped values (?, ?, ?, ?)", _skipped(store))
            database.execute("insert into store values (?, ?)", (store.manifest.generation, store.manifest.content))
        for suffix in ("-journal", "-wal", "-shm"):
            target.with_name(target.name + suffix).unlink(missing_ok=True)
        os.replace(written, target)
    except StoreError:  # of the store itself
        raise
    except (sqlite3.DatabaseError, OSError) as error:
        with suppress(OSError):
            written.unlink(missing_ok=True)
        remedy = "Check permissions and free space, or give another place with --out."
        raise BuildError(f"to write {target}", str(error), remedy) from error
    return target


def list_documents(database: sqlite3.Connection, documents: Iterable[Document]) -> None:
    """Make the table `documents` in a database."""
    database.executescript(_DOCUMENTS)
    marks = ", ".join("?" * len(_COLUMNS))
    rows = ([_cell(getattr(document, name)) for name in _COLUMNS] for document in documents)
    database.executemany(f"insert into documents ({', '.join(_COLUMNS)}) values ({marks})", rows)


def _cell(value: Any) -> Any:
    return readable(value) if isinstance(value, str) else int(value)


def _is_catalog(target: Path) -> bool:
    """Whether a file is a database with a catalogue's tables, or an empty file."""
    if target.is_file() and not target.stat().st_size:
        return True
    try:
        with closing(sqlite3.connect(f"{target.absolute().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.DatabaseError:  # no database, or a folder
        return False
    return tables >= {"documents", "skipped", "store"}


def _skipped(store: Datastore) -> Iterator[tuple[int, str, str, str]]:
    """(generation, path, source, reason) of what the changes of the history left out."""
    for event in store.manifest.history:
        if "listed" in event:
            path = store.path / SKIPPED / event["listed"]["name"]
            check_content(path, FileEntry(event["listed"]["bytes"], event["listed"]["sha256"]))
            for row in json.loads(path.read_bytes()):
                yield (event["generation"], *map(readable, row))
