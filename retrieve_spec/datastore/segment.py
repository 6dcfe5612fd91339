"""Segments: the files of one immutable part of a store, with token ids, documents and tombstones.

A row of a document table has a path, the SHA-256 of the text, a length and an *origin*, the number of a (licence,
source) pair. The pairs are in the manifest, so that a segment does not contain the names of sources.

Tombstones mark removed documents of a segment. They are up to three files, named by their contents:
``…-documents.bin``, the numbers of removed documents; ``…-copies.bin``, those of documents whose text another segment
has, too; and ``…-ranks.bin``, the ranks of their suffixes in the suffix array. A segment with tombstones is mapped
privately, and each removed suffix is replaced in memory by its nearest remaining neighbour in the suffix array. So the
array keeps its length and order, searches work unchanged, and continuations are only found in remaining text. The
neighbour is counted once more for every suffix that it replaces. Time and memory grow with the number of removed
tokens: if more than `MOST_TOKENS` of a segment are removed, it is rewritten instead.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.dense import INDEX, DenseIndex
from retrieve_spec.datastore.files import FileEntry, map_array, read_in_order, write_files
from retrieve_spec.datastore.indexes import (
    NgramTable,
    build_grams,
    build_ngrams,
    suffix_beginnings,
)
from retrieve_spec.datastore.manifest import TOMBSTONES, DenseRecord, SegmentEntry
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.induced_sort import sort_suffixes
from retrieve_spec.kernels.ngram import SLOT, forget_document
from retrieve_spec.kernels.suffix_array import TOP_SHIFT, sa_top_table

HASHES, PATHS, PATH_ENDS, ORIGINS = "document_hashes", "document_paths", "document_path_ends", "document_origins"
TABLE = (HASHES, PATHS, PATH_ENDS, ORIGINS)
DIGEST = 32
"""Size of a content hash in bytes."""
SUFFIX = ".bin"
_DTYPES = {
    **dict.fromkeys(("tokens", "ngram_succ_tokens"), ("<u2", "<u4")),
    **dict.fromkeys(("top", "grams", PATH_ENDS), ("<u8",)),
    **dict.fromkeys((HASHES, PATHS), ("|u1",)),
}
"""Dtypes of arrays other than uint32."""
Origin = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a store.

    Attributes
    ----------
    segment, number
        Folder of its segment, and its number there.
    path
        Path relative to its source, or ``file#line`` for a record.
    licence
        Licence at the time it was added, ``""`` if none was stated.
    source
        The source it was built from.
    sha256
        SHA-256 of its text.
    start, tokens
        Position of its first token in the segment, and its number of tokens.
    added_at
        UTC time at which its segment was added to the store.
    removed
        Whether it was removed, so that it is not drafted from.
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
    removed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a document table that is to be written: path, licence, source, hexadecimal SHA-256, number of tokens."""

    path: str
    licence: str
    source: str
    sha256: str
    tokens: int


def text_hash(text: str) -> str:
    """Return the content hash of a text: SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def table_arrays(rows: Sequence[Row]) -> tuple[dict[str, NDArray[Any]], tuple[Origin, ...]]:
    """Return the arrays of a document table by name, and its origins in order of first occurrence."""
    paths = [row.path.encode("utf-8", "backslashreplace") for row in rows]
    origins: dict[Origin, int] = {}
    numbers = [origins.setdefault((row.licence, row.source), len(origins)) for row in rows]
    arrays: dict[str, NDArray[Any]] = {
        HASHES: np.frombuffer(b"".join(bytes.fromhex(row.sha256) for row in rows), np.uint8),
        PATHS: np.frombuffer(b"".join(paths), np.uint8),
        PATH_ENDS: np.cumsum([len(path) for path in paths], dtype=np.uint64),
        ORIGINS: np.array(numbers, np.uint32),
    }
    return arrays, tuple(origins)


class DocumentTable:
    """The documents of one segment, read from its arrays on demand.

    Parameters
    ----------
    segment, added_at, origins
        As in the segment's entry in the manifest.
    starts
        (d + 1,) uint32 starts of the documents.
    arrays
        The arrays of `TABLE` by name.
    removed
        Numbers of the documents that are not drafted from.
    """

    def __init__(
        self,
        segment: str,
        added_at: str,
        origins: Sequence[Origin],
        starts: NDArray[np.uint32],
        arrays: Mapping[str, NDArray[Any]],
        removed: Sequence[int] = (),
    ) -> None:
        self.segment, self.added_at, self.origins = segment, added_at, origins
        self._starts, self._arrays = starts, arrays
        self._removed = frozenset(removed)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def check(self) -> None:
        """Check that the arrays are consistent.

        Raises
        ------
        StoreCorruptError
            They are not.
        """
        ends, origins = self._arrays[PATH_ENDS].astype(np.int64), self._arrays[ORIGINS]
        sound = len(ends) == len(origins) == len(self.hashes) and bool((np.diff(ends, prepend=0) >= 0).all())
        if not sound or ends[-1] != len(self._arrays[PATHS]) or int(origins.max()) >= len(self.origins):
            raise self._damaged("arrays of one length")
        for _ in self:
            pass  # names are text

    def __getitem__(self, number: int) -> Document:
        """Return one document.

        Raises
        ------
        StoreCorruptError
            The table is damaged.
        """
        try:
            licence, source = self.origins[int(self._arrays[ORIGINS][number])]
            ends = self._arrays[PATH_ENDS]
            path = self._arrays[PATHS][int(ends[number - 1]) if number else 0 : int(ends[number])].tobytes().decode()
            digest = self._arrays[HASHES][DIGEST * number : DIGEST * (number + 1)].tobytes().hex()
            start, end = int(self._starts[number]), int(self._starts[number + 1])
        except (IndexError, UnicodeDecodeError) as error:
            raise self._damaged(f"document {number}") from error
        removed = number in self._removed
        tokens = end - start - 1
        return Document(
            self.segment, number, path, licence, source, digest, start, tokens, self.added_at, removed
        )  # fmt: skip

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))

    def live(self) -> Iterator[Document]:
        """Yield the documents that can be drafted from, in order."""
        return (self[number] for number in range(len(self)) if number not in self._removed)

    @cached_property
    def hashes(self) -> NDArray[np.uint8]:
        """Content hashes, (d, 32) uint8, including those of removed documents."""
        found = self._arrays[HASHES]
        if len(found) != DIGEST * len(self):
            raise self._damaged("a hash of every document")
        return found.reshape(-1, DIGEST)

    def _damaged(self, expected: str) -> StoreCorruptError:
        return StoreCorruptError(f"{expected} in the document table of segment {self.segment}", "none")


MOST_TOKENS = 1 << 17
"""Most removed tokens of a segment for which tombstones are kept."""
_STEP = 1 << 20
DOCUMENTS, RANKS, COPIES = "documents", "ranks", "copies"
_NONE = np.empty(0, np.uint32)
_NO_TOMBSTONES = dict.fromkeys((DOCUMENTS, RANKS, COPIES), _NONE)


def tombstones_of(store: Path, entry: SegmentEntry) -> dict[str, NDArray[np.uint32]]:
    """Return the arrays of a segment's tombstones by kind, empty for kinds without a file.

    Raises
    ------
    StoreCorruptError
        When a file is missing or has another size.
    """
    found = dict(_NO_TOMBSTONES)
    for name, file in entry.tombstones.items():
        kind = name.removesuffix(SUFFIX).rpartition("-")[2]
        if kind not in found:  # later versions may hide more
            raise StoreCorruptError(f"tombstones of {', '.join(found)} in {store}", name)
        found[kind] = map_array(store / TOMBSTONES / name, file, ("<u4",))
    return found


def hidden_of(found: Mapping[str, NDArray[np.uint32]], documents: int, segment: str) -> tuple[int, ...]:
    """Return the numbers of hidden documents: removed ones and copies.

    Raises
    ------
    StoreCorruptError
        They are not documents of the segment.
    """
    numbers = np.union1d(found[DOCUMENTS], found[COPIES])
    if len(numbers) and int(numbers[-1]) >= documents:
        raise StoreCorruptError(f"tombstones of {documents:,} documents of segment {segment}", "others")
    return tuple(numbers.tolist())


def write_tombstones(folder: Path, segment: str, arrays: dict[str, NDArray[np.uint32]]) -> dict[str, FileEntry]:
    """Write tombstones to a folder, from which `publish` moves them into the store."""
    folder.mkdir(exist_ok=True)
    named = {}
    for kind, array in arrays.items():
        content = np.ascontiguousarray(array, "<u4")
        named[f"{segment}-{hashlib.sha256(content.data).hexdigest()[:12]}-{kind}{SUFFIX}"] = content
    return write_files(folder, {name: content for name, content in named.items() if len(content)})


def document_tokens(starts: NDArray[np.uint32], numbers: Iterable[int]) -> int:
    """Count the tokens of some documents of a segment."""
    chosen = np.fromiter(numbers, np.int64)
    lengths = starts[chosen + 1].astype(np.int64) - starts[chosen].astype(np.int64) - 1
    return int(lengths.sum())


def find_ranks(sa: NDArray[np.uint32], starts: NDArray[np.uint32], numbers: Sequence[int]) -> NDArray[np.uint32]:
    """Return the ranks of some documents' suffixes in a suffix array, in ascending order.

    Parameters
    ----------
    sa, starts
        Arrays of the segment.
    numbers
        The documents, in ascending order.

    Raises
    ------
    StoreCorruptError
        The array lacks one of their suffixes.
    """
    if not (len(numbers) and len(sa)):
        return _NONE
    first, last = int(starts[numbers[0]]), int(starts[numbers[-1] + 1])
    gone = np.zeros(last - first, np.bool_)
    for number in numbers:
        gone[int(starts[number]) - first : int(starts[number + 1]) - 1 - first] = True
    found = []
    with read_in_order(sa):
        for at in range(0, len(sa), _STEP):
            inside = sa[at : at + _STEP] - np.uint32(first)  # wraps around for suffixes before the first one
            near = np.flatnonzero(inside < last - first)
            found.append(at + near[gone[inside[near]]])
    ranks = np.concatenate(found).astype(np.uint32)
    if len(ranks) != np.count_nonzero(gone):
        raise StoreCorruptError(f"{np.count_nonzero(gone):,} suffixes of removed documents", f"{len(ranks):,}")
    return ranks


@dataclass(frozen=True)
class Segment:
    """An open part of a store. Arrays are read-only memory maps unless stated otherwise.

    Attributes
    ----------
    name
        Folder of the segment.
    tokens
        (n,) uint16 or uint32 *local* ids: 0 between documents and at the end, tokens from 1 in the order of their ids.
        Empty if the store keeps n-grams only.
    suffix_array
        (m,) uint32 positions of all tokens, sorted by the text that starts there; suffixes of removed documents are
        replaced by neighbours.
    top
        (⌈m / 64⌉,) uint64 packed beginnings of every 64th suffix.
    bits
        Bits per packed token in `top`.
    grams
        (w,) uint64 filter of sequences of six tokens that occur (`retrieve_spec.kernels.ngram`); empty in segments
        of earlier releases.
    to_global
        (v + 1,) uint32 token id of each local id (entry 0 is unused).
    vocabulary
        Token ids are below this number.
    document_starts
        (d + 1,) uint32 start of each document in `tokens`; document i ends before the separator at
        ``document_starts[i + 1] - 1``.
    documents
        The document table.
    removed
        Numbers of the hidden documents, in ascending order.
    ngram
        The segment's n-gram table, or None.
    dense
        The segment's dense index, or None.
    hidden
        (k,) uint32 ranks in the suffix array that show a neighbour, in ascending order.
    """

    name: str
    tokens: NDArray[Any]
    suffix_array: NDArray[np.uint32]
    top: NDArray[np.uint64]
    bits: int
    grams: NDArray[np.uint64]
    to_global: NDArray[np.uint32]
    vocabulary: int
    document_starts: NDArray[np.uint32]
    documents: DocumentTable
    removed: tuple[int, ...]
    ngram: NgramTable | None
    dense: DenseIndex | None = None
    hidden: NDArray[np.uint32] = field(default_factory=lambda: _NONE)

    @cached_property
    def to_local(self) -> NDArray[np.int32]:
        """Local id of each token id, (vocabulary,) int32, 0 for tokens not in the segment; made on first use."""
        made = np.zeros(self.vocabulary, np.int32)
        made[self.to_global[1:]] = np.arange(1, len(self.to_global), dtype=np.int32)
        return made

    def document_of(self, position: int) -> int:
        """Return the number of the document that contains a token position."""
        return int(np.searchsorted(self.document_starts, position, side="right")) - 1

    def text_ids(self, document: int) -> NDArray[np.uint32]:
        """Return the token ids of one document, (length,) uint32."""
        start, end = int(self.document_starts[document]), int(self.document_starts[document + 1]) - 1
        return self.ids_of(self.tokens[start:end])

    def ids_of(self, local: NDArray[Any]) -> NDArray[np.uint32]:
        """Convert local ids to token ids, (n,) uint32.

        Raises
        ------
        StoreCorruptError
            The text is damaged: it has undefined local ids.
        """
        try:
            ids: NDArray[np.uint32] = self.to_global[local]
        except IndexError:
            expected = f"local ids below {len(self.to_global)} in the text of segment {self.name}"
            raise StoreCorruptError(expected, f"{int(local.max())}") from None
        return ids

    def localise(self, token_ids: NDArray[Any]) -> NDArray[np.int64]:
        """Convert token ids to local ids, (n,) int64; 0 for tokens that the segment does not use."""
        ids = np.asarray(token_ids, np.int64)
        known = (ids >= 0) & (ids < len(self.to_local))
        return np.where(known, self.to_local[np.where(known, ids, 0)], 0).astype(np.int64)


def bits_of(vocabulary: int) -> int:
    """Return the bits per packed local id in a segment with `vocabulary` different tokens."""
    return max(1, int(vocabulary).bit_length())


def local_ids(token_ids: NDArray[np.uint32], starts: NDArray[np.uint32]) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """Assign local ids to the tokens of a text.

    Parameters
    ----------
    token_ids
        (n,) uint32 token ids; entries at ``starts[1:] - 1`` are separators, whose values do not matter and are
        overwritten.
    starts
        (d + 1,) uint32 start of each document, and n; no document is empty.

    Returns
    -------
    tokens, to_global
        (n,) uint16 or uint32 local ids, 0 for separators, and the token id of each local id.
    """
    ends = starts[1:].astype(np.int64) - 1
    token_ids[ends] = token_ids[ends - 1]
    used = np.zeros(int(token_ids.max(initial=0)) + 1, np.bool_)
    used[token_ids] = True
    to_global = np.concatenate([[0], np.flatnonzero(used)]).astype(np.uint32)
    dtype = np.uint16 if len(to_global) <= 1 << 16 else np.uint32
    to_local = np.zeros(len(used), dtype)
    to_local[to_global[1:]] = np.arange(1, len(to_global), dtype=dtype)
    tokens = to_local[token_ids]
    tokens[ends] = 0
    return tokens, to_global


def index_text(tokens: NDArray[Any], to_global: NDArray[np.uint32], config: StoreConfig) -> dict[str, NDArray[Any]]:
    """Return the arrays of a segment that depend on its text only, by name: text, exact index and n-gram table.

    Parameters
    ----------
    tokens, to_global
        From `local_ids`.
    config
        What to keep, and limits.
    """
    sa = suffix_array(tokens)
    arrays: dict[str, NDArray[Any]] = {}
    beginnings = suffix_beginnings(tokens, sa)
    if config.index != "ngram":
        top = sa_top_table(tokens, sa, bits_of(len(to_global) - 1))
        arrays |= {"tokens": tokens, "suffix_array": sa, "top": top}
        arrays["grams"] = build_grams(tokens, to_global, beginnings)
    if config.index != "exact":
        ngrams = build_ngrams(tokens, sa, to_global, config, beginnings)
        arrays |= {f"ngram_{f.name}": getattr(ngrams, f.name).ravel() for f in fields(ngrams)}
    return arrays


def write_segment(
    folder: Path, token_ids: NDArray[np.uint32], rows: Sequence[Row], config: StoreConfig
) -> tuple[dict[str, FileEntry], tuple[Origin, ...]]:
    """Index a text, and write the files of a segment.

    Parameters
    ----------
    folder
        Empty folder, to be moved into place afterwards.
    token_ids
        (n,) uint32 token ids, with one more entry after the tokens of each document; modified.
    rows
        The documents.
    config
        What to keep, and limits.

    Returns
    -------
    files, origins
        Files by name, and the origins to whose numbers the document table refers.
    """
    starts = np.cumsum([0, *(row.tokens + 1 for row in rows)], dtype=np.int64).astype(np.uint32)
    tokens, to_global = local_ids(token_ids, starts)
    del token_ids
    table, origins = table_arrays(rows)
    arrays = {"vocabulary": to_global, "documents": starts, **table, **index_text(tokens, to_global, config)}
    return write_files(folder, {name + SUFFIX: array for name, array in sorted(arrays.items())}), origins


def open_segment(
    folder: Path,
    entry: SegmentEntry,
    vocabulary: int,
    record: DenseRecord | None = None,
    tombstones: Mapping[str, NDArray[np.uint32]] = _NO_TOMBSTONES,
    *,
    as_written: bool = False,
) -> Segment:
    """Map a segment into memory, after cheap checks of files and sizes.

    Parameters
    ----------
    folder, entry
        The segment's folder, and its entry in the manifest.
    vocabulary, record
        From the store's manifest.
    tombstones
        Its tombstones (`tombstones_of`); None: open the files unchanged.
    as_written
        Whether removed documents stay in the indexes, for readers that do not draft.

    Raises
    ------
    StoreCorruptError
        A file is missing or has the wrong size, or the vocabulary is damaged (its ids would reach the model).
    """
    place = os.path.join(folder, "")
    hiding = not as_written and any(map(len, tombstones.values()))

    def load(name: str, scattered: bool = False, private: bool = False) -> NDArray[Any]:
        file, dtypes = entry.files.get(name + SUFFIX), _DTYPES.get(name, ("<u4",))
        if file is None:
            return np.empty(0, dtypes[0])
        return map_array(place + name + SUFFIX, file, dtypes, scattered=scattered, private=private)

    to_global, starts = load("vocabulary"), load("documents")
    if not len(to_global) or int(to_global.max()) >= vocabulary:
        raise StoreCorruptError(f"token ids below {vocabulary:,} in {folder / 'vocabulary.bin'}", "others")
    if len(starts) < 2:
        raise StoreCorruptError(f"documents in {folder}", "none")
    ngrams = None
    if "ngram_slots" + SUFFIX in entry.files:
        slots, *successors = (load(f"ngram_{f.name}", private=hiding) for f in fields(NgramTable))
        if not len(slots) or len(slots) % SLOT:
            raise StoreCorruptError(f"an n-gram table in {folder}", f"{len(slots):,} numbers")
        ngrams = NgramTable(slots.reshape(-1, SLOT), *successors)
    removed = hidden_of(tombstones, len(starts) - 1, entry.name)
    table = {name: load(name) for name in TABLE}
    dense = None
    if record is not None and INDEX in entry.files:
        dense = DenseIndex(folder, entry.files, record, starts, removed)
    segment = Segment(
        entry.name,
        load("tokens", scattered=True),
        load("suffix_array", scattered=True, private=hiding),
        load("top", private=hiding),
        bits_of(len(to_global) - 1),
        load("grams", scattered=True),
        to_global,
        vocabulary,
        starts,
        DocumentTable(entry.name, entry.added_at, entry.origins, starts, table, removed),
        removed,
        ngrams,
        dense,
        tombstones[RANKS],
    )
    suffixes, shown = len(segment.suffix_array), len(segment.top) << TOP_SHIFT
    if not 0 <= shown - suffixes < 1 << TOP_SHIFT or (suffixes and not len(segment.tokens)):
        raise StoreCorruptError(f"a text, its {suffixes:,} suffixes and their top table in {folder}", "another size")
    if hiding:
        _hide(segment)
    return segment


def _hide(segment: Segment) -> None:
    """Hide removed documents in a segment's privately mapped indexes.

    Raises
    ------
    StoreCorruptError
        The tombstones do not fit the segment.
    """
    tokens, sa, top, ngrams, ranks = segment.tokens, segment.suffix_array, segment.top, segment.ngram, segment.hidden
    altered: list[NDArray[Any]] = [sa, top]
    if len(ranks):
        if not (ranks[1:] > ranks[:-1]).all() or len(ranks) >= len(sa) or int(ranks[-1]) >= len(sa):
            raise StoreCorruptError(f"tombstones of {len(sa):,} suffixes of segment {segment.name}", "others")
        first = np.flatnonzero(np.diff(ranks.astype(np.int64), prepend=-2) != 1)  # starts of runs of consecutive ranks
        shown = ranks[first].astype(np.int64) - 1
        if shown.size and shown[0] < 0:  # there is none before: take the next one after
            shown[0] = first[1] if len(first) > 1 else len(ranks)
        sa[ranks] = np.repeat(sa[shown], np.diff(first, append=len(ranks)))
        sampled = ranks[ranks & ((1 << TOP_SHIFT) - 1) == 0]
        top[sampled >> TOP_SHIFT] = sa_top_table(tokens, np.repeat(sa[sampled], 1 << TOP_SHIFT), segment.bits)
    if ngrams is not None:
        altered += [ngrams.slots, ngrams.succ_tokens, ngrams.succ_counts]
        for number in segment.removed:
            forget_document(segment.text_ids(number), ngrams.slots, ngrams.succ_tokens, ngrams.succ_counts)
    for array in altered:
        array.flags.writeable = False


def suffix_array(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    """Sort the suffixes of a segment.

    Parameters
    ----------
    tokens
        (n,) uint16 or uint32 local ids, n < 2^31; memory grows with the largest id.

    Returns
    -------
    numpy.ndarray
        (m,) uint32 positions of tokens, m ≤ n, in the order of the text that starts there, without separators.
    """
    found = sort_suffixes(tokens, int(tokens.max(initial=0)) + 1)
    return found[len(tokens) - np.count_nonzero(tokens) :].view(np.uint32)
