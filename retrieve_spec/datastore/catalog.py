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
_NOT_NULL = {"segment", "number", "path", "start", "tokens", "removed"}


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
        with closing(sqlite3.connect(written)) as connection:
            documents = list_documents(connection, (d for segment in store.segments for d in segment.documents))
            documents.create_index(["segment", "number"], unique=True)
            documents.create_index(["sha256"])
            documents.enable_fts(["path"])
            skipped = documents.db.table("skipped")
            skipped.create({"generation": int, "path": str, "source": str, "reason": str}).insert_all(_skipped(store))
            manifest = store.manifest
            documents.db.table("store").insert({"generation": manifest.generation, "content": manifest.content})
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


def list_documents(connection: sqlite3.Connection, documents: Iterable[Document]) -> Any:
    """Make the table `documents` in a database, as sqlite-utils has tables."""
    from sqlite_utils import Database  # takes longer to import than a change of a store to make

    table = Database(connection).table("documents")
    table.create(_COLUMNS, pk="id", not_null=_NOT_NULL)
    return table.insert_all({n: _cell(getattr(d, n)) for n in _COLUMNS if n != "id"} for d in documents)


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


def _skipped(store: Datastore) -> Iterator[dict[str, Any]]:
    """Rows of what the changes of the history left out."""
    for event in store.manifest.history:
        if "listed" in event:
            path = store.path / SKIPPED / event["listed"]["name"]
            check_content(path, FileEntry(event["listed"]["bytes"], event["listed"]["sha256"]))
            for row in json.loads(path.read_bytes()):
                values = (event["generation"], *map(readable, row))
                yield dict(zip(("generation", "path", "source", "reason"), values, strict=True))
