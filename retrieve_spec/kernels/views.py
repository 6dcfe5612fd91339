"""Arrays from addresses: lets one compiled kernel walk any number of sources without recompiling.

A source hands the mixture a row of integers (addresses and sizes) and keeps the arrays alive itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import carray, config, njit, types
from numba.extending import intrinsic
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

else:

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
    def view_u64(address: int, size: int) -> NDArray[np.uint64]:
        """(size,) uint64 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.uint64)  # type: ignore[no-any-return]

    @njit(inline="always")
    def view_f32(address: int, size: int) -> NDArray[np.float32]:
        """(size,) float32 at an address."""
        return carray(_pointer(np.int64(address)), (size,), np.float32)  # type: ignore[no-any-return]
