"""Kernels that tell whether a weight is what it was: against obvious loops, and on every single change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from retrieve_spec.kernels.checksum import checksum, is_diagonal, read_diagonal

FACTOR, STEP, MODULUS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 2**64


def naive_checksum(words: list[int]) -> int:
    eights = len(words) // 8 * 8
    total = 0
    for lane in range(8):
        part = 0
        for word in words[lane:eights:8] + (words[eights:] if lane == 0 else []):
            part = (part * FACTOR + word) % MODULUS
        total = part if lane == 0 else (total * STEP + part) % MODULUS
    return total


def naive_diagonal(words: NDArray[np.uint32]) -> list[int]:
    rows, columns = words.shape
    return [int(words[i % rows, i % columns]) for i in range(max(rows, columns))]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70), st.data())
def test_checksum_is_the_naive_one_and_sees_every_single_change(words: list[int], data: st.DataObject) -> None:
    array = np.array(words, np.uint32)
    before = int(checksum(array))
    assert before == naive_checksum(words)
    at = data.draw(st.integers(0, len(words) - 1))
    array[at] ^= np.uint32(data.draw(st.integers(1, 2**32 - 1)))
    assert int(checksum(array)) != before
    if words[0] != words[-1]:
        assert int(checksum(np.array(words[::-1], np.uint32))) != before


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_the_diagonal_meets_every_row_and_column(rows: int, columns: int, data: st.DataObject) -> None:
    words = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    sample = np.empty(max(rows, columns), np.uint32)
    read_diagonal(words, sample)
    assert sample.tolist() == naive_diagonal(words) and is_diagonal(words, sample)
    changed = words.copy()
    changed[data.draw(st.integers(0, rows - 1))] += 100
    assert not is_diagonal(changed, sample)
    changed = words.copy()
    changed[:, data.draw(st.integers(0, columns - 1))] += 100
    assert not is_diagonal(changed, sample)
