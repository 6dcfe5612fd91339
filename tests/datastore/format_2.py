"""Stores of format 2: what the version before wrote, made from a store of today's format."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3

from retrieve_spec.datastore.documents import TABLE
from retrieve_spec.datastore.manifest import MANIFEST, _checksum, read_manifest
from retrieve_spec.datastore.store import open_datastore

_COLUMNS = "segment, number, path, licence, source, sha256, start, tokens, added_at, removed_at"


def as_format_2(store, removed=()):
    """Turn a store without tombstones into one of format 2, of which some documents were removed."""
    opened = open_datastore(store)
    manifest = read_manifest(store)
    database = sqlite3.connect(store / "catalog.sqlite")
    database.execute(f"create table documents (id integer primary key, {_COLUMNS})")
    segments = []
    for number, (segment, entry) in enumerate(zip(opened.segments, manifest.segments, strict=True), 1):
        assert not entry.tombstones
        name = f"{number:06d}"
        rows = [
            (d.number, d.path, d.licence, d.source, d.sha256, d.start, d.tokens, d.added_at, gone(d, removed))
            for d in segment.documents
        ]
        database.executemany(
            f"insert into documents ({_COLUMNS}) values ({','.join('?' * 10)})", [(name, *row) for row in rows]
        )
        digest = hashlib.sha256()
        for row in rows:
            digest.update(json.dumps(list(row)).encode())
        shutil.move(store / "segments" / entry.name, store / "segments" / name)
        for table in TABLE:
            (store / "segments" / name / f"{table}.bin").unlink()
        files = {
            file: {"bytes": about.bytes, "sha256": about.sha256, "dtype": about.dtype}
            for file, about in entry.files.items()
            if file.removesuffix(".bin") not in TABLE
        }
        numbers = [row[0] for row in rows if row[-1]]
        left = sum(row[6] for row in rows if not row[-1])
        segments.append(
            {
                "name": name,
                "documents": len(rows) - len(numbers),
                "tokens": left,
                "removed": numbers,
                "catalog": digest.hexdigest(),
                "files": files,
            }
        )
    database.commit()
    database.close()
    body = json.loads((store / MANIFEST).read_text())
    for new in ("checksum", "config"):
        body.pop(new)
    body |= {"format": 2, "segments": segments, "next_segment": len(segments) + 1}
    body |= {"tokens": sum(s["tokens"] for s in segments), "documents": sum(s["documents"] for s in segments)}
    (store / MANIFEST).write_text(json.dumps({**body, "checksum": _checksum(body)}))


def gone(document, removed):
    """When a document was removed, if it was."""
    return "2026-01-01T00:00:00Z" if document.path in removed else None
