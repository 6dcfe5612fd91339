from __future__ import annotations

import sys

import numpy as np
import pytest
from numba import njit

from retrieve_spec.kernels import views


def reader(view):
    @njit
    def read(address, size):
        return view(address, size).copy()

    return read


@pytest.mark.parametrize(
    ("view", "dtype"),
    [
        (views.view_i32, np.int32),
        (views.view_u16, np.uint16),
        (views.view_u32, np.uint32),
        (views.view_i64, np.int64),
        (views.view_u64, np.uint64),
        (views.view_f32, np.float32),
    ],
)
def test_views_show_the_array_itself(view, dtype):
    read = reader(view)
    array = np.array([0, 1, 2**15, 7], np.int64).astype(dtype)
    seen = read(array.ctypes.data, len(array))
    assert seen.dtype == dtype
    assert seen.tolist() == array.tolist()
    array[1] = 5
    assert read(array.ctypes.data + array.itemsize, 2).tolist() == array[1:3].tolist()
    assert len(read(array.ctypes.data, 0)) == 0


@njit
def place(array, first, token):
    return views.place_among_eight(array.ctypes.data + 4 * first, token)


def test_a_token_is_found_among_eight():
    array = np.array([5, -1, 7, 7, 2**31 - 1, 0, 3, 9, 5, 4, 1, 7], np.int32)
    for first in range(5):  # wherever they begin
        eight = array[first : first + 8].tolist()
        for token in {*array.tolist(), 6, -2}:
            wanted = eight.index(token) if token in eight else 8
            assert place(array, first, np.int32(token)) == wanted


@njit
def write(address, rows, width):
    views.view_rows(address, rows, width)[1, 2] = 9


def test_rows_are_in_place():
    array = np.zeros((3, 4), np.int32)
    write(array.ctypes.data, 3, 4)
    assert array[1, 2] == 9 and array.sum() == 9


@njit
def write_through(array):
    views.prefetch(array.ctypes.data)
    views.borrowed(array)[1, 0] = 7
    return views.borrowed(array).sum()


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.uint16])
def test_a_borrowed_array_is_the_array_and_no_reference(dtype):
    array = np.arange(6).reshape(3, 2).astype(dtype)
    before = sys.getrefcount(array)
    assert write_through(array) == 15 - 2 + 7
    assert array[1, 0] == 7
    assert sys.getrefcount(array) == before


@njit
def rows_of(address, rows, width):
    return views.view_i64_rows(address, rows, width).copy(), views.view_u64_rows(address, rows, width).copy()


def test_rows_of_words():
    array = np.arange(6).reshape(3, 2)
    for seen in rows_of(array.ctypes.data, 3, 2):
        assert seen.tolist() == array.tolist()
