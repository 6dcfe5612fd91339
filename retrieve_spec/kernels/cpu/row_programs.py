"""Programs over the rows of a pass on a CPU: decoder layers in one compiled call.

A program is a list of steps over rows of float32, bfloat16 or float16: rows of tables, products, normalisations, gates,
rotary embeddings, attention. Each rounds where the operation it replaces does (`retrieve_spec.kernels.cpu.layer_rows`).
Torch's threads run it in one parallel region, and take parts of a step until none are left.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from enum import IntEnum
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from llvmlite import binding
from numba import cfunc, config, typeof, types
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from retrieve_spec.kernels.compiled_code import inlined, inner
from retrieve_spec.kernels.cpu.amx_code import amx_configure, amx_release
from retrieve_spec.kernels.cpu.layer_rows import gate_row, normalise_rows, rotate_heads
from retrieve_spec.kernels.cpu.number_formats import LIKE, bytes_of, view_numbers
from retrieve_spec.kernels.cpu.packed_products import (
    BLOCKS,
    FLOATS,
    bits_of,
    interleave_block,
    multiply_panel,
    quantise_groups,
    unpack,
    unpack_row,
    unpack_rows,
    widen_row,
)
from retrieve_spec.kernels.cpu.tree_attention import (
    QUERIES,
    TEXT_FIELDS,
    append_row,
    attend_part,
    attention_parts,
)
from retrieve_spec.kernels.cpu.vector_code import GROUP, GROUP_BYTES, LANES, UNPACKED, is_widened
from retrieve_spec.kernels.cpu.vector_units import UNITS, has_bfloat16_products, unit_here
from retrieve_spec.kernels.views import take_ticket, tickets_taken, view_i64, view_i64_rows
from retrieve_spec.openmp import libgomp_of

CAN_RUN = not config.DISABLE_JIT and bool(UNITS)
"""Whether programs can run: not without the compiler, nor on an x86 CPU without AVX2."""
_PARTS = 8
"""Parts of a product per thread; several, so that threads wait little for each other."""
_PATIENCE = 1 << 12
"""Number of checks before a waiting thread yields its core."""
_FIELDS = 11
_HAS_AMX = unit_here().has_amx
_configure, _release = amx_configure(unit_here()), amx_release(unit_here())


class Step(IntEnum):
    """Kinds of steps with their fields: places, which stand for addresses, then numbers."""

    PART = 0
    """A layer of a product: weight, bias, out, outputs."""
    QUANTISE = 1
    """x, bytes, scales, sums, groups, bits."""
    MULTIPLY = 2
    """bytes, scales, sums, groups, bits, number of parts (the steps that follow), panels of all parts; with unpacked
    weights, rows, in their format or in float32, or interleaved blocks instead of bytes, and groups of 64 bytes."""
    NORMALISE = 3
    """x, other, weight, total, out, width, repetitions per row, eps."""
    GATE = 4
    """gate, up, out, width."""
    ROTATE = 5
    """x, cosine, sine, out, heads, half of a head's width."""
    KEEP = 6
    """keys, values, layer, key heads, width of keys, width of values."""
    ATTEND = 7
    """queries, out, layer, heads, key heads, width of keys, width of values, window, scale, softcap."""
    INTERLEAVE = 8
    """x, interleaved blocks, groups of 64 bytes."""
    WIDEN = 9
    """x, float32, groups of 64 bytes."""
    TAKE = 10
    """numbers of rows, table, out, width, bits, rows of the table; with unpacked tables, in the rows' format."""
    CHOOSE = 11
    """The same with rows for a table: later steps are over these rows only."""


_PLACES = {
    Step.PART: 3, Step.QUANTISE: 4, Step.MULTIPLY: 3, Step.NORMALISE: 5, Step.GATE: 3, Step.ROTATE: 4, Step.KEEP: 2,
    Step.ATTEND: 2, Step.INTERLEAVE: 2, Step.WIDEN: 2, Step.TAKE: 3, Step.CHOOSE: 3,
}  # fmt: skip
"""Number of places among the fields of each kind of step."""
_PART, _QUANTISE, _MULTIPLY, _NORMALISE, _GATE, _ROTATE, _KEEP, _ATTEND, _INTERLEAVE, _WIDEN, _TAKE, _CHOOSE = map(
    int, Step
)
ZEROS, NOWHERE = 0, 1
"""Places of 16 zeros, and of a missing operand."""

if binding.address_of_symbol("sched_yield"):
    _leave_core = types.ExternalFunction("sched_yield", types.int32())
else:

    @inner
    def _leave_core() -> None:
        """Do nothing: this system has no `sched_yield`."""


@inner
def _wait(address: int, tickets: int) -> None:
    """Wait until a number of tickets is taken."""
    looks = 0
    while tickets_taken(address) < tickets:
        looks += 1
        if looks % _PATIENCE == 0:
            _leave_core()


@inlined
def _do_panel(
    step: NDArray[np.int64], parts: NDArray[np.int64], at: NDArray[np.int64], rows: int, panel: int, like: Any
) -> None:
    """Compute one panel of a product."""
    groups, bits, which = step[4], step[5], 0
    while panel >= -(-parts[which, 4] // LANES):
        panel -= -(-parts[which, 4] // LANES)
        which += 1
    bias, outputs, size = parts[which, 2], parts[which, 4], bytes_of(like)
    begin = min(LANES * panel, outputs - LANES)  # with unpacked weights, the last panel may overlap the previous one
    multiply_panel(
        at[parts[which, 1]], begin, bits, rows, groups, at[step[1]], at[step[2]], at[step[3]],
        at[bias] + (size * begin if bias != ZEROS else 0), at[parts[which, 3]] + size * begin, size * outputs, like,
    )  # fmt: skip


@inner
def _do_row(step: NDArray[np.int64], at: NDArray[np.int64], rows: int, row: int, like: Any) -> None:
    """Compute one row of any other step."""
    kind, x, size = step[0], at[step[1]], bytes_of(like)
    if kind == _NORMALISE:
        width, repeats, eps = step[6], step[7], step[8:].view(np.float64)[0]
        begin = size * width * repeats * row
        other, total = at[step[2]], at[step[4]]
        normalise_rows(
            x + begin, other + begin if other else 0, at[step[3]], total + begin if total else 0, at[step[5]] + begin,
            repeats, width, np.float32(eps), like,
        )  # fmt: skip
    elif kind == _WIDEN:
        widen_row(x, row, step[3], at[step[2]], like)
    elif kind == _GATE:
        begin = size * step[4] * row
        gate_row(x + begin, at[step[2]] + begin, at[step[3]] + begin, step[4], like)
    else:
        heads, half = step[5], step[6]
        angles = 2 * size * half * row
        begin = angles * heads
        rotate_heads(
            x + begin, at[step[2]] + angles, at[step[3]] + angles, at[step[4]] + begin, heads, 1, half, 2 * half, 0,
            like,
        )  # fmt: skip


@inner
def _take_row(step: NDArray[np.int64], at: NDArray[np.int64], row: int, refused: NDArray[np.int64], like: Any) -> None:
    """Copy one row of a table. A number that it has no row for is written to `refused`, with their number."""
    number, width = view_i64(at[step[1]], row + 1)[row], step[4]
    if not 0 <= number < step[6]:
        refused[0], refused[1] = number, step[6]
        return
    size = bytes_of(like)
    table, out = at[step[2]], at[step[3]] + size * width * row
    if step[5] != UNPACKED:
        unpack_row(number, table, width // GROUP, out)
        return
    given, taken = view_numbers(table + size * width * number, width, like), view_numbers(out, width, like)
    for i in range(width):
        taken[i] = given[i]


_HEADER, _CHOSEN, _REFUSED = 12, 9, 10


@inlined
def _run(address: int, like: Any) -> None:
    """Run a program in all threads that call this; `address` points to the numbers of `RowProgram.run`: tickets, plan,
    steps, rows, threads, texts and their number, scratch and its size, chosen rows, what was refused (two), then a pair
    of tickets for each step, and addresses.
    """
    numbers = view_i64(address, _HEADER)
    counters, steps, rows, threads = address + 8 * _HEADER, numbers[2], numbers[3], numbers[4]
    plan, at = view_i64_rows(numbers[1], steps, _FIELDS), view_i64(counters + 16 * steps, 1 << 20)
    by_text = view_i64_rows(numbers[5], numbers[6], TEXT_FIELDS)
    scratch = numbers[7] + numbers[8] * take_ticket(address)
    _configure(like)
    for i in range(steps):
        step, parts, ticket, each = plan[i], plan[i + 1 :], counters + 16 * i, 1
        if step[0] == _PART:
            continue
        if step[0] == _CHOOSE:
            rows = numbers[_CHOSEN]
        units = rows
        if step[0] == _MULTIPLY:
            each = max(step[7] // (_PARTS * threads), 1)
            units = -(-step[7] // each)
        elif step[0] == _QUANTISE:  # in parts of all rows, which are in the same cache lines
            each = -(-step[5] // threads)
            units = -(-step[5] // each)
        elif step[0] == _ATTEND:
            units = attention_parts(by_text, step[4], step[5])
        elif step[0] == _INTERLEAVE:
            units = -(-rows // LANES)
        while True:
            unit = take_ticket(ticket)
            if unit >= units:
                break
            if step[0] == _MULTIPLY:
                for panel in range(unit * each, min((unit + 1) * each, step[7])):
                    _do_panel(step, parts, at, rows, panel, like)
            elif step[0] == _QUANTISE:
                quantise_groups(
                    at[step[1]], step[6], rows, step[5], unit * each, min((unit + 1) * each, step[5]),
                    at[step[2]], at[step[3]], at[step[4]],
                )  # fmt: skip
            elif step[0] == _ATTEND:
                scale, softcap = step[9:].view(np.float64)
                attend_part(
                    by_text, unit, at[step[1]], at[step[2]], step[3:9], np.float32(scale), np.float32(softcap), scratch,
                    like,
                )  # fmt: skip
            elif step[0] == _KEEP:
                append_row(by_text, unit, at[step[1]], at[step[2]], step[3], step[4], step[5], step[6], like)
            elif step[0] == _INTERLEAVE:
                interleave_block(at[step[1]], unit, rows, step[3], at[step[2]], like)
            elif step[0] == _TAKE or step[0] == _CHOOSE:
                _take_row(step, at, unit, numbers[_REFUSED:], like)
            else:
                _do_row(step, at, rows, unit, like)
            take_ticket(ticket + 8)
        _wait(ticket + 8, units)
    _release(like)


def _run_float32(address: int) -> None:
    _run(address, np.float32(0.0))


def _run_bfloat16(address: int) -> None:
    _run(address, np.uint16(0))


def _run_bfloat16_by_amx(address: int) -> None:
    """Do the same under another name, by which compiled code is cached, since Linux may forbid AMX on the same CPU."""
    _run(address, np.uint16(0))


def _run_float16(address: int) -> None:
    _run(address, np.int16(0))


_RUNS = {
    torch.float32: _run_float32,
    torch.bfloat16: _run_bfloat16_by_amx if _HAS_AMX else _run_bfloat16,
    torch.float16: _run_float16,
}


@functools.cache
def _in_c(dtype: torch.dtype) -> Any:
    """Return `_run` as a C function for rows of a format."""
    return cfunc("void(int64)", cache=True, error_model="numpy")(_RUNS[dtype])


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return torch's OpenMP runtime."""
    library = libgomp_of(os.path.dirname(torch.__file__))
    if library is not None:
        library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        library.GOMP_parallel.restype = None
    return library


def threads_of_torch() -> int:
    """Return the number of threads of the caller's next parallel region."""
    library = _openmp()
    return torch.get_num_threads() if library is None else int(library.omp_get_max_threads())


@functools.cache
def _own_threads() -> ThreadPoolExecutor:
    """Return threads for programs if torch's runtime is not libgomp (macOS); a forked child gets its own."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_own_threads.cache_clear)
    return ThreadPoolExecutor(thread_name_prefix="retrieve-spec-rows")


def run_in_threads(function: Any, data: NDArray[np.int64], threads: int) -> None:
    """Call a compiled function in every thread of a parallel region of torch's runtime, and wait for all threads.

    These are the threads that also run torch's own regions: additional ones would compete with them for the cores. If
    torch's runtime is not libgomp, this library's own threads are used.

    Parameters
    ----------
    function
        A C function made by Numba, ``void (int64_t *)``, which runs without Python's interpreter lock.
    data
        Argument of each call.
    threads
        `threads_of_torch`; with 1, the calling thread calls the function, without a region.
    """
    if threads == 1:
        function.ctypes(data.ctypes.data)
        return
    library = _openmp()
    if library is not None:
        library.GOMP_parallel(int(function.address), data.ctypes.data, 0, 0)
        return
    others = [_own_threads().submit(function.ctypes, data.ctypes.data) for _ in range(threads - 1)]
    function.ctypes(data.ctypes.data)
    wait(others)


def padded(rows: int) -> int:
    """Round a number of rows up to whole blocks, as in buffers of products."""
    return next((block for block in BLOCKS if rows <= block), -(-rows // BLOCKS[-1]) * BLOCKS[-1])


class RowTexts:
    """Rows, keys and values of the texts of a pass, for programs with attention.

    Parameters
    ----------
    rows
        By text, its number of rows in the pass.
    seen
        By text, (rows, rows) bool attention mask.
    depths
        By text, (rows,) int64 positions relative to its first row's.
    places
        By text, (layers, 4) int64: addresses of keys and values, capacity, number of rows in the cache.
    """

    def __init__(
        self,
        rows: Sequence[int],
        seen: Sequence[NDArray[np.bool_]],
        depths: Sequence[NDArray[np.int64]],
        places: Sequence[NDArray[np.int64]],
    ) -> None:
        self._held = [tuple(map(np.ascontiguousarray, arrays)) for arrays in zip(seen, places, depths, strict=True)]
        begins = accumulate(rows, initial=0)
        self.by_text = np.array(
            [
                (begin, count, *[array.ctypes.data for array in arrays])
                for begin, count, arrays in zip(begins, rows, self._held, strict=False)
            ],
            np.int64,
        )
        self.longest = max(int(place[:, 3].max()) + count for place, count in zip(places, rows, strict=True))


class RowProgram:
    """A program over any number of rows.

    Steps refer to addresses by places. Some addresses are given to each run, others are those of weights, and of
    temporary buffers.

    Parameters
    ----------
    dtype
        Format of the rows: float32, bfloat16 or float16.

    Attributes
    ----------
    is_frozen
        Whether weights stay where they are from the next run on; their memory is held.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.is_frozen = False
        self._dtype, self._size = dtype, dtype.itemsize
        self._steps: list[tuple[int, ...]] = []
        self._row_bytes: list[int] = [0, 0]  # of buffers, by place
        self._given: list[int] = []
        self._weights: dict[int, torch.Tensor] = {}
        self._held = np.empty(0, np.int64)  # places of weights
        self._found: NDArray[np.int64] | None = None
        self._storages: list[Any] = []
        self._zeros = np.zeros(2 * LANES, np.float32)
        self._prepared: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._plan = self._numbers = np.empty(0, np.int64)
        self._arena_bytes = self._widest = 0
        self._results: list[tuple[tuple[int, ...], bool]] = []
        self._width, self._choice = 1, 0
        self._whole = 1  # buffers have a multiple of this number of rows

    def place(self, width: int = 0, bytes_each: int = 0) -> int:
        """Return a new place: of a buffer with `width` numbers per row, or of an address that is given to each run.

        `bytes_each` is the size of a number, by default that of the rows' format.
        """
        row_bytes = width * (bytes_each or self._size)
        self._row_bytes.append(-(-row_bytes // 64) * 64)
        return len(self._row_bytes) - 1

    def weight(self, tensor: torch.Tensor) -> int:
        """Return a new place, of a contiguous tensor, which each run finds where it is then, unless `is_frozen`."""
        place = self.place()
        self._weights[place] = tensor
        return place

    def add(self, kind: Step, *fields: float) -> None:
        """Append a step; floats are stored as the bits of a float64."""
        whole = [int(np.float64(each).view(np.int64)) if isinstance(each, float) else each for each in fields]
        self._steps.append((kind, *whole, *[0] * (_FIELDS - 1 - len(whole))))
        if kind is Step.ATTEND:
            self._widest = max(self._widest, *whole[5:7])

    def multiply(self, x: int, width: int, bits: int, parts: Sequence[tuple[int, int, int, int]]) -> None:
        """Append products of the rows at a place with several layers, given by their fields of `Step.PART`."""
        groups = width * self._size // 64 if bits == UNPACKED else width // GROUP
        if (x, bits) not in self._prepared:
            self._prepared[x, bits] = self._prepare(x, groups, bits)
        panels = sum(-(-fields[-1] // LANES) for fields in parts)
        self.add(Step.MULTIPLY, *self._prepared[x, bits], groups, bits, len(parts), panels)
        for fields in parts:
            self.add(Step.PART, *fields)

    def _prepare(self, x: int, groups: int, bits: int) -> tuple[int, int, int]:
        """Append the steps that prepare rows for products with weights of a number of bits; return the places."""
        if bits != UNPACKED:
            rounded = self.place(groups * GROUP, 1), self.place(groups, 4), self.place(groups, 4)
            self.add(Step.QUANTISE, x, *rounded, groups, bits)
            return rounded
        if self._dtype == torch.bfloat16 and _HAS_AMX:
            prepared, self._whole = self.place(64 * groups, 1), LANES
            self.add(Step.INTERLEAVE, x, prepared, groups)
        elif is_widened(unit_here(), typeof(LIKE[self._dtype])):  # type: ignore[no-untyped-call]
            prepared = self.place(32 * groups, 4)
            self.add(Step.WIDEN, x, prepared, groups)
        else:
            prepared = x
        return prepared, NOWHERE, NOWHERE

    def finish(self, given: Sequence[int]) -> Self:
        """Finish the program after its last step; addresses of the `given` places are passed to each run."""
        self._given = list(given)
        for place in given:
            self._row_bytes[place] = 0
        self._plan, offsets = np.array(self._steps, np.int64), self._lay_out()
        header = [0, self._plan.ctypes.data, len(self._steps), *[0] * (_HEADER - 3), *[0] * (2 * len(self._steps))]
        self._numbers = np.array([*header, *offsets], np.int64)
        self._held = np.array([ZEROS, NOWHERE, *self._weights], np.int64)
        return self

    def _find_weights(self) -> NDArray[np.int64]:
        """Return the addresses of `_held`."""
        if self._found is not None:
            return self._found
        weights = self._weights.values()
        found = np.array([self._zeros.ctypes.data, 0, *[weight.data_ptr() for weight in weights]], np.int64)
        if self.is_frozen:
            self._found, self._storages = found, [weight.untyped_storage() for weight in weights]
        return found

    def _lay_out(self) -> list[int]:
        """Return the offset of each place's buffer in an arena per row; unused buffers are reused."""
        spans: dict[int, list[int]] = {}
        at = 0
        for i, (kind, *fields) in enumerate(self._steps):
            at = at if kind == Step.PART else i  # parts are written while the product's input is read
            for place in fields[: _PLACES[Step(kind)]]:
                spans.setdefault(place, [at, at])[1] = at
        offsets, free, ends = [0] * len(self._row_bytes), dict[int, list[int]](), dict[int, list[int]]()
        for place, (begin, end) in sorted(spans.items(), key=lambda span: span[1][0]):
            for done in [step for step in ends if step < begin]:
                for other in ends.pop(done):
                    free.setdefault(self._row_bytes[other], []).append(offsets[other])
            if size := self._row_bytes[place]:
                if not free.get(size):
                    free[size], self._arena_bytes = [self._arena_bytes], self._arena_bytes + size
                offsets[place] = free[size].pop()
                ends.setdefault(end, []).append(place)
        return offsets

    def over(self, width: int, results: Sequence[tuple[tuple[int, ...], bool]], choice: int = 0) -> Self:
        """Say what `run_over` is given and returns.

        Parameters
        ----------
        width
            Numbers in a row of the first tensor.
        results
            The shape of a row of each result, and whether its rows are the chosen ones (`Step.CHOOSE`); the last places
            given to `finish`.
        choice
            Which tensor has the numbers of the chosen rows.
        """
        self._width, self._results, self._choice = width, list(results), choice
        return self

    def run_over(self, texts: RowTexts | None, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run the program over given tensors; return tensors (1, rows, …)."""
        held = [tensor.contiguous() for tensor in tensors]
        rows, chosen = held[0].numel() // self._width, held[self._choice].numel()
        counts = [chosen if is_chosen else rows for _, is_chosen in self._results]
        outs = [
            torch.empty((1, padded(count), *shape), dtype=self._dtype)
            for count, (shape, _) in zip(counts, self._results, strict=True)
        ]
        self.run(rows, [tensor.data_ptr() for tensor in (*held, *outs)], texts, chosen)
        return [out[:, :count] for out, count in zip(outs, counts, strict=True)]

    def run(self, rows: int, addresses: Sequence[int], texts: RowTexts | None = None, chosen: int = 0) -> None:
        """Run the program over a number of rows, given the addresses of contiguous rows and of weights.

        `chosen` is the number of rows after `Step.CHOOSE`.

        Raises
        ------
        IndexError
            A table has no row of a number.
        """
        room, threads, numbers = -(-padded(rows) // self._whole) * self._whole, threads_of_torch(), self._numbers.copy()
        scratch = 0 if texts is None else 4 * QUERIES * (3 * self._widest + texts.longest + LANES)
        scratch = -(-scratch // 64) * 64
        arena = torch.empty(room * self._arena_bytes + threads * scratch, dtype=torch.uint8)
        begin = arena.data_ptr()
        numbers[3], numbers[4], numbers[_CHOSEN] = rows, threads, chosen
        if texts is not None:
            by_text = texts.by_text
            numbers[5:9] = by_text.ctypes.data, len(by_text), begin + room * self._arena_bytes, scratch
        at = numbers[-len(self._row_bytes) :]
        at *= room
        at += begin
        at[self._given] = addresses
        at[self._held] = self._find_weights()
        run_in_threads(_in_c(self._dtype), numbers, threads)
        refused, most = numbers[_REFUSED : _REFUSED + 2].tolist()
        if most:
            raise IndexError(f"expected token ids from 0 to {most - 1}, got {refused}: use the model's own tokenizer")


@functools.lru_cache(256)
def _product_program(dtype: torch.dtype, width: int, bits: int, outputs: int, biased: bool) -> RowProgram:
    program = RowProgram(dtype)
    x, weight, out, bias = (program.place() for _ in range(4))
    program.multiply(x, width, bits, [(weight, bias if biased else ZEROS, out, outputs)])
    return program.finish([x, weight, out, bias][: 4 if biased else 3])


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> torch.Tensor:
    x, width, outputs = x.contiguous(), x.shape[-1], weight.shape[0]
    rows = x.numel() // width
    out = x.new_empty((padded(rows), outputs))
    program = _product_program(x.dtype, width, bits, outputs, bias is not None)
    tensors = (x, weight, out) if bias is None else (x, weight, out, bias.to(x.dtype).contiguous())
    if rows:  # experts that no row chose have no rows
        program.run(rows, [tensor.data_ptr() for tensor in tensors])
    return out[:rows].view(*x.shape[:-1], outputs)


def packed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply (…, k) bfloat16 rows by a packed weight (n, bytes of a row), and add (n,) bfloat16."""
    return _product(x, weight, bias, bits_of(weight.shape[1], x.shape[-1] // GROUP))


def unpacked_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply (…, k) rows of any format, on any device, by a packed weight that is unpacked to that format."""
    bias = None if bias is None else bias.to(x.dtype)
    return functional.linear(x, unpack(weight, x.shape[-1]).to(x.dtype), bias)


def row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply (…, k) rows by a weight (n, k) of the same format, which `serves` accepts, and add (n,)."""
    return _product(x, weight, bias, UNPACKED)


def is_fast_for_many(dtype: torch.dtype) -> bool:
    """Whether programs multiply many rows of a format (prompts) as fast as torch."""
    return _HAS_AMX or attends_fast_for_many(dtype)


def attends_fast_for_many(dtype: torch.dtype) -> bool:
    """Whether attention of programs is as fast as torch's for many rows of a format.

    For bfloat16, torch uses matrix instructions that some CPUs have.
    """
    return dtype != torch.bfloat16 or not has_bfloat16_products()


def serves(weight: torch.Tensor) -> bool:
    """Whether programs can multiply by a weight without packing it; not by one that is made of other tensors."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        return False
    if weight.ndim != 2 or weight.device.type != "cpu" or weight.dtype not in LIKE or not weight.is_contiguous():
        return False
    row_bytes = weight.shape[1] * weight.element_size()
    return weight.shape[0] >= LANES and row_bytes > 0 and row_bytes % 64 == 0


torch.library.define("retrieve_spec::packed_product", "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")


@torch.library.impl("retrieve_spec::packed_product", "cpu")
def _packed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dtype == torch.bfloat16 and CAN_RUN and weight.dtype != FLOATS:
        return packed_product(x, weight, bias)
    return unpacked_product(x, weight, bias)


@torch.library.register_fake("retrieve_spec::packed_product")
def _packed_product_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


torch.library.define("retrieve_spec::packed_rows", "(Tensor ids, Tensor weight) -> Tensor")


@torch.library.impl("retrieve_spec::packed_rows", "cpu")
def _packed_rows(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Unpack rows of a weight of 8 bits to bfloat16."""
    numbers, out = ids.numpy(), _packed_rows_shape(ids, weight)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(weight):
        raise IndexError(f"expected token ids below {len(weight)}, got {numbers.min()} to {numbers.max()}")
    unpack_rows(numbers.reshape(-1), weight.data_ptr(), out.shape[-1] // GROUP, out.data_ptr())
    return out


@torch.library.register_fake("retrieve_spec::packed_rows")
def _packed_rows_shape(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    columns = weight.shape[1] * LANES // GROUP_BYTES[8] * GROUP
    return ids.new_empty((*ids.shape, columns), dtype=torch.bfloat16)
