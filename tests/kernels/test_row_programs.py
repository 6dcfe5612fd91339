"""Row programs: products and attention, the same bit for bit in any company."""

import functools
import itertools
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from retrieve_spec.kernels.cpu import row_programs, vector_units
from retrieve_spec.kernels.cpu.number_formats import LIKE
from retrieve_spec.kernels.cpu.packed_products import unpack
from retrieve_spec.kernels.cpu.row_programs import (
    CAN_RUN,
    ZEROS,
    RowProgram,
    RowTexts,
    Step,
    packed_product,
    padded,
    row_product,
)
from retrieve_spec.kernels.cpu.vector_code import (
    GROUP,
    GROUP_BYTES,
    LEAST_TILE,
    UNPACKED,
    block_product,
    score_block,
    tile_product,
    transposing,
    widening,
)
from retrieve_spec.kernels.cpu.vector_units import VectorUnit, portable
from retrieve_spec.quantized import pack

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY = pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3},
    torch.float16: {"rtol": 2**-10, "atol": 1e-3},
}
pytestmark = pytest.mark.skipif(not CAN_RUN, reason="programs do not run here")


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The naive twin of what products round rows to: whole numbers (…, k / 32, 32), and what one of them stands for."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    top = groups.abs().amax(-1, keepdim=True)
    return torch.where(top > 0, groups * (torch.full_like(top, 127.0) / top), 0.0).round(), top / 127


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([4, 8]),
    rows=st.integers(1, 50),
    groups=st.integers(1, 5),
    outputs=st.sampled_from([16, 48, 208]),
    biased=st.booleans(),
    threads=st.booleans(),
)
def test_products_are_those_of_what_weights_and_rows_are_rounded_to(
    seed: int, bits: int, rows: int, groups: int, outputs: int, biased: bool, threads: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, rows, groups * GROUP, generator=generator).to(torch.bfloat16)
    x[0, 0, :GROUP] = 0  # a group without any number
    weight = pack(torch.randn(outputs, groups * GROUP, generator=generator), bits)
    bias = torch.randn(outputs, generator=generator).to(torch.bfloat16) if biased else None
    with mock.patch.object(row_programs, "threads_of_torch", return_value=2 if threads else 1):
        result = packed_product(x, weight, bias)
        for row in (0, rows - 1):  # the same beside any others
            assert torch.equal(packed_product(x[1, row:], weight, bias), result[1, row:])
    whole, step = rounded_rows(x)
    wanted = (whole.double() * step).flatten(-2) @ unpack(weight, x.shape[-1]).double().T
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), wanted + (0 if bias is None else bias), rtol=2**-8, atol=1e-4)


@EVERY
@pytest.mark.parametrize("outputs", [16, 41, 48])
def test_a_row_is_the_same_beside_any_others_with_unpacked_weights(dtype: torch.dtype, outputs: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((21, 96), (outputs, 96), (outputs,)))
    out = torch.empty(24, outputs, dtype=dtype)
    program = RowProgram(dtype)
    given = [program.place() for _ in range(4)]
    program.multiply(given[0], 96, UNPACKED, [(given[1], given[2], given[3], outputs)])
    program.finish(given)
    addresses = [tensor.data_ptr() for tensor in (x, weight, bias, out)]
    program.run(21, addresses)
    whole = out.clone()
    wanted = x.float() @ weight.float().T + bias
    torch.testing.assert_close(whole[:21], wanted.to(dtype), **CLOSE[dtype])
    for rows in range(1, 21):
        program.run(rows, addresses)
        assert torch.equal(out[:rows], whole[:rows])


def flushed(numbers: np.ndarray) -> np.ndarray:
    """Numbers in float32, with zeros in place of denormal ones."""
    return np.where(np.abs(numbers) < np.float32(2.0**-126), np.float32(0), numbers).astype(np.float32)


def summed_by_amx(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """The naive twin of products by AMX: by 32 numbers, the even ones and the odd ones are added up apart."""
    rows, columns = (flushed(tensor.float().numpy()) for tensor in (x, weight))
    total = np.zeros((len(rows), len(columns)), np.float32)
    for begin in range(0, rows.shape[1], 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for i in range(begin, begin + 32):
            halves[i % 2] = flushed(halves[i % 2] + rows[:, i, None] * columns[None, :, i])
        total = flushed(total + flushed(halves[0] + halves[1]))
    return total


@pytest.mark.skipif(not vector_units.unit_here().has_amx, reason="this CPU has no AMX, or Linux forbids it")
@pytest.mark.parametrize("scale", [1.0, 1e-19], ids=["normal", "denormal"])
@pytest.mark.parametrize("rows", [1, 7, 16, 35, 64, 150])
def test_matrix_instructions_add_up_what_the_naive_twin_does(rows: int, scale: float) -> None:
    torch.manual_seed(0)
    x, weight = ((torch.randn(count, 160) * scale).to(torch.bfloat16) for count in (rows, 41))
    sums = torch.from_numpy(summed_by_amx(x, weight))
    assert torch.equal(row_product(x, weight), sums.to(torch.bfloat16))
    bias = -sums[0].to(torch.bfloat16)  # what is left of a row's own sums are their last digits
    assert torch.equal(row_product(x, weight, bias), (sums + bias.float()).to(torch.bfloat16))


def test_matrix_instructions_are_left_out_where_linux_forbids_them() -> None:
    with mock.patch.object(vector_units, "_may_use_amx", return_value=False):
        assert not any(unit.has_amx for unit in vector_units.units_here())


@EVERY
def test_long_rows_are_multiplied_some_at_a_time(dtype: torch.dtype) -> None:
    """Of some hundred kilobytes each."""
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 1 << 15).to(dtype) / 100 for rows in (14, 16))
    result = row_product(x, weight)
    torch.testing.assert_close(result.float(), x.float() @ weight.float().T, rtol=0.01, atol=0.02)
    for rows in (1, 2, 3, 5, 11):
        assert torch.equal(row_product(x[14 - rows :], weight), result[14 - rows :])


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_that_are_none_stay_so_in_their_own_row(bits: int) -> None:
    weight, x = pack(torch.randn(16, 64), bits), torch.ones(3, 64, dtype=torch.bfloat16)
    x[0, 40], x[2, 3] = torch.inf, torch.nan
    result = packed_product(x, weight)
    assert not result[[0, 2]].isfinite().any() and result[1].isfinite().all()


@pytest.mark.filterwarnings("error")  # as what compiled code raises comes
@pytest.mark.parametrize("rows", [0, 3])
def test_what_is_added_may_lie_otherwise_and_there_may_be_no_rows(rows: int) -> None:
    """Biases that are part of another tensor, or in float32 beside packed weights; experts that no token chose."""
    x, weight, others = torch.randn(rows, 64), torch.randn(48, 64), torch.randn(48, 3)
    result = row_product(x, weight, others[:, 1])
    packed = packed_product(x.to(torch.bfloat16), pack(weight, 8), others[:, 1])
    torch.testing.assert_close(result, x @ weight.T + others[:, 1])
    torch.testing.assert_close(packed.float(), result, rtol=0.05, atol=0.5)


UNITS = [*(unit for unit in vector_units.UNITS if not unit.has_amx), portable(4), portable(8), portable(16)]
EVERY_UNIT = pytest.mark.parametrize("unit", UNITS, ids=[f"{i}-{unit.lanes}" for i, unit in enumerate(UNITS)])


@functools.cache
def multiplying(unit: VectorUnit) -> tuple[Any, Any, Any, Any]:
    """Products by packed weights, by keys and by unpacked weights, and conversion, compiled once for a unit."""
    product, score, turn = block_product(unit), score_block(unit), transposing(unit)
    tile, widen = tile_product(unit), widening(unit)

    @njit
    def multiply(
        like: Any, bits: int, rows: int, weight: int, factors: int, x: int, scales: int, sums: int, groups: int,
        ahead: int, step: int, bias: int, out: int, stride: int,
    ) -> None:  # fmt: skip
        product(like, bits, rows, weight, factors, x, scales, sums, groups, ahead, step, bias, out, stride)

    @njit
    def multiply_keys(
        like: Any, rows: int, keys: int, row_bytes: int, chunks: int, turned: int, x: int, x_chunks: int, out: int,
        stride: int,
    ) -> None:  # fmt: skip
        turn(like, keys, row_bytes, chunks, turned)
        score(like, rows, turned, x, x_chunks, out, stride)

    @njit
    def multiply_unpacked(
        like: Any, rows: int, last: int, width: int, weight: int, x: int, chunks: int, ahead: int, step: int,
        bias: int, out: int, stride: int,
    ) -> None:  # fmt: skip
        tile(like, rows, last, width, weight, x, chunks, ahead, step, bias, out, stride)

    @njit
    def convert(like: Any, x: int, chunks: int, out: int) -> None:
        widen(like, x, chunks, out)

    return multiply, multiply_keys, multiply_unpacked, convert


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("extreme", [False, True])
def test_every_unit_adds_up_the_same_numbers(bits: int, extreme: bool) -> None:
    """By what this CPU has instructions for, and by operations that all have, with the largest numbers there are."""
    random, size = np.random.default_rng(0), 64 * bits
    weight = random.integers(0, 256, (3, GROUP_BYTES[bits]), np.uint8)
    whole = random.integers(-127, 128, (16, 3, GROUP), np.int8)
    if extreme:
        weight[:, :size] = random.choice(np.array([0, 1, 0x80, 0xF0, 0x0F, 0xFF], np.uint8), (3, size))
        whole = random.choice(np.array([-127, 127], np.int8), whole.shape)
    factors = random.standard_normal((3, GROUP_BYTES[bits] - size >> 1))
    weight[:, size:] = factors.astype(np.float16).view(np.uint8)
    step, bias = random.random((16, 3), np.float32), torch.randn(16).to(torch.bfloat16)
    x = torch.from_numpy(whole * step[..., None].astype(np.float64)).flatten(1)
    wanted = x @ unpack(torch.from_numpy(weight).view(16, -1), 96).double().T + bias
    given = None
    for unit in UNITS:
        out = torch.zeros(16, 16, dtype=torch.bfloat16)
        for rows in unit.blocks:
            added = whole[:rows].sum(-1, dtype=np.int32)
            sums = step[:rows] * added.astype(np.float32) if bits == 4 else -128 * added
            arrays = [array.swapaxes(0, 1).copy() for array in (whole[:rows], step[:rows], sums)]
            for first in range(0, 16, unit.lanes):
                multiplying(unit)[0](
                    LIKE[out.dtype], bits, rows, weight.ctypes.data + 4 * first, weight.ctypes.data + size + 2 * first,
                    *(array.ctypes.data for array in arrays), 3, weight.ctypes.data, 0, bias.data_ptr() + 2 * first,
                    out.data_ptr() + 2 * first, 32,
                )  # fmt: skip
            torch.testing.assert_close(out[:rows].double(), wanted[:rows], rtol=2**-8, atol=0.05)
            given = out[:rows] if given is None or len(given) < rows else given
            assert torch.equal(out[:rows], given[:rows])


@pytest.mark.parametrize("told", ["NUMBA_ENABLE_AVX=0", "NUMBA_CPU_NAME=generic"])
def test_what_numba_is_told_to_leave_out_is_left_out(told: str) -> None:
    """LLVM ends the process over an instruction that it has no leave to use."""
    program = (
        "import platform; from retrieve_spec.kernels.cpu.row_programs import CAN_RUN\n"
        "assert not CAN_RUN or platform.machine() not in ('x86_64', 'AMD64')"
    )
    name, _, said = told.partition("=")
    others = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU")}
    subprocess.run([sys.executable, "-c", program], env=others | {name: said}, check=True)


@EVERY_UNIT
@EVERY
def test_rows_are_multiplied_as_they_lie(dtype: torch.dtype, unit: VectorUnit) -> None:
    """By what this CPU has an instruction for, and by operations that all have; with weights, and with keys."""
    torch.manual_seed(0)
    weight, bias = torch.randn(16, 96).to(dtype), torch.randn(32).to(dtype)
    (_, multiply_keys, multiply_unpacked, convert), size = multiplying(unit), dtype.itemsize
    is_widened = size == 2 and not (dtype == torch.bfloat16 and unit.add_pairs)
    tiles = unit.widened_tiles if is_widened else unit.tiles
    asked = dtype if dtype == torch.bfloat16 and unit.add_pairs else torch.float32
    for rows in unit.attention_blocks:
        x = torch.randn(rows, 96).to(dtype)
        wanted = x.double() @ weight.double().T
        chunks, scores = 96 * size // 64, torch.empty(rows, 16)
        asks, turned = x.to(asked), torch.empty(96, 16)
        multiply_keys(
            LIKE[dtype], rows, weight.data_ptr(), 96 * size, chunks, turned.data_ptr(), asks.data_ptr(),
            96 * asks.itemsize // 64, scores.data_ptr(), 64,
        )  # fmt: skip
        torch.testing.assert_close(scores.double(), wanted, **CLOSE[torch.float32])
        prepared = torch.empty(rows, 96) if is_widened else x
        for row in range(rows if is_widened else 0):
            convert(LIKE[dtype], x[row].data_ptr(), chunks, prepared[row].data_ptr())
        for count, few in itertools.product(tiles, (True, False)):
            last, width = min(rows, count) - 1, min(tiles[count], LEAST_TILE) if few else tiles[count]
            results = torch.full((count, 16), torch.nan, dtype=dtype)
            for first in range(0, 16, width):
                multiply_unpacked(
                    LIKE[dtype], count, last, width, weight[first:].data_ptr(), prepared.data_ptr(), chunks,
                    weight.data_ptr(), 0 if few else 64, bias[first:].data_ptr(), results[:, first:].data_ptr(),
                    16 * size,
                )  # fmt: skip
            there = last + 1
            torch.testing.assert_close(results[:there].double(), wanted[:there] + bias[:16], **CLOSE[dtype])
            assert results[there:].isnan().all(), "nothing is written after the last row"


@EVERY
def test_steps_of_a_program_do_what_torch_does(dtype: torch.dtype) -> None:
    """A layer's products, sums, norms and gates; buffers are used again."""
    torch.manual_seed(0)
    width, inner, eps = 64, 96, 1e-5
    for rows in (1, 7, 40):
        x, other = torch.randn(2, rows, width).to(dtype)
        weight = torch.randn(width).to(dtype)
        gate, up = (torch.randn(inner, width).to(dtype) for _ in range(2))
        down = torch.randn(width, inner).to(dtype)
        program = RowProgram(dtype)
        given = [program.place() for _ in range(8)]
        normed, gated, raised, opened = (program.place(size) for size in (width, inner, inner, inner))
        eps_bits = int(np.float64(eps).view(np.int64))
        program.add(Step.NORMALISE, given[0], given[1], given[2], given[6], normed, width, 1, eps_bits)
        parts = [(given[3], ZEROS, gated, inner), (given[4], ZEROS, raised, inner)]
        program.multiply(normed, width, UNPACKED, parts)
        program.add(Step.GATE, gated, raised, opened, inner)
        program.multiply(opened, inner, UNPACKED, [(given[5], ZEROS, given[7], width)])
        program.finish(given)
        total, out = torch.zeros(2, padded(rows), width, dtype=dtype)
        tensors = (x, other, weight, gate, up, down, total, out)
        addresses = [tensor.data_ptr() for tensor in tensors]
        program.run(rows, addresses)
        summed = x + other
        expected = torch.nn.functional.rms_norm(summed.float(), (width,), eps=eps).to(dtype) * weight
        expected = torch.nn.functional.silu(expected @ gate.T) * (expected @ up.T) @ down.T
        assert torch.equal(total[:rows], summed)
        deviation = (out[:rows].float() - expected.float()).norm() / expected.float().norm()
        assert deviation < (1e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize(
    ("dtype", "bits"), [*((dtype, UNPACKED) for dtype in FORMATS.values()), (torch.bfloat16, 8)], ids=str
)
def test_rows_of_tables_are_taken_and_later_steps_are_over_chosen_rows(dtype: torch.dtype, bits: int) -> None:
    torch.manual_seed(0)
    width, rows = 64, 21
    numbers, wanted = torch.randint(0, 48, (rows,)), torch.tensor([20, 3, 3, 0])
    table, weight = torch.randn(48, width).to(dtype), torch.randn(32, width).to(dtype)
    kept = pack(table.float(), 8) if bits == 8 else table
    program = RowProgram(dtype)
    given = [program.place() for _ in range(6)]
    program.add(Step.TAKE, given[0], given[1], given[4], width, bits, 48)
    chosen = program.place(width)
    program.add(Step.CHOOSE, given[2], given[4], chosen, width, UNPACKED, rows)
    program.multiply(chosen, width, UNPACKED, [(given[3], ZEROS, given[5], 32)])
    program.finish(given)
    taken, out = (torch.zeros(padded(rows), each, dtype=dtype) for each in (width, 32))
    addresses = [tensor.data_ptr() for tensor in (numbers, kept, wanted, weight, taken, out)]
    program.run(rows, addresses, chosen=len(wanted))
    expected = unpack(kept, width).to(dtype)[numbers] if bits == 8 else table[numbers]
    assert torch.equal(taken[:rows], expected)
    assert torch.equal(out[: len(wanted)], row_product(expected[wanted], weight)) and not out[padded(4) :].any()
    numbers[7] = 48
    with pytest.raises(IndexError, match="from 0 to 47, got 48"):
        program.run(rows, addresses, chosen=len(wanted))


@pytest.mark.parametrize("own", [False, True])
def test_threads_wait_for_each_other_between_steps(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's, or threads of this library, where torch has another runtime."""
    if own:
        monkeypatch.setattr(row_programs, "_openmp", lambda: None)
    torch.manual_seed(0)
    program, width, rows = RowProgram(), 256, 16
    x, weight, out = given = [program.place() for _ in range(3)]
    for _ in range(40):
        following = program.place(width)
        program.multiply(x, width, UNPACKED, [(weight, ZEROS, following, width)])
        x = following
    program.add(Step.GATE, x, x, out, width)
    program.finish(given)
    tensors = torch.randn(rows, width), torch.randn(width, width) / width**0.5, torch.empty(rows, width)
    tensors = tuple(tensor.to(torch.bfloat16) for tensor in tensors)
    results = []
    for threads in (1, *[2] * 30):
        with mock.patch.object(row_programs, "threads_of_torch", return_value=threads):
            program.run(rows, [tensor.data_ptr() for tensor in tensors])
        results.append(tensors[2].clone())
    assert all(torch.equal(result, results[0]) for result in results)


def drafted(random: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Who sees whom of the rows of a random tree, and their depths."""
    seen = np.eye(rows, dtype=np.bool_)
    for row in range(1, rows):
        seen[row] |= seen[random.integers(row)]
    return seen, seen.sum(1) - 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    held=st.integers(0, 70),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    widths=st.sampled_from([(32, 16), (64, 64), (96, 32)]),
    window=st.sampled_from([0, 1, 5, 30, 75]),
    softcap=st.sampled_from([0.0, 3.0]),
    threads=st.booleans(),
    dtype=st.sampled_from(list(FORMATS.values())),
)
def test_rows_attend_to_what_they_see(
    seed: int, rows: list[int], held: int, kv_heads: int, groups: int, widths: tuple[int, int], window: int,
    softcap: float, threads: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The naive twin; rows are written behind those held, and a row's result is bit for bit that of the row alone."""
    random, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    (d, dv), heads, count = widths, kv_heads * groups, sum(rows)

    def states(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, keys, values = states(count, heads, d), states(count, kv_heads, d), states(count, kv_heads, dv)
    slabs = [(states(2, kv_heads, 96, d), states(2, kv_heads, 96, dv)) for _ in rows]
    before = [tuple(slab.clone() for slab in both) for both in slabs]
    seen, depths = zip(*(drafted(random, n) for n in rows), strict=True)

    def attend(
        queries: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, texts: RowTexts
    ) -> torch.Tensor:
        program = RowProgram(dtype)
        places = [program.place() for _ in range(4)]
        program.add(Step.KEEP, places[1], places[2], 1, kv_heads, d, dv)
        program.add(Step.ATTEND, places[0], places[3], 1, heads, kv_heads, d, dv, window, 0.2, softcap)
        out = torch.empty(len(queries), heads, dv, dtype=dtype)
        program.finish(places)
        tensors = (queries, new_keys, new_values, out)
        program.run(len(queries), [tensor.data_ptr() for tensor in tensors], texts)
        return out

    def places_of(slab: tuple[torch.Tensor, torch.Tensor], rows_held: int) -> np.ndarray:
        return np.array([[*(part[layer].data_ptr() for part in slab), 96, rows_held] for layer in (0, 1)], np.int64)

    with mock.patch.object(row_programs, "threads_of_torch", return_value=2 if threads else 1):
        out = attend(query, keys, values, RowTexts(rows, seen, depths, [places_of(slab, held) for slab in slabs]))
    begin = 0
    for n, mine, depth, slab, old in zip(rows, seen, depths, slabs, before, strict=True):
        own = slice(begin, begin + n)
        for part, was, new in zip(slab, old, (keys, values), strict=True):
            assert torch.equal(part[1, :, held : held + n], new[own].transpose(0, 1))
            part[1, :, held : held + n] = was[1, :, held : held + n]
            assert torch.equal(part, was)
        all_keys, all_values = (
            torch.cat([old_part[1, :, :held], new[own].transpose(0, 1)], 1).double()
            for old_part, new in zip(old, (keys, values), strict=True)
        )
        apart = held + depth[:, None] - np.concatenate([np.arange(held), held + depth])
        near = np.concatenate([np.ones((n, held), np.bool_), mine], 1) & (apart < (window or 1000))
        mask = torch.from_numpy(near)
        for head in range(heads):
            scores = query[own, head].double() @ all_keys[head // groups].T * 0.2
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            torch.testing.assert_close(out[own, head].double(), shares @ all_values[head // groups], **CLOSE[dtype])
        last = np.flatnonzero(mine[-1])  # those that the last row sees, one behind the other, as in a text
        alone = tuple(part.clone() for part in old)
        at = begin + last
        line = RowTexts(
            [len(last)], [np.tri(len(last), dtype=np.bool_)], [np.arange(len(last))], [places_of(alone, held)]
        )
        result = attend(query[at].contiguous(), keys[at].contiguous(), values[at].contiguous(), line)
        assert torch.equal(result[-1], out[begin + n - 1])
        begin += n
    bad = int(random.integers(count))  # what overflowed is nothing to rows that do not see it
    keys[bad] = values[bad] = torch.inf
    again = attend(query, keys, values, RowTexts(rows, seen, depths, [places_of(slab, held) for slab in slabs]))
    others = ~torch.block_diag(*map(torch.from_numpy, seen)).bool()[:, bad]
    assert torch.equal(again[others], out[others])
