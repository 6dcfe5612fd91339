"""Inspect stores: verify every byte, search for a text, and write a database of the documents."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.change import progress_bar
from retrieve_spec.datastore.dense import DenseIndex, continuation
from retrieve_spec.datastore.files import FileEntry, check_content, replace_file
from retrieve_spec.datastore.manifest import (
    CATALOG,
    SEGMENTS,
    Manifest,
    SegmentEntry,
    config_of,
    content_name,
    explain_write_errors,
    files_of,
    read_manifest,
)
from retrieve_spec.datastore.remote import explain_remote_errors, is_address, read_remote
from retrieve_spec.datastore.segment import (
    DOCUMENTS,
    RANKS,
    SUFFIX,
    Document,
    Segment,
    document_tokens,
    find_ranks,
    hidden_of,
    index_text,
    local_ids,
    open_segment,
    tombstones_of,
)
from retrieve_spec.datastore.sources import readable
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.suffix_array import sa_longest, sa_successors

_ATTEMPTS = 5
_SLOTS, _GRAMS = f"ngram_slots{SUFFIX}", f"grams{SUFFIX}"


def verify_datastore(path: str | os.PathLike[str], *, progress: bool = False) -> dict[str, Any]:
    """Verify a datastore completely: compare checksums, and check that its arrays are consistent.

    Parameters
    ----------
    path
        Folder of the store, or address of a remote, whose files are compared with their checksums.
    progress
        Show a bar on standard error.

    Returns
    -------
    dict
        Numbers of checked ``segments``, ``documents``, ``tokens``, ``files`` and ``bytes``.

    Raises
    ------
    StoreCorruptError
        Something is damaged; the message names the first such file or rule.
    StoreNotFoundError, StoreIncompleteError, StoreVersionError
        As `open_datastore`.
    """
    if isinstance(path, str) and is_address(path):
        remote, _, manifest = read_remote(path)
        files = list(files_of(manifest))
        checked = _checked(manifest, files)
        with progress_bar("verifying", checked["bytes"], "B", progress) as advance, explain_remote_errors(path):
            for place, file in files:
                for block in remote.blocks(place, file):
                    advance(len(block))
        return checked
    for _ in range(_ATTEMPTS):
        store = open_datastore(path)
        try:
            return _verify(store, progress)
        except (StoreCorruptError, FileNotFoundError):
            # A change may have deleted files since the store was opened: then verify the new state.
            if read_manifest(store.path).generation == store.manifest.generation:
                raise
    raise StoreCorruptError(f"to verify {path}", "another process is changing it", "Verify it when that is done.")


def _checked(manifest: Manifest, files: list[tuple[str, FileEntry]]) -> dict[str, Any]:
    counts = {"segments": len(manifest.segments), "documents": manifest.documents, "tokens": manifest.tokens}
    return {**counts, "files": len(files), "bytes": sum(entry.bytes for _, entry in files)}


def _verify(store: Datastore, progress: bool) -> dict[str, Any]:
    manifest = store.manifest
    files = list(files_of(manifest))
    checked = _checked(manifest, files)
    with progress_bar("checksums", checked["bytes"], "B", progress) as advance:
        for place, entry in files:
            check_content(store.path / place, entry)
            advance(entry.bytes)
    for part in manifest.segments:
        segment = open_segment(store.path / SEGMENTS / part.name, part, manifest.vocabulary, manifest.dense)
        _require(content_name(part.files) == part.name, segment, "the name of its content")
        _check_text(segment, part, config_of(manifest))
        segment.documents.check()
        _check_tombstones(store.path, segment, part)
        if segment.dense is not None:
            _check_dense(segment, segment.dense)
    return checked


def _require(holds: Any, segment: Segment, rule: str) -> None:
    if not holds:
        raise StoreCorruptError(f"{rule} in segment {segment.name}", "something else")


def _rising(array: NDArray[Any]) -> bool:
    return bool((array[1:] > array[:-1]).all())


def _check_text(segment: Segment, entry: SegmentEntry, config: StoreConfig) -> None:
    """Check documents and vocabulary, and that indexing the text again gives the same arrays."""
    starts, ids = segment.document_starts, segment.to_global
    _require(starts[0] == 0 and (np.diff(starts.astype(np.int64)) > 1).all(), segment, "rising document starts")
    _require(ids[0] == 0 and _rising(ids[1:]), segment, "rising token ids")
    if not len(segment.tokens):
        return
    _require(starts[-1] == len(segment.tokens), segment, "documents of its text")
    tokens, used = local_ids(segment.ids_of(segment.tokens), starts)
    _require(np.array_equal(used, ids), segment, "the vocabulary of its text")
    made = {name + SUFFIX: array for name, array in index_text(tokens, ids, replace(config, index="both")).items()}
    known = entry.files.keys() & made.keys()
    _require({f"suffix_array{SUFFIX}", f"top{SUFFIX}"} <= known, segment, "an exact index of its text")
    if _SLOTS in known and (_GRAMS not in known or made[_SLOTS].nbytes != entry.files[_SLOTS].bytes):
        # The table may come from an earlier release, or from other settings of `add_documents`.
        known = {name for name in known if not name.startswith("ngram_")}
    for name in sorted(known):
        digest = hashlib.sha256(np.ascontiguousarray(made[name]).data).hexdigest()
        _require(digest == entry.files[name].sha256, segment, f"{name} as its text makes it")


def _check_dense(segment: Segment, dense: DenseIndex) -> None:
    """Check that keys belong to different tokens that have a continuation, and that searches work."""
    positions, tokens = dense.positions.astype(np.int64), np.asarray(segment.tokens)
    inside = len(positions) > 0 and int(positions[-1]) < len(tokens) - 1 and _rising(positions)
    _require(inside, segment, "dense keys of different positions in the text")
    _require((tokens[positions] != 0).all() and (tokens[positions + 1] != 0).all(), segment, "dense keys of tokens")
    similarity, _ = dense.search(dense.transform.mean[None] + dense.transform.scale[None], 1)
    _require(np.isfinite(similarity).all(), segment, "finite similarities of dense keys")


def _check_tombstones(store: Path, segment: Segment, entry: SegmentEntry) -> None:
    """Check that removed documents exist, and that exactly their suffixes are hidden and the counts are right."""
    found = tombstones_of(store, entry)
    starts, documents = segment.document_starts, len(segment.documents)
    _require(all(map(_rising, found.values())), segment, "rising tombstones")
    hidden = hidden_of(found, documents, entry.name)
    _require(entry.documents == documents - len(hidden), segment, f"{entry.documents:,} documents that are left")
    left = int(starts[-1]) - documents - document_tokens(starts, hidden)
    _require(entry.tokens == left, segment, f"{entry.tokens:,} tokens that are left")
    # Stores that were merged by earlier releases have no ranks of copies.
    wanted = (find_ranks(segment.suffix_array, starts, gone) for gone in (hidden, found[DOCUMENTS].tolist()))
    _require(any(np.array_equal(ranks, found[RANKS]) for ranks in wanted), segment, "the ranks of removed suffixes")


MAX_READS = 1024
SPAN = 16
"""Default length of continuations in tokens."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a store where a match occurs.

    Attributes
    ----------
    segment, position
        Index of the segment, and position of the match's first token.
    document, continuation
        The document's row, and the text after the match.
    """

    segment: int
    position: int
    document: Document
    continuation: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Matches of a text in a store.

    Attributes
    ----------
    tokens
        Number of the text's tokens.
    matched
        Number of tokens in the longest suffix of the text that occurs in the store.
    text
        The matched suffix.
    count
        How often it occurs in documents that are not removed.
    continuations
        ``(token as text, count)``, most frequent first; estimated from a sample if there are many.
    occurrences
        Some of the matches, evenly spread.
    """

    tokens: int
    matched: int
    text: str
    count: int
    continuations: tuple[tuple[str, float], ...]
    occurrences: tuple[Place, ...]


def search_datastore(store: Datastore, text: str, *, limit: int = 10, span: int = SPAN) -> SearchResult:
    """Find the longest suffix of a text that occurs in a store.

    Parameters
    ----------
    store
        An open store that keeps its text.
    text
        Text to search for; encoded with the store's tokenizer.
    limit
        Most continuations and occurrences to return.
    span
        Number of tokens of each occurrence's continuation.

    Returns
    -------
    SearchResult
        ``matched`` is 0 if not even the last token occurs.
    """
    ids, decode = np.array(store.tokenizer.encode(text, add_special_tokens=False).ids, np.int64), store.tokenizer.decode
    found = [_longest(segment, ids) for segment in store.segments]
    matched = max((depth for _, _, depth in found), default=0)
    if matched == 0:
        return SearchResult(len(ids), 0, "", 0, (), ())
    parts = [(i, store.segments[i], lo, hi) for i, (lo, hi, depth) in enumerate(found) if depth == matched]
    count = sum(int(_shown(part, np.array([lo, hi]))[0]) for _, part, lo, hi in parts)
    counts: Counter[int] = Counter()
    places = []
    tokens, often = np.empty(MAX_READS, np.int64), np.empty(MAX_READS, np.float64)
    for i, segment, lo, hi in parts:
        sa = segment.suffix_array
        n, _ = sa_successors(segment.tokens, sa, lo, hi, matched, MAX_READS, tokens, often)
        bounds = hi - np.cumsum([0, *often[:n][::-1]], dtype=np.int64)[::-1]
        counts.update(dict(zip(segment.ids_of(tokens[:n]).tolist(), _shown(segment, bounds).tolist(), strict=True)))
        share = max(1, round(limit * (hi - lo) / max(count, 1)))
        shown = sa[np.linspace(lo, hi - 1, min(share, hi - lo)).astype(np.int64)]
        for at in shown[np.sort(np.unique(shown, return_index=True)[1])].tolist():
            places.append(_place(store, i, at, at + matched - 1, span))
    best = sorted((+counts).items(), key=lambda item: (-item[1], item[0]))[:limit]
    return SearchResult(
        len(ids),
        matched,
        decode(ids[len(ids) - matched :].tolist(), skip_special_tokens=False),
        count,
        tuple((decode([token], skip_special_tokens=False), n) for token, n in best),
        tuple(places[:limit]),
    )


def _longest(segment: Segment, ids: NDArray[np.int64]) -> tuple[int, int, int]:
    if not len(segment.suffix_array):
        return 0, 0, 0
    recent = segment.localise(ids)
    lo, hi, depth = sa_longest(
        segment.tokens, segment.suffix_array, segment.top, segment.bits, recent, len(recent), len(recent)
    )
    return int(lo), int(hi), int(depth)


def _shown(segment: Segment, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the suffixes in the intervals between ascending bounds that are not replaced by a neighbour."""
    shown: NDArray[np.int64] = np.diff(bounds) - np.diff(np.searchsorted(segment.hidden, bounds))
    return shown


def _place(store: Datastore, index: int, position: int, last: int, span: int) -> Place:
    """Return a match in a segment as a `Place`, with the text after it."""
    following = continuation(store.segments[index], last, span).tolist()
    text = store.tokenizer.decode(following, skip_special_tokens=False)
    return Place(index, position, store.document_at(index, position), text)


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


def write_catalog(path: str | os.PathLike[str]) -> Path:
    """Write the catalogue of a datastore: an SQLite database of its documents for people to query.

    It is a copy: drafting does not read it, and it can be deleted at any time.

    Parameters
    ----------
    path
        Folder of the store.

    Returns
    -------
    Path
        ``catalog.sqlite`` in the store, which replaces an older one: table `documents`, with full-text search of paths.

    Raises
    ------
    StoreError
        As `open_datastore`.
    BuildError
        The database cannot be written; nothing is left of it.
    """
    store = open_datastore(path)
    with closing(sqlite3.connect(":memory:")) as connection:
        documents = list_documents(connection, (d for segment in store.segments for d in segment.documents))
        documents.create_index(["segment", "number"], unique=True)
        documents.create_index(["sha256"])
        documents.enable_fts(["path"])
        content = connection.serialize()
    with explain_write_errors(store.path):
        replace_file(store.path / CATALOG, content)
    return store.path / CATALOG


def list_documents(connection: sqlite3.Connection, documents: Iterable[Document]) -> Any:
    """Create the table `documents` in a database of sqlite-utils."""
    from sqlite_utils import Database  # importing it takes longer than most changes

    table = Database(connection).table("documents")
    table.create(_COLUMNS, pk="id", not_null=_NOT_NULL)
    return table.insert_all({n: _cell(getattr(d, n)) for n in _COLUMNS if n != "id"} for d in documents)


def _cell(value: Any) -> Any:
    return readable(value) if isinstance(value, str) else int(value)
