from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from retrieve_spec.kernels import views


@njit
def read(function, address, size):
    return function(address, size).copy()


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
    array = np.array([0, 1, 2**15, 7], np.int64).astype(dtype)
    seen = read(view, array.ctypes.data, len(array))
    assert seen.dtype == dtype
    assert seen.tolist() == array.tolist()
    array[1] = 5
    assert read(view, array.ctypes.data + array.itemsize, 2).tolist() == array[1:3].tolist()
    assert len(read(view, array.ctypes.data, 0)) == 0


@njit
def write(address, rows, width):
    views.view_rows(address, rows, width)[1, 2] = 9


def test_rows_are_in_place():
    array = np.zeros((3, 4), np.int32)
    write(array.ctypes.data, 3, 4)
    assert array[1, 2] == 9 and array.sum() == 9
