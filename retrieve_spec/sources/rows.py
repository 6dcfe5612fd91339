"""Source row: a source as the kernels read it, held together with the arrays that it points into.

Kernels read any number of sources through one table of integers (`kernels/source_table.py`), and some of the integers
are addresses. An address says nothing about whether its array still exists, so none is ever kept alone: a row holds the
arrays that its addresses were taken from, a table holds its rows, and a source whose arrays were replaced gives another
row. What is read through an old row is old, and never freed.

Sources that are little more than their rows are here, too: an expected text, alignments, open datastores.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment, source_table
from retrieve_spec.kernels.ngram import MAX_ORDER
from retrieve_spec.kernels.request import HYPOTHESES
from retrieve_spec.kernels.source_table import KIND, NUMBER, RESTING, ROW

if TYPE_CHECKING:
    from retrieve_spec.datastore.segment import Segment
    from retrieve_spec.datastore.store import Datastore

_LINE, _LARGE = 64, 1 << 21
"""Bytes that memory is read by, and of a large page."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Integers for a kernel, and the arrays that some of them point to.

    Attributes
    ----------
    words
        (w,) int64, some of them addresses.
    arrays
        The arrays that these were taken from.
    """

    words: NDArray[np.int64]
    arrays: tuple[NDArray[Any], ...]

    @classmethod
    def of(cls, width: int, arrays: Mapping[int, NDArray[Any]], numbers: Mapping[int, int]) -> Row:
        """Row of so many integers.

        Parameters
        ----------
        width
            How many; those that are not given are 0.
        arrays, numbers
            By column, the arrays to point to (contiguous, and never resized in place), and all other integers.
        """
        words = np.zeros(width, np.int64)
        for column, array in arrays.items():
            words[column] = array.__array_interface__["data"][0]
        for column, value in numbers.items():
            words[column] = value
        return cls(words, tuple(arrays.values()))


def source_row(kind: int, number: int, arrays: Mapping[int, NDArray[Any]], numbers: Mapping[int, int]) -> Row:
    """Row of a source.

    Parameters
    ----------
    kind, number
        What it is, and its place in `retrieve_spec.sources.SOURCE_NAMES`.
    arrays, numbers
        As for `Row.of`; `kernels/source_table.py` says what stands where.
    """
    return Row.of(ROW, arrays, {KIND: kind, NUMBER: number, **numbers})


class SourceTable:
    """Rows of all sources of a request.

    Whoever hands `words` to a kernel holds the table until the kernel returns.

    Parameters
    ----------
    rows
        In the order in which they win ties in match length.

    Attributes
    ----------
    words
        (s, ROW) int64, what kernels read. Only their `RESTING` column is written to.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self.words = np.array([row.words for row in rows], np.int64).reshape(len(rows), ROW)

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, place: int, row: Row) -> None:
        """Let a source be read through this row from now on; it rests as it did."""
        if row is self._rows[place]:
            return
        resting = self.words[place, RESTING]
        self.words[place] = row.words
        self.words[place, RESTING] = resting
        self._rows[place] = row


def on_large_pages(size: int, dtype: type) -> NDArray[Any]:
    """Zeros that begin with a line of memory, (size,), on large pages where there are such and they fill half of one.

    A pass reads a few hundred lines here and there. In small pages, finding where each lies takes longer than reading
    it, most of all in a virtual machine.
    """
    used = size * np.dtype(dtype).itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE") or used < _LARGE // 2:
        begin, room = _LINE, np.zeros(used + _LINE, np.uint8)
    else:
        begin, private = _LARGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, (-(-used // _LARGE) + 1) * _LARGE, flags=private)
        with contextlib.suppress(OSError):  # a system without
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
            source_table.PREDICTION,
            number,
            {source_table.PREDICTION_TEXT: self.text, source_table.PREDICTION_CURSORS: self.cursors},
            {source_table.PREDICTION_LENGTH: len(self.text)},
        )


class Alignments:
    """Copies that were edited: goes on where an exact context ends, and remembers how the copy differed.

    Half a megabyte, however long the text is: of longer ones than `retrieve_spec.kernels.alignment.WINDOW` tokens the
    newest are known.
    """

    def __init__(self) -> None:
        self.text: NDArray[np.int32] = np.zeros(alignment.WINDOW, np.int32)
        self.places: NDArray[np.int32] = np.zeros(alignment.SLOTS, np.int32)
        self.kept: NDArray[np.int64] = np.zeros((alignment.KEPT, alignment.WIDTH), np.int64)
        self.meta: NDArray[np.int64] = np.zeros(alignment.META, np.int64)

    def reset(self) -> None:
        """Begin another text."""
        if self.meta[0]:  # else memory that was never touched stays so
            self.places[:] = 0
        self.kept[:] = 0
        self.meta[:] = 0

    def row(self, number: int) -> Row:
        """Row of the mixture's source table; its arrays are never replaced."""
        return source_row(
            source_table.ALIGNMENT,
            number,
            {
                source_table.ALIGNMENT_TEXT: self.text,
                source_table.ALIGNMENT_PLACES: self.places,
                source_table.ALIGNMENT_KEPT: self.kept,
                source_table.ALIGNMENT_META: self.meta,
            },
            {},
        )


def store_rows(stores: Sequence[Datastore], ngram_number: int, exact_number: int) -> tuple[list[Row], list[Row]]:
    """Rows of the n-gram tables and of the suffix arrays of all segments, numbered over all stores.

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
        source_table.NGRAM,
        number,
        {
            source_table.NGRAM_SLOTS: table.slots,
            source_table.NGRAM_TOKENS: table.succ_tokens,
            source_table.NGRAM_COUNTS: table.succ_counts,
            source_table.NGRAM_MARKS: contexts.marks,
        },
        {
            source_table.NGRAM_NUM_SLOTS: len(table.slots),
            source_table.NGRAM_SIZE: len(table.succ_tokens),
            source_table.NGRAM_ITEMSIZE: table.succ_tokens.dtype.itemsize,
            source_table.NGRAM_ORDERS: MAX_ORDER,
            source_table.NGRAM_VOCABULARY: store.segments[place].vocabulary,
            source_table.NGRAM_BUCKETS: len(contexts.marks) if filtered else 0,
            source_table.NGRAM_WORDS: contexts.marks.shape[1],
            source_table.NGRAM_COLUMN: max(contexts.columns[place], 0),
        },
    )


def _exact_row(segment: Segment, number: int, min_depth: int, place: int) -> Row:
    return source_row(
        source_table.EXACT,
        number,
        {
            source_table.EXACT_TOKENS: segment.tokens,
            source_table.EXACT_SUFFIXES: segment.suffix_array,
            source_table.EXACT_TO_LOCAL: segment.to_local,
            source_table.EXACT_TO_GLOBAL: segment.to_global,
            source_table.EXACT_TOP: segment.top,
            source_table.EXACT_GRAMS: segment.grams,
        },
        {
            source_table.EXACT_LENGTH: len(segment.tokens),
            source_table.EXACT_ITEMSIZE: segment.tokens.dtype.itemsize,
            source_table.EXACT_NUM_SUFFIXES: len(segment.suffix_array),
            source_table.EXACT_VOCABULARY: segment.vocabulary,
            source_table.EXACT_NUM_LOCAL: len(segment.to_global),
            source_table.EXACT_TOP_SIZE: len(segment.top),
            source_table.EXACT_NUM_GRAMS: len(segment.grams),
            source_table.EXACT_TOP_BITS: segment.bits,
            source_table.EXACT_MIN_DEPTH: min_depth,
            source_table.EXACT_SEGMENT: place,
        },
    )
