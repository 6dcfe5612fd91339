"""Kernels over float32 and over bfloat16, written once.

A kernel takes one number of the format, `like`: a float32, or a uint16 that stands for the bits of bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import config, types
from numba.extending import overload
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.views import view_f32, view_u16

LIKE = {torch.float32: np.float32(0.0), torch.bfloat16: np.uint16(0)}
"""By type of tensor, a number of the format."""
_NAN = np.uint16(0x7FC0)


def bytes_of(like: Any) -> int:
    """Bytes of a number."""
    return int(like.itemsize)


def view_numbers(address: int, size: int, like: Any) -> NDArray[Any]:
    """(size,) numbers at an address."""
    return view_f32(address, size) if isinstance(like, np.float32) else view_u16(address, size)


def wide(number: Any) -> np.float32:
    """A number as float32."""
    return number if isinstance(number, np.float32) else _wide(number)


def narrow(number: np.float32, like: Any) -> Any:
    """The nearest number of the format, of two as near the even one."""
    return number if isinstance(like, np.float32) else _narrow(number)


@inner
def _wide(bits: np.uint16) -> np.float32:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)  # type: ignore[no-any-return]


@inner
def _narrow(number: np.float32) -> np.uint16:
    bits = np.float32(number).view(np.uint32)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return rounded if number == number else _NAN


if not config.DISABLE_JIT:

    @overload(bytes_of, strict=False)
    def _bytes_of(like: Any) -> Any:
        size = 4 if like is types.float32 else 2
        return lambda like: size

    @overload(view_numbers, strict=False, jit_options={"_nrt": True})  # type: ignore[typeddict-unknown-key]
    def _view_numbers(address: Any, size: Any, like: Any) -> Any:
        if like is types.float32:
            return lambda address, size, like: view_f32(address, size)
        return lambda address, size, like: view_u16(address, size)

    @overload(wide, strict=False)
    def _wide_of(number: Any) -> Any:
        return (lambda number: number) if number is types.float32 else lambda number: _wide(number)

    @overload(narrow, strict=False)
    def _narrow_to(number: Any, like: Any) -> Any:
        return (lambda number, like: number) if like is types.float32 else lambda number, like: _narrow(number)
