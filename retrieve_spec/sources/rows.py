"""Source row: a source as the kernels read it, held together with the arrays that it points into.

Kernels read any number of sources through one table of integers (`kernels/source_table.py`), and some of the integers
are addresses. An address says nothing about whether its array still exists, so none is ever kept alone: a row holds the
arrays that its addresses were taken from, a table holds its rows, and a source whose arrays were replaced gives another
row. What is read through an old row is old, and never freed.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.source_table import KIND, NUMBER, RESTING, ROW

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
