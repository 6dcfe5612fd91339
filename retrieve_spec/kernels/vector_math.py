"""Functions of float32 numbers in forms that compilers vectorise, for kernels."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner

REASSOCIATE = {"reassoc", "nsz"}
"""LLVM's flags for functions whose sums have any order."""


@inner
def exp(x: np.float32) -> np.float32:
    """Return e to the power of x, in a form that the compiler vectorises (Cephes' expf)."""
    x = min(max(x, np.float32(-87.3)), np.float32(89.0))  # infinite above 88.4
    whole = np.rint(x * np.float32(1.44269504))
    rest = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    series = np.float32(1.9875691500e-4) * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    power = np.uint32(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)).view(np.float32)
    return (series * rest * rest + rest + np.float32(1.0)) * power  # type: ignore[no-any-return]


@inner
def _ordered(bits: np.int32) -> np.int32:
    """Map float32 bits to an integer of the same order, and back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(cache=True, nogil=True)
def largest(numbers: NDArray[np.float32]) -> np.float32:
    """Return the largest number, compared as integers: the compiler does not vectorise maxima of floats."""
    bits, top = numbers.view(np.int32), _ordered(np.float32(-np.inf).view(np.int32))
    for j in range(len(bits)):
        top = np.int32(max(top, _ordered(bits[j])))
    return np.int32(_ordered(top)).view(np.float32)  # type: ignore[no-any-return]
