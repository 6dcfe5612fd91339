"""The catalogue: from documents and what happened to them to an SQLite database a person can open."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from retrieve_spec.datastore.files import explain_read_errors, sync_folder
from retrieve_spec.errors import StoreCorruptError

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
    "removed_at": str,
}
_HASHED = tuple(name for name in _COLUMNS if name not in ("id", "segment"))


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a store.

    Attributes
    ----------
    segment, number
        Where it stands: segment folder, and its number there.
    path
        Path relative to its source, or ``file#line`` for one of many in a file.
    licence
        Licence stated when it was added, ``""`` if none was.
    source
        What was given to build from.
    sha256
        Of its text.
    start, tokens
        Position of its first token in the segment, and its length.
    added_at, removed_at
        UTC times; removed_at is None while it can be drafted from.
    """

    segment: str
    number: int
    path: str
    licence: str
    source: str
    sha256: str
    start: int
    tokens: int
    added_at: str
    removed_at: str | None = None


def rows_checksum(documents: Iterable[Document]) -> str:
    """SHA-256 over the documents of a segment, in order, whatever the segment is called."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([getattr(document, name) for name in _HASHED]).encode())
    return digest.hexdigest()


def check_exists(path: Path) -> None:
    """Check that a catalogue is there, not empty, and may be read.

    Raises
    ------
    StoreCorruptError
        When it is missing or empty.
    StoreError
        When it may not be read.
    """
    if not path.is_file() or not path.stat().st_size:
        raise StoreCorruptError(f"a catalogue at {path}", "an empty file" if path.is_file() else "no file", _REBUILD)
    with explain_read_errors(path), path.open("rb"):
        pass


class Catalog:
    """The documents of a store, and what was left out of it.

    The file of a store never changes: `edited_catalog` alters a copy and puts it in place, so that readers need no
    locks and keep what they have opened.

    Parameters
    ----------
    path
        The database.
    write
        Create or change it (only ever a file that no reader knows).

    Raises
    ------
    StoreCorruptError
        When it is missing or no database.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self.path = path
        if not write:
            check_exists(path)
        uri = path.resolve().as_uri() + ("" if write else "?mode=ro&immutable=1")
        try:
            connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            connection.execute("PRAGMA schema_version").fetchone()  # opens the file now, not on first use
        except sqlite3.Error as error:
            raise StoreCorruptError(f"an SQLite database at {path}", str(error), _REBUILD) from error
        self.db = Database(connection)
        if write:
            self._create()

    def close(self) -> None:
        """Close the database."""
        self.db.close()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create(self) -> None:
        documents = self.db.table("documents")
        if not documents.exists():
            documents.create(_COLUMNS, pk="id", not_null={"segment", "number", "path", "start", "tokens"})
            documents.create_index(["segment", "number"], unique=True)
            documents.create_index(["sha256"])
            documents.enable_fts(["path"], create_triggers=True)
        skipped = self.db.table("skipped")
        if not skipped.exists():
            skipped.create({"generation": int, "path": str, "source": str, "reason": str})

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement.

        Raises
        ------
        StoreCorruptError
            When the database is damaged.
        """
        try:
            return self.db.conn.execute(sql, parameters).fetchall()
        except sqlite3.DatabaseError as error:
            raise StoreCorruptError(f"a readable catalogue at {self.path}", str(error), _REBUILD) from error

    def _documents(self, where: str, parameters: Sequence[Any]) -> list[Document]:
        columns = ", ".join(name for name in _COLUMNS if name != "id")
        rows = self.query(f"select {columns} from documents where {where} order by segment, number", parameters)
        return [Document(*row) for row in rows]

    def document(self, segment: str, number: int) -> Document:
        """One document.

        Raises
        ------
        StoreCorruptError
            When the catalogue does not list it.
        """
        found = self._documents("segment = ? and number = ?", (segment, number))
        if not found:
            raise StoreCorruptError(f"document {number} of segment {segment} in {self.path}", "no such row", _REBUILD)
        return found[0]

    def documents(self, segment: str) -> list[Document]:
        """All documents of a segment, removed ones too, in order."""
        return self._documents("segment = ?", (segment,))

    def put_segment(self, segment: str, documents: Iterable[Document]) -> None:
        """Write the rows of a segment, replacing any of that name, in one transaction."""
        with self.db.conn:
            self.db.conn.execute("delete from documents where segment = ?", (segment,))
            self.db.conn.executemany(
                f"insert into documents ({', '.join(c for c in _COLUMNS if c != 'id')}) values ({'?,' * 9}?)",
                (tuple(getattr(d, c) if c != "segment" else segment for c in _COLUMNS if c != "id") for d in documents),
            )

    def put_skipped(self, generation: int, skipped: Iterable[tuple[str, str, str]]) -> None:
        """Record what a change left out: (path, source, reason)."""
        with self.db.conn:
            self.db.conn.execute("delete from skipped where generation = ?", (generation,))
            self.db.conn.executemany(
                "insert into skipped (generation, path, source, reason) values (?, ?, ?, ?)",
                [(generation, *row) for row in skipped],
            )

    def live_hashes(self, segments: Iterable[str]) -> set[str]:
        """Content hashes of the documents of some segments that can be drafted from."""
        live = set(segments)
        rows = self.query("select sha256, segment from documents where removed_at is null")
        return {digest for digest, segment in rows if segment in live}

    def keep_segments(self, segments: Iterable[str]) -> None:
        """Drop the rows of all other segments (left behind by an interrupted change, or merged away)."""
        names = sorted(segments)
        with self.db.conn:
            self.db.conn.execute(f"delete from documents where segment not in ({','.join('?' * len(names))})", names)

    def segments(self) -> set[str]:
        """Segments it has rows of."""
        return {row[0] for row in self.query("select distinct segment from documents")}

    def check(self) -> None:
        """Check the structure of the database and of its text index.

        Raises
        ------
        StoreCorruptError
            When SQLite finds damage.
        """
        result = self.query("PRAGMA integrity_check")
        if result != [("ok",)]:
            raise StoreCorruptError(f"a sound catalogue at {self.path}", str(result[0][0]), _REBUILD)


@contextmanager
def edited_catalog(path: Path, scratch: Path) -> Iterator[Catalog]:
    """Change a catalogue (or create it) on a copy that replaces it at once when the block ends without an error.

    Parameters
    ----------
    path
        The catalogue of the store.
    scratch
        Folder for the copy, on the same file system.
    """
    copy = scratch / path.name
    for stale in (copy, copy.with_name(copy.name + "-journal")):
        stale.unlink(missing_ok=True)
    if path.exists():
        shutil.copyfile(path, copy)
    with Catalog(copy, write=True) as catalog:
        yield catalog
    with copy.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(copy, path)
    sync_folder(path.parent)


_REBUILD = "Restore the file from a copy, or build the store again."
