"""Arrays from addresses, so that one compiled kernel handles any number of sources.

A source has a row of integers (addresses and sizes), and its arrays (`sources/rows.py`); the caller of a kernel holds
both. Views are intrinsics instead of inlined functions, since each of the hundreds of calls would compile these again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from numpy.typing import NDArray

Record = Any
"""A record (`np.record`) that kernels read and write by the names of its fields."""

if config.DISABLE_JIT:

    def _viewer(dtype: Any, dimensions: int = 1) -> Callable[..., NDArray[Any]]:
        """Return the constructor of an array from an address and a shape."""
        ctype = np.ctypeslib.as_ctypes_type(dtype)

        def view(address: int, *shape: int) -> NDArray[Any]:
            size = int(np.prod(shape))
            if size == 0:
                return np.empty(shape, dtype)
            return np.ctypeslib.as_array((ctype * size).from_address(int(address))).reshape(shape)

        return view

    def records_at(dtype: Any) -> Callable[..., Any]:
        """Return the constructor of an array of records from an address and their number."""
        named = np.dtype((np.record, dtype))

        def view(address: int, count: int) -> Any:
            size = max(named.itemsize * int(count), 1)
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(address)))
            return memory[: named.itemsize * int(count)].view(named)

        return view

    def record_at(dtype: Any) -> Callable[[int], Any]:
        """Return the constructor of a record from an address."""
        view = records_at(dtype)
        return lambda address: view(address, 1)[0]

    def prefetch(address: int) -> None:
        """Prefetch the cache line at an address."""

    def borrowed(array: Any) -> Any:
        """Return an array without counting the reference."""
        return array

    def take_ticket(address: int) -> int:
        """Increment the int64 at an address; return its old value."""
        counter = np.ctypeslib.as_array((ctypes.c_int64 * 1).from_address(int(address)))
        counter[0] += 1
        return int(counter[0]) - 1

    def tickets_taken(address: int) -> int:
        """Return the int64 at an address; what threads wrote before they took the last ticket is then visible."""
        return int(np.ctypeslib.as_array((ctypes.c_int64 * 1).from_address(int(address)))[0])

    def index_among_eight(address: int, token: int) -> int:
        """Return the index of the first of eight int32 at an address that equals `token`, 8 if none does."""
        return [*np.ctypeslib.as_array((ctypes.c_int32 * 8).from_address(int(address))).tolist(), token].index(token)

else:

    def _viewer(dtype: Any, dimensions: int = 1) -> Callable[..., NDArray[Any]]:
        """Return the constructor of an array from an address and a shape."""
        array = types.Array(from_dtype(np.dtype(dtype)), dimensions, "C")
        bytes_each = np.dtype(dtype).itemsize

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, *shape = args
            strides, stride = [], cgutils.intp_t(bytes_each)
            for length in reversed(shape):
                strides.append(stride)
                stride = builder.mul(stride, length)
            made = make_array(array)(context, builder)  # type: ignore[no-untyped-call]
            populate_array(  # type: ignore[no-untyped-call]
                made,
                data=builder.inttoptr(address, context.get_data_type(array.dtype).as_pointer()),
                shape=shape,
                strides=strides[::-1],
                itemsize=bytes_each,
                meminfo=None,  # the caller holds it
            )
            return made._getvalue()

        made = array(types.int64, *[types.intp] * dimensions), codegen
        if dimensions == 1:

            @intrinsic
            def view(_context: Any, address: Any, size: Any) -> Any:
                return made

        elif dimensions == 2:

            @intrinsic
            def view(_context: Any, address: Any, rows: Any, width: Any) -> Any:
                return made

        else:

            @intrinsic
            def view(_context: Any, address: Any, a: Any, b: Any, c: Any) -> Any:
                return made

        return view  # type: ignore[no-any-return]

    records_at = _viewer

    def record_at(dtype: Any) -> Callable[[int], Any]:
        """Return the constructor of a record from an address."""
        record = from_dtype(dtype)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        @intrinsic
        def view(_context: Any, address: Any) -> Any:
            return record(types.int64), codegen

        return view  # type: ignore[no-any-return]

    @intrinsic
    def prefetch(_context: Any, address: Any) -> Any:
        """Prefetch the cache line at an address."""

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], context.get_value_type(types.voidptr))
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
            function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                builder.module, kind, "llvm.prefetch.p0"
            )
            builder.call(function, [pointer, word(0), word(3), word(1)])  # to read, keep it close, data
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    @intrinsic
    def take_ticket(_context: Any, address: Any) -> Any:
        """Atomically increment the int64 at an address; return its old value, different for every thread."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            return builder.atomic_rmw("add", builder.inttoptr(args[0], word.as_pointer()), word(1), "acq_rel")

        return types.int64(types.int64), codegen

    @intrinsic
    def tickets_taken(_context: Any, address: Any) -> Any:
        """Return the int64 at an address; what threads wrote before they took the last ticket is then visible."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
            return builder.load_atomic(pointer, "acquire", 8)

        return types.int64(types.int64), codegen

    @intrinsic
    def index_among_eight(_context: Any, address: Any, token: Any) -> Any:
        """Return the index of the first of eight int32 at an address that equals `token`, 8 if none does.

        All eight are compared at once, without an unpredictable branch.
        """

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            word, long = ir.IntType(32), ir.IntType(64)
            eight = ir.VectorType(word, 8)
            nothing, first = ir.Constant(eight, None), ir.Constant(eight, None)
            found = builder.load(builder.inttoptr(args[0], eight.as_pointer()), align=4)
            wanted = builder.shuffle_vector(builder.insert_element(nothing, args[1], word(0)), nothing, first)
            equal = builder.zext(builder.bitcast(builder.icmp_signed("==", found, wanted), ir.IntType(8)), long)
            return builder.cttz(builder.or_(equal, long(1 << 8)), ir.IntType(1)(1))

        return types.int64(types.int64, types.int32), codegen


view_i32 = _viewer(np.int32)
"""(size,) int32 at an address."""
view_rows = _viewer(np.int32, 2)
"""(rows, width) int32 at an address."""
view_u32_rows = _viewer(np.uint32, 2)
"""(rows, width) uint32 at an address."""
view_u8 = _viewer(np.uint8)
"""(size,) uint8 at an address."""
view_i8 = _viewer(np.int8)
"""(size,) int8 at an address."""
view_i8_rows = _viewer(np.int8, 2)
"""(rows, width) int8 at an address."""
view_i16 = _viewer(np.int16)
"""(size,) int16 at an address."""
view_u16 = _viewer(np.uint16)
"""(size,) uint16 at an address."""
view_u32 = _viewer(np.uint32)
"""(size,) uint32 at an address."""
view_i64 = _viewer(np.int64)
"""(size,) int64 at an address."""
view_i64_rows = _viewer(np.int64, 2)
"""(rows, width) int64 at an address."""
view_u64 = _viewer(np.uint64)
"""(size,) uint64 at an address."""
view_u64_rows = _viewer(np.uint64, 2)
"""(rows, width) uint64 at an address."""
view_f32 = _viewer(np.float32)
"""(size,) float32 at an address."""
view_f64 = _viewer(np.float64)
"""(size,) float64 at an address."""
view_f32_rows = _viewer(np.float32, 2)
"""(rows, width) float32 at an address."""
view_f32_cube = _viewer(np.float32, 3)
"""(a, b, c) float32 at an address."""
view_f64_cube = _viewer(np.float64, 3)
"""(a, b, c) float64 at an address."""
