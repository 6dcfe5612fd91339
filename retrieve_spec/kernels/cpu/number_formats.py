"""Number formats of kernels that are written once for float32, bfloat16 and float16.

A kernel takes a number of the format, `like`: a float32, a uint16 for bfloat16 bits, or an int16 for float16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import cpu_features, inner
from retrieve_spec.kernels.views import view_f32, view_i16, view_u16


def _converts_float16() -> bool:
    """Whether Numba's target CPU converts float16: without instructions, LLVM calls a function that does not exist."""
    is_x86, features = cpu_features()
    return not is_x86 or "f16c" in features


LIKE: dict[torch.dtype, Any] = {torch.float32: np.float32(0.0), torch.bfloat16: np.uint16(0)}
"""A number of the format by dtype of tensors."""
if _converts_float16():
    LIKE[torch.float16] = np.int16(0)
_NAN = np.uint16(0x7FC0)


def bytes_of(like: Any) -> int:
    """Return the size of a number in bytes."""
    return int(like.itemsize)


def is_bfloat16(like: Any) -> bool:
    """Whether the format is bfloat16."""
    return isinstance(like, np.uint16)


def view_numbers(address: int, size: int, like: Any) -> NDArray[Any]:
    """Return a view of (size,) numbers at an address."""
    if isinstance(like, np.float32):
        return view_f32(address, size)
    return view_u16(address, size) if is_bfloat16(like) else view_i16(address, size)


def wide(number: Any) -> np.float32:
    """Convert a number to float32."""
    if isinstance(number, np.float32):
        return number
    return _wide(number) if is_bfloat16(number) else np.float32(number.view(np.float16))


def narrow(number: np.float32, like: Any) -> Any:
    """Round a float32 to the format, to nearest, ties to even."""
    if isinstance(like, np.float32):
        return number
    return _narrow(number) if is_bfloat16(like) else np.float16(number).view(np.int16)


@inner
def _wide(bits: np.uint16) -> np.float32:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)  # type: ignore[no-any-return]


@inner
def _narrow(number: np.float32) -> np.uint16:
    bits = np.float32(number).view(np.uint32)
    rounded = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
    return rounded if number == number else _NAN


if not config.DISABLE_JIT:

    @intrinsic
    def _wide_half(_context: Any, _bits: Any) -> Any:
        """Convert float16 bits to float32."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.int16), codegen

    @intrinsic
    def _narrow_half(_context: Any, _number: Any) -> Any:
        """Round a float32 to float16 bits."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

        return types.int16(types.float32), codegen

    @overload(bytes_of, strict=False)
    def _bytes_of(like: Any) -> Any:
        size = 4 if like is types.float32 else 2
        return lambda like: size

    @overload(is_bfloat16, strict=False)
    def _is_bfloat16(like: Any) -> Any:
        answer = like is types.uint16
        return lambda like: answer

    @overload(view_numbers, strict=False, jit_options={"_nrt": True})  # type: ignore[typeddict-unknown-key]
    def _view_numbers(address: Any, size: Any, like: Any) -> Any:
        if like is types.float32:
            return lambda address, size, like: view_f32(address, size)
        if like is types.uint16:
            return lambda address, size, like: view_u16(address, size)
        return lambda address, size, like: view_i16(address, size)

    @overload(wide, strict=False)
    def _wide_of(number: Any) -> Any:
        if number is types.float32:
            return lambda number: number
        return (lambda number: _wide(number)) if number is types.uint16 else lambda number: _wide_half(number)

    @overload(narrow, strict=False)
    def _narrow_to(number: Any, like: Any) -> Any:
        if like is types.float32:
            return lambda number, like: number
        if like is types.uint16:
            return lambda number, like: _narrow(number)
        return lambda number, like: _narrow_half(number)
