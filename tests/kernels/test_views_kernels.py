from __future__ import annotations

import numpy as np
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
