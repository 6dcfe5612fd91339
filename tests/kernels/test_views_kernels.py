from __future__ import annotations

import sys

import numpy as np
import pytest
from numba import njit

from retrieve_spec.kernels import views


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
