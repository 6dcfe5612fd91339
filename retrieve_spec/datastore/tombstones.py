"""Tombstones: what counts as removed of a segment whose files do not change.

A segment's tombstones are up to three files of the store, named by what they hold: ``…-documents.bin``, the numbers of
removed documents; ``…-ranks.bin``, where their suffixes stand in its suffix array; and ``…-copies.bin``, the numbers of
documents whose text another segment has too: those are not listed, but what they say may be drafted.

A segment with tombstones is mapped privately, and the pages that a removed document touches are altered in memory
(`retrieve_spec.kernels.tombstones`). So it costs time and memory in proportion to what was removed: beyond
`MOST_TOKENS` of a segment, a removal writes the segment anew instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.files import FileEntry, map_array, read_in_order, write_files
from retrieve_spec.datastore.manifest import TOMBSTONES, SegmentEntry
from retrieve_spec.datastore.ngrams import NgramTable
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.tombstones import forget_document, hide_suffixes, hide_tops, ranks_of

MOST_TOKENS = 1 << 17
"""Removed tokens of one segment up to which tombstones are kept."""
DOCUMENTS, RANKS, COPIES = "documents", "ranks", "copies"


def no_tombstones() -> dict[str, NDArray[np.uint32]]:
    """Arrays of the tombstones of a segment that has none, by kind."""
    return {kind: np.empty(0, np.uint32) for kind in (DOCUMENTS, RANKS, COPIES)}


def tombstones_of(store: Path, entry: SegmentEntry) -> dict[str, NDArray[np.uint32]]:
    """Arrays of a segment's tombstones by kind; kinds that it has none of are empty.

    Raises
    ------
    StoreCorruptError
        When a file is missing or has another size.
    """
    found = no_tombstones()
    for name, file in entry.tombstones.items():
        kind = name.removesuffix(".bin").rpartition("-")[2]
        if kind not in found:
            raise StoreCorruptError(f"tombstones of a kind in {store}", name)
        found[kind] = map_array(store / TOMBSTONES / name, file)
    return found


def hidden_of(found: dict[str, NDArray[np.uint32]], documents: int, segment: str) -> tuple[int, ...]:
    """Numbers of the documents that are not listed: removed ones and copies.

    Raises
    ------
    StoreCorruptError
        When they are no documents of the segment.
    """
    numbers = np.union1d(found[DOCUMENTS], found[COPIES])
    if len(numbers) and int(numbers[-1]) >= documents:
        raise StoreCorruptError(f"tombstones of {documents:,} documents of segment {segment}", "others")
    return tuple(numbers.tolist())


def write_tombstones(folder: Path, segment: str, arrays: dict[str, NDArray[np.uint32]]) -> dict[str, FileEntry]:
    """Write tombstones into a folder, from which `publish` moves them into the store."""
    folder.mkdir(exist_ok=True)
    named = {}
    for kind, array in arrays.items():
        if len(array):
            content = np.ascontiguousarray(array, "<u4")
            named[f"{segment}-{hashlib.sha256(content.data).hexdigest()[:12]}-{kind}.bin"] = content
    return write_files(folder, named)


def document_tokens(starts: NDArray[np.uint32], numbers: Iterable[int]) -> int:
    """Tokens of some documents of a segment."""
    chosen = np.fromiter(numbers, np.int64)
    lengths = starts[chosen + 1].astype(np.int64) - starts[chosen].astype(np.int64) - 1
    return int(lengths.sum())


def find_ranks(sa: NDArray[np.uint32], starts: NDArray[np.uint32], numbers: Sequence[int]) -> NDArray[np.uint32]:
    """Where the suffixes of some documents stand in a suffix array, rising.

    Parameters
    ----------
    sa, starts
        Of the segment.
    numbers
        The documents, at least one, rising.

    Raises
    ------
    StoreCorruptError
        When the array lacks one of their suffixes.
    """
    first, last = int(starts[numbers[0]]), int(starts[numbers[-1] + 1])
    gone = np.zeros(last - first, np.bool_)
    for number in numbers:
        gone[int(starts[number]) - first : int(starts[number + 1]) - 1 - first] = True
    ranks = np.empty(int(gone.sum()), np.uint32)
    with read_in_order(sa):
        found = ranks_of(sa, first, last, np.packbits(gone, bitorder="little"), ranks)
    if found < len(ranks):
        raise StoreCorruptError(f"{len(ranks):,} suffixes of removed documents in a suffix array", f"{found:,}")
    return ranks


def hide(
    segment: str,
    tombstones: dict[str, NDArray[np.uint32]],
    tokens: NDArray[Any],
    sa: NDArray[np.uint32],
    top: NDArray[np.uint64],
    bits: int,
) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Suffix array and top table, both mapped privately, without what the tombstones name.

    Raises
    ------
    StoreCorruptError
        When the tombstones do not fit the segment.
    """
    ranks = tombstones[RANKS]
    rising = bool((ranks[1:] > ranks[:-1]).all())
    if not rising or (len(ranks) and int(ranks[-1]) >= len(sa)) or len(ranks) >= max(len(sa), 1):
        raise StoreCorruptError(f"tombstones of {len(sa):,} suffixes of segment {segment}", "others")
    if len(ranks):
        hide_suffixes(sa, ranks)
        hide_tops(tokens, sa, ranks, bits, top)
    sa.flags.writeable = top.flags.writeable = False
    return sa, top


def forget(table: NgramTable, texts: Iterable[NDArray[np.uint32]]) -> NgramTable:
    """N-gram table, mapped privately, without the counts of removed texts."""
    for ids in texts:
        forget_document(ids, table.slots, table.succ_tokens, table.succ_counts)
    for array in (table.slots, table.succ_tokens, table.succ_counts):
        array.flags.writeable = False
    return table
