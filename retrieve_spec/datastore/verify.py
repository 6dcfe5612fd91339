"""Verification: every byte, every order and every count of a store is as it was built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.datastore.change import progress_bar
from retrieve_spec.datastore.dense import DenseIndex
from retrieve_spec.datastore.files import FileEntry, check_content
from retrieve_spec.datastore.indexes import NgramTable, build_grams, suffix_beginnings
from retrieve_spec.datastore.manifest import SEGMENTS, SKIPPED, SegmentEntry, content_name, files_of, read_manifest
from retrieve_spec.datastore.remote import explain_remote_errors, is_address, read_remote
from retrieve_spec.datastore.segment import (
    COPIES,
    DOCUMENTS,
    RANKS,
    Segment,
    document_tokens,
    find_ranks,
    open_segment,
    tombstones_of,
)
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.ngram import EXTENT, KEY, START, ngram_hash
from retrieve_spec.kernels.suffix_array import sa_search, sa_top_table

_ATTEMPTS = 5
QUERIES = 32
"""Sampled queries per segment that are compared with a scan."""


def verify_datastore(path: str | os.PathLike[str], *, progress: bool = False) -> dict[str, Any]:
    """Check a datastore completely: checksums, structure, and sampled queries against a scan of the text.

    Parameters
    ----------
    path
        Folder of the store; of the address of a remote, the checksums of all files there are compared.
    progress
        Show a bar on standard error.

    Returns
    -------
    dict
        ``segments``, ``documents``, ``tokens``, ``files``, ``bytes`` and ``queries`` that were checked.

    Raises
    ------
    StoreCorruptError
        Naming the first file or rule that does not hold.
    StoreNotFoundError, StoreIncompleteError, StoreVersionError
        As `open_datastore`.
    """
    if isinstance(path, str) and is_address(path):
        return _verify_remote(path, progress)
    for _ in range(_ATTEMPTS):
        store = open_datastore(path)
        try:
            return _verify(store, progress)
        except (StoreCorruptError, FileNotFoundError):
            # A change may have taken files away since the store was opened: then the new state is what counts.
            if read_manifest(store.path).generation == store.manifest.generation:
                raise
    raise StoreCorruptError(f"to verify {path}", "another process is changing it", "Verify it when that is done.")


def _verify(store: Datastore, progress: bool) -> dict[str, Any]:
    manifest = store.manifest
    files = list(files_of(manifest))
    listed = (event["listed"] for event in manifest.history if "listed" in event)
    files += [(f"{SKIPPED}/{one['name']}", FileEntry(one["bytes"], one["sha256"])) for one in listed]
    size = sum(entry.bytes for _, entry in files)
    with progress_bar("checksums", size, "B", progress) as advance:
        for place, entry in files:
            check_content(store.path / place, entry)
            advance(entry.bytes)
    queries = 0
    for part in manifest.segments:
        folder = store.path / SEGMENTS / part.name
        segment = open_segment(folder, part, manifest.vocabulary, manifest.dense)
        _check_structure(segment, manifest.vocabulary)
        segment.documents.check()
        _check_tombstones(store.path, segment, part)
        queries += _check_queries(segment)
        _require(content_name(part.files) == part.name, segment, "the name of its content")
    return {
        "segments": len(manifest.segments),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "files": len(files) + 1,
        "bytes": size,
        "queries": queries,
    }


def _require(holds: Any, segment: Segment, rule: str) -> None:
    if not holds:
        raise StoreCorruptError(f"{rule} in segment {segment.name}", "something else")


@njit(cache=True, nogil=True)
def _out_of_order(tokens, sa):  # type: ignore[no-untyped-def]
    """First index whose suffix sorts before the one above it within their documents, or -1."""
    for i in range(1, len(sa)):
        a = np.int64(sa[i - 1])
        b = np.int64(sa[i])
        while tokens[a] == tokens[b] and tokens[a] != 0:
            a += 1
            b += 1
        if tokens[a] > tokens[b]:
            return i
    return -1


def _check_structure(segment: Segment, vocabulary: int) -> None:
    starts = segment.document_starts.astype(np.int64)
    _require(len(starts) and starts[0] == 0 and (np.diff(starts) > 1).all(), segment, "rising document starts")
    ids = segment.to_global
    _require(len(ids) and ids[0] == 0 and (np.diff(ids[1:].astype(np.int64)) > 0).all(), segment, "rising token ids")
    _require(int(ids.max()) < vocabulary, segment, "token ids of the tokenizer")
    if len(segment.tokens):
        _check_suffix_array(segment, starts)
    if segment.dense is not None:
        _check_dense(segment, segment.dense)
    if segment.ngram is not None:
        _check_table(segment, segment.ngram, vocabulary)


def _check_suffix_array(segment: Segment, starts: NDArray[np.int64]) -> None:
    tokens, sa = segment.tokens, segment.suffix_array
    _require(len(tokens) == starts[-1], segment, "as many tokens as its documents have")
    separators = np.flatnonzero(np.asarray(tokens) == 0)
    _require(np.array_equal(separators, starts[1:] - 1), segment, "separators at the ends of documents")
    _require(int(tokens.max()) < len(segment.to_global), segment, "tokens of its vocabulary")
    expected = np.asarray(tokens) != 0
    listed = np.zeros(len(tokens), np.bool_)
    _require(len(sa) == 0 or int(sa.max()) < len(tokens), segment, "positions inside the text")
    listed[sa] = True
    _require(len(sa) == int(expected.sum()) and (listed == expected).all(), segment, "every position once")
    _require(_out_of_order(tokens, sa) < 0, segment, "a sorted suffix array")
    _require(np.array_equal(sa_top_table(tokens, sa, segment.bits), segment.top), segment, "a matching top table")
    if len(segment.grams):
        built = build_grams(tokens, segment.to_global, suffix_beginnings(tokens, sa))
        _require(np.array_equal(built, segment.grams), segment, "the gram filter of its text")


def _check_dense(segment: Segment, dense: DenseIndex) -> None:
    """Keys of tokens that something follows, each once, and a transform and an index that answer."""
    positions, tokens = dense.positions.astype(np.int64), np.asarray(segment.tokens)
    _require(
        len(positions) and positions.max() < len(tokens) - 1 and (np.diff(positions) > 0).all(),
        segment,
        "dense keys of different positions in the text",
    )
    _require((tokens[positions] != 0).all() and (tokens[positions + 1] != 0).all(), segment, "dense keys of tokens")
    similarity, _ = dense.search(dense.transform.mean[None] + dense.transform.scale[None], 1)
    _require(np.isfinite(similarity).all(), segment, "finite similarities of dense keys")


def _check_table(segment: Segment, table: NgramTable, vocabulary: int) -> None:
    used = table.slots[:, KEY] != 0
    _require(len(used) > 0 and not used.all(), segment, "an n-gram table with a free slot")
    start = table.slots[used, START].astype(np.int64)
    kept = (table.slots[used, EXTENT] >> 16).astype(np.int64)
    _require((kept > 0).all(), segment, "continuations of every n-gram")
    _require(np.array_equal(start, np.cumsum(kept) - kept), segment, "rising n-gram offsets")
    _require(int(kept.sum()) == len(table.succ_tokens), segment, "an n-gram of every continuation")
    _require(len(table.succ_tokens) == len(table.succ_counts), segment, "a count for every continuation")
    _require(int(table.succ_tokens.max(initial=0)) < vocabulary, segment, "n-gram tokens of the tokenizer")


def _check_queries(segment: Segment) -> int:
    """Compare sampled matches of the index and of the n-gram table with a scan of the text."""
    tokens, sa = np.asarray(segment.tokens), segment.suffix_array
    if not len(sa):
        return 0
    random = np.random.default_rng(len(sa))
    in_index = np.zeros(len(tokens), np.bool_)
    in_index[sa] = True
    for _ in range(QUERIES):
        start = int(sa[random.integers(len(sa))])
        length = int(random.integers(1, 6))
        pattern = tokens[start : start + length].astype(np.int64)
        pattern = pattern[: int(np.argmin(pattern != 0)) if (pattern == 0).any() else length]
        length = len(pattern)
        hits = in_index[: len(tokens) - length].copy()
        for i in range(length):
            hits &= tokens[i : len(tokens) - length + i] == pattern[i]
        lo, hi = sa_search(tokens, sa, segment.top, segment.bits, pattern, 0, length)
        _require(hi - lo == int(hits.sum()), segment, f"{int(hits.sum())} matches of a sampled text")
        if segment.ngram is not None:
            followers = tokens[np.flatnonzero(hits) + length]
            _check_ngram(segment, segment.ngram, pattern, int((followers != 0).sum()))
    return QUERIES


def _check_ngram(segment: Segment, table: NgramTable, pattern: NDArray[np.int64], continued: int) -> None:
    h = np.uint64(0)
    for token in segment.to_global[pattern[::-1]]:
        h = np.uint64(ngram_hash(h, token))
    found = table.look_up(h)
    _require(found is None or found[0] == continued, segment, f"{continued} continuations of a sampled n-gram")
    _require(found is not None or continued == 0 or len(pattern) > 1, segment, "all n-grams of order 1")


def _check_tombstones(store: Path, segment: Segment, entry: SegmentEntry) -> None:
    """What counts as removed: documents of the segment, exactly their suffixes, and the counts of what is left."""
    found = tombstones_of(store, entry)
    for kind in (DOCUMENTS, RANKS, COPIES):
        rising = bool((found[kind][1:] > found[kind][:-1]).all())
        _require(rising, segment, f"rising tombstones ({kind})")
    hidden = sorted({*found[DOCUMENTS].tolist(), *found[COPIES].tolist()})
    starts = segment.document_starts
    documents = len(starts) - 1
    _require(not hidden or hidden[-1] < documents, segment, "tombstones of its documents")
    _require(entry.documents == documents - len(hidden), segment, f"{entry.documents:,} documents that are left")
    left = int(starts[-1]) - documents - document_tokens(starts, hidden)
    _require(entry.tokens == left, segment, f"{entry.tokens:,} tokens that are left")
    if len(found[DOCUMENTS]) and len(segment.tokens):
        ranks = find_ranks(segment.suffix_array, starts, found[DOCUMENTS].tolist())
        _require(np.array_equal(ranks, found[RANKS]), segment, "the ranks of removed suffixes")
    else:
        _require(not len(found[RANKS]), segment, "no ranks of removed suffixes")


def _verify_remote(url: str, progress: bool) -> dict[str, Any]:
    """Check that a remote holds every byte of its newest version; nothing is kept here, and no queries are run."""
    remote, _, manifest = read_remote(url)
    files = list(files_of(manifest))
    size = sum(file.bytes for _, file in files)
    with progress_bar("verifying", size, "B", progress) as advance, explain_remote_errors(url):
        for place, file in files:
            for block in remote.blocks(place, file):
                advance(len(block))
    return {
        "segments": len(manifest.segments),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "files": len(files),
        "bytes": size,
        "queries": 0,
    }
