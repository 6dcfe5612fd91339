"""Source rows: a source as the kernels read it, with the arrays that its addresses point to.

Kernels read any number of sources through one table of records (`kernels/source_table.py`), and some of their fields
are addresses. An address says nothing about whether its array still exists, so none is ever kept alone: a row holds the
arrays that its addresses were taken from, a table holds its rows, and a source whose arrays were replaced gives another
row. What is read through an old row is old, and never freed.

Sources that are little more than their rows are here, too: an expected text, alignments, open datastores.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment
from retrieve_spec.kernels.ngram import MAX_ORDER
from retrieve_spec.kernels.request import HYPOTHESES
from retrieve_spec.kernels.source_table import KIND_ALIGNMENT, KIND_EXACT, KIND_NGRAM, KIND_PREDICTION, SOURCE

if TYPE_CHECKING:
    from retrieve_spec.datastore.segment import Segment
    from retrieve_spec.datastore.store import Datastore

_LINE, _LARGE = 64, 1 << 21
"""Bytes of a cache line, and of a large page."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A source as kernels read it.

    Attributes
    ----------
    record
        (1,) `SOURCE`, some of whose numbers are addresses.
    arrays
        The arrays that these were taken from.
    """

    record: NDArray[Any]
    arrays: tuple[NDArray[Any], ...]


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array's first element; the caller keeps the array alive."""
    address: int = array.__array_interface__["data"][0]
    return address


def source_row(kind: int, number: int, layout: str, **fields: NDArray[Any] | int) -> Row:
    """Return the row of a source.

    Parameters
    ----------
    kind, number
        What it is, and its place in `retrieve_spec.sources.SOURCE_NAMES`.
    layout
        The field of `SOURCE` that holds what the kind keeps.
    **fields
        Its fields by name: arrays to point to (contiguous, and never resized in place), and numbers.
    """
    record = np.zeros(1, SOURCE)
    record["kind"], record["number"] = kind, number
    for name, value in fields.items():
        record[layout][name] = address_of(value) if isinstance(value, np.ndarray) else value
    return Row(record, tuple(value for value in fields.values() if isinstance(value, np.ndarray)))


class SourceTable:
    """Rows of all sources of a request.

    Whoever hands `records` to a kernel holds the table until the kernel returns.

    Parameters
    ----------
    rows
        In the order in which they win ties in match length.

    Attributes
    ----------
    records
        (s,) `SOURCE`, what kernels read. They write to nothing but `disabled`.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self.records = np.zeros(len(rows), SOURCE)
        for place, row in enumerate(rows):  # joining them would compare the types field by field
            self.records[place] = row.record[0]

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, place: int, row: Row) -> None:
        """Set the row of a source; a disabled source stays disabled."""
        if row is self._rows[place]:
            return
        disabled = self.records[place]["disabled"]
        self.records[place] = row.record[0]
        self.records[place]["disabled"] = disabled
        self._rows[place] = row


def on_large_pages(size: int, dtype: type) -> NDArray[Any]:
    """Return zeros (size,), aligned to a cache line, on large pages if the system has them and they fill half of one.

    A pass reads a few hundred lines here and there. In small pages, finding where each lies takes longer than reading
    it, most of all in a virtual machine.
    """
    used = size * np.dtype(dtype).itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE") or used < _LARGE // 2:
        begin, room = _LINE, np.zeros(used + _LINE, np.uint8)
    else:
        begin, private = _LARGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, (-(-used // _LARGE) + 1) * _LARGE, flags=private)
        with contextlib.suppress(OSError):  # not supported by this system
            memory.madvise(mmap.MADV_HUGEPAGE)
        room = np.frombuffer(memory, np.uint8)
    first = -room.__array_interface__["data"][0] % begin
    return room[first : first + used].view(dtype)


class Prediction:
    """Expected text with up to three cursors: rows of (position of the next expected token, tokens matched).

    As long as the output follows the text the first cursor moves along. When it leaves, the first cursor goes where
    the newest tokens match best (nearest place on a tie), the second assumes that one token was replaced, the third
    that something is being inserted before the text goes on.
    """

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self.text = np.ascontiguousarray(token_ids, np.int32)
        self.cursors: NDArray[np.int64] = np.zeros((HYPOTHESES, 4), np.int64)
        self.cursors[1:, 1] = -1

    def row(self, number: int) -> Row:
        """Row of the mixture's source table (the same for each cursor)."""
        return source_row(
            KIND_PREDICTION, number, "prediction", text=self.text, cursors=self.cursors, length=len(self.text)
        )


class Alignments:
    """Copies with edits: continue where an exact context ends, and remember how the copy differed.

    Half a megabyte, however long the text is: of longer ones than `retrieve_spec.kernels.alignment.WINDOW` tokens the
    newest are known.
    """

    def __init__(self) -> None:
        self.text: NDArray[np.int32] = np.zeros(alignment.WINDOW, np.int32)
        self.places: NDArray[np.int32] = np.zeros(alignment.SLOTS, np.int32)
        self.kept: NDArray[np.int64] = np.zeros((alignment.KEPT, alignment.WIDTH), np.int64)
        self.meta: NDArray[np.int64] = np.zeros(alignment.COPY_META, np.int64)

    def reset(self) -> None:
        """Begin another text."""
        if self.meta[0]:  # else leave untouched memory unallocated
            self.places[:] = 0
        self.kept[:] = 0
        self.meta[:] = 0

    def row(self, number: int) -> Row:
        """Row of the mixture's source table; its arrays are never replaced."""
        return source_row(
            KIND_ALIGNMENT, number, "alignment", text=self.text, places=self.places, kept=self.kept, meta=self.meta
        )


def store_rows(stores: Sequence[Datastore], ngram_number: int, exact_number: int) -> tuple[list[Row], list[Row]]:
    """Return rows of the n-gram tables and suffix arrays of all segments, numbered over all stores.

    They keep the stores' maps open. Orders that an n-gram table has are left to the table.
    """
    ngram, exact = list[Row](), list[Row]()
    segments = [(store, number) for store in stores for number in range(len(store.segments))]
    for place, (store, number) in enumerate(segments):
        segment = store.segments[number]
        if segment.ngram is not None:
            ngram.append(_ngram_row(store, number, ngram_number))
        if len(segment.suffix_array):
            min_depth = 1 if segment.ngram is None else MAX_ORDER + 1
            exact.append(_exact_row(segment, exact_number, min_depth, place))
    return ngram, exact


def _ngram_row(store: Datastore, place: int, number: int) -> Row:
    table, contexts = store.segments[place].ngram, store.contexts
    assert table is not None
    filtered = contexts.columns[place] >= 0
    return source_row(
        KIND_NGRAM,
        number,
        "ngram",
        slots=table.slots,
        tokens=table.succ_tokens,
        counts=table.succ_counts,
        marks=contexts.marks,
        num_slots=len(table.slots),
        num_successors=len(table.succ_tokens),
        token_bytes=table.succ_tokens.dtype.itemsize,
        orders=MAX_ORDER,
        vocabulary=store.segments[place].vocabulary,
        buckets=len(contexts.marks) if filtered else 0,
        words=contexts.marks.shape[1],
        column=max(contexts.columns[place], 0),
    )


def _exact_row(segment: Segment, number: int, min_depth: int, place: int) -> Row:
    return source_row(
        KIND_EXACT,
        number,
        "exact",
        tokens=segment.tokens,
        suffixes=segment.suffix_array,
        to_local=segment.to_local,
        to_global=segment.to_global,
        top=segment.top,
        grams=segment.grams,
        length=len(segment.tokens),
        token_bytes=segment.tokens.dtype.itemsize,
        num_suffixes=len(segment.suffix_array),
        vocabulary=segment.vocabulary,
        num_local=len(segment.to_global),
        top_size=len(segment.top),
        num_grams=len(segment.grams),
        top_bits=segment.bits,
        min_depth=min_depth,
        segment=place,
    )
