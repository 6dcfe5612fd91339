"""Arrays from addresses: lets one compiled kernel walk any number of sources without recompiling.

A source hands out a row of integers (addresses and sizes) together with the arrays (`sources/rows.py`); whoever calls
a kernel holds both.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

if config.DISABLE_JIT:

    def _view(address: int, size: int, ctype: Any, dtype: type) -> Any:
        if size == 0:
            return np.empty(0, dtype)
        return np.ctypeslib.as_array((ctype * int(size)).from_address(int(address)))

    def view_i32(address: int, size: int) -> NDArray[np.int32]:
        """(size,) int32 at an address."""
        return _view(address, size, ctypes.c_int32, np.int32)  # type: ignore[no-any-return]

    def view_rows(address: int, rows: int, width: int) -> NDArray[np.int32]:
        """(rows, width) int32 at an address."""
        return view_i32(address, rows * width).reshape(rows, width)

    def view_slots(address: int, rows: int) -> NDArray[np.uint32]:
        """(rows, 4) uint32 at an address."""
        return view_u32(address, rows * 4).reshape(rows, 4)

    def view_u16(address: int, size: int) -> NDArray[np.uint16]:
        """(size,) uint16 at an address."""
        return _view(address, size, ctypes.c_uint16, np.uint16)  # type: ignore[no-any-return]

    def view_u32(address: int, size: int) -> NDArray[np.uint32]:
        """(size,) uint32 at an address."""
        return _view(address, size, ctypes.c_uint32, np.uint32)  # type: ignore[no-any-return]

    def view_i64(address: int, size: int) -> NDArray[np.int64]:
        """(size,) int64 at an address."""
        return _view(address, size, ctypes.c_int64, np.int64)  # type: ignore[no-any-return]

    def view_u64(address: int, size: int) -> NDArray[np.uint64]:
        """(size,) uint64 at an address."""
        return _view(address, size, ctypes.c_uint64, np.uint64)  # type: ignore[no-any-return]

    def view_f32(address: int, size: int) -> NDArray[np.float32]:
        """(size,) float32 at an address."""
        return _view(address, size, ctypes.c_float, np.float32)  # type: ignore[no-any-return]

    def view_f64(address: int, size: int) -> NDArray[np.float64]:
        """(size,) float64 at an address."""
        return _view(address, size, ctypes.c_double, np.float64)  # type: ignore[no-any-return]

    def view_f64_cube(address: int, a: int, b: int, c: int) -> NDArray[np.float64]:
        """(a, b, c) float64 at an address."""
        return view_f64(address, a * b * c).reshape(a, b, c)

    def view_i64_rows(address: int, rows: int, width: int) -> NDArray[np.int64]:
        """(rows, width) int64 at an address."""
        return view_i64(address, rows * width).reshape(rows, width)

    def view_u64_rows(address: int, rows: int, width: int) -> NDArray[np.uint64]:
        """(rows, width) uint64 at an address."""
        return view_u64(address, rows * width).reshape(rows, width)

    def prefetch(address: int) -> None:
        """Ask memory for the line at an address; nothing waits for it."""

    def borrowed(array: Any) -> Any:
        """The same array, not counted as a reference to it."""
        return array

else:

    @intrinsic
    def _prefetch(_context: Any, _address: Any) -> Any:
        def codegen(cgctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], cgctx.get_value_type(types.voidptr))
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
            function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                builder.module, kind, "llvm.prefetch.p0"
            )
            builder.call(function, [pointer, word(0), word(3), word(1)])  # to read, keep it close, data
            return cgctx.get_dummy_value()

        return types.void(types.int64), codegen

    @njit(inline="always")
    def prefetch(address: int) -> None:
        """Ask memory for the line at an address; nothing waits for it."""
        _prefetch(np.int64(address))

    @intrinsic
    def borrowed(_context: Any, array: Any) -> Any:
        """The same array, not counted as a reference to it: whoever called must hold it.

        Numba counts references at every call that takes an array, with an atomic operation each time; in kernels of a
        few microseconds that was half of the time.
        """

        def codegen(cgctx: Any, builder: Any, signature: Any, args: Any) -> Any:
            held = make_array(signature.args[0])(cgctx, builder, args[0])  # type: ignore[no-untyped-call]
            free = make_array(signature.return_type)(cgctx, builder)  # type: ignore[no-untyped-call]
            populate_array(  # type: ignore[no-untyped-call]
                free,
                data=held.data,
                shape=held.shape,
                strides=held.strides,
                itemsize=held.itemsize,
                meminfo=None,
            )
            return free._getvalue()

        return array(array), codegen

    @intrinsic
    def _pointer(_context: Any, _address: Any) -> Any:
        def codegen(cgctx: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], cgctx.get_value_type(types.voidptr))

        return types.voidptr(types.int64), codegen

    @njit(inline="always")
    def view_i32(address: int, size: int) -> NDArray[np.int32]:
        """(size,) int32 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.int32)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_rows(address: int, rows: int, width: int) -> NDArray[np.int32]:
        """(rows, width) int32 at an address (a reshape would cost a call into the runtime)."""
        return carray(_pointer(np.int64(address)), (rows, width), np.int32)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_slots(address: int, rows: int) -> NDArray[np.uint32]:
        """(rows, 4) uint32 at an address."""
        return carray(_pointer(np.int64(address)), (rows, 4), np.uint32)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_u16(address: int, size: int) -> NDArray[np.uint16]:
        """(size,) uint16 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.uint16)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_u32(address: int, size: int) -> NDArray[np.uint32]:
        """(size,) uint32 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.uint32)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_i64(address: int, size: int) -> NDArray[np.int64]:
        """(size,) int64 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.int64)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_i64_rows(address: int, rows: int, width: int) -> NDArray[np.int64]:
        """(rows, width) int64 at an address."""
        return carray(_pointer(np.int64(address)), (rows, width), np.int64)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_u64_rows(address: int, rows: int, width: int) -> NDArray[np.uint64]:
        """(rows, width) uint64 at an address."""
        return carray(_pointer(np.int64(address)), (rows, width), np.uint64)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_u64(address: int, size: int) -> NDArray[np.uint64]:
        """(size,) uint64 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.uint64)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_f32(address: int, size: int) -> NDArray[np.float32]:
        """(size,) float32 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.float32)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_f64(address: int, size: int) -> NDArray[np.float64]:
        """(size,) float64 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.float64)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_f64_cube(address: int, a: int, b: int, c: int) -> NDArray[np.float64]:
        """(a, b, c) float64 at an address."""
        return carray(_pointer(np.int64(address)), (a, b, c), np.float64)  # type: ignore[no-any-return]
