"""Vector code for Arm, run by an emulator (Debian's qemu-user-static and gcc-aarch64-linux-gnu), against NumPy."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cross_compiled import compiled, unit_of
from numba import types
from numpy.typing import NDArray

from retrieve_spec.kernels.cpu.packed_products import unpack
from retrieve_spec.kernels.cpu.vector_code import (
    GROUP,
    GROUP_BYTES,
    block_product,
    is_widened,
    mix_block,
    score_block,
    tile_product,
    transposing,
    widening,
)

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
HARNESS = Path(__file__).with_name("arm_harness.c")
pytestmark = [
    pytest.mark.skipif(not shutil.which(COMPILER) or not shutil.which(EMULATOR), reason="no emulator of Arm"),
    pytest.mark.parametrize("cpu", ["arm", "dotprod", "bf16"]),
]
FORMATS = {types.float32: torch.float32, types.uint16: torch.bfloat16, types.int16: torch.float16}
EVERY = pytest.mark.parametrize("like", FORMATS, ids=str)
Run = Callable[..., None]


class Address:
    """An address so many bytes into an array."""

    def __init__(self, array: NDArray[Any] | torch.Tensor, offset: int = 0) -> None:
        self.array = array if isinstance(array, np.ndarray) else array.view(torch.uint8).numpy()
        self.offset = offset


@pytest.fixture
def run(tmp_path: Path, cpu: str) -> Run:
    """What runs a product of a CPU's unit in the emulator: with a format, and numbers or addresses."""

    def call(make: Any, like: Any, *arguments: Any) -> None:
        program = tmp_path / f"{make.__name__}_{like}"
        if not program.exists():
            module, machine = compiled(make(unit_of(cpu)), like, cpu)
            built = program.with_suffix(".o")
            built.write_bytes(machine.emit_object(module))
            subprocess.run([COMPILER, "-static", "-O1", "-o", program, HARNESS, built], check=True)
        arrays = {id(argument.array): argument.array for argument in arguments if isinstance(argument, Address)}
        starts, size = {}, 0
        for key, array in arrays.items():
            starts[key], size = size, -(-(size + array.nbytes) // 64) * 64
        numbers = np.zeros((2, 14), np.int64)
        for i, argument in enumerate(arguments, 1):
            is_address = isinstance(argument, Address)
            numbers[:, i] = (starts[id(argument.array)] + argument.offset if is_address else argument), is_address
        memory = np.zeros(size, np.uint8)
        for key, array in arrays.items():
            memory[starts[key] : starts[key] + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        given = tmp_path / "memory"
        given.write_bytes(np.int64(size).tobytes() + numbers.tobytes() + memory.tobytes())
        subprocess.run([EMULATOR, "-cpu", "max", program, given], check=True, timeout=300)
        memory = np.frombuffer(given.read_bytes()[-size:], np.uint8)
        for key, array in arrays.items():
            part = memory[starts[key] : starts[key] + array.nbytes]
            array[...] = part.view(array.dtype).reshape(array.shape)

    return call


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_multiplied(run: Run, cpu: str, bits: int) -> None:
    random, size, unit = np.random.default_rng(0), 64 * bits, unit_of(cpu)
    rows = unit.blocks[-1]
    weight = random.integers(0, 256, (3, GROUP_BYTES[bits]), np.uint8)
    weight[:, size:] = random.standard_normal((3, GROUP_BYTES[bits] - size >> 1)).astype(np.float16).view(np.uint8)
    whole, step = random.integers(-127, 128, (3, rows, GROUP), np.int8), random.random((3, rows), np.float32)
    sums = step * whole.sum(-1).astype(np.float32) if bits == 4 else (-128 * whole.sum(-1)).astype(np.int32)
    out, bias = torch.zeros(rows, 16, dtype=torch.bfloat16), torch.randn(16).to(torch.bfloat16)
    for first in range(0, 16, unit.lanes):
        run(
            block_product, types.uint16, bits, rows, Address(weight, 4 * first), Address(weight, size + 2 * first),
            Address(whole), Address(step), Address(sums), 3, Address(weight), 0, Address(bias, 2 * first),
            Address(out, 2 * first), 32,
        )  # fmt: skip
    x = torch.from_numpy((whole * step[..., None].astype(np.float64)).swapaxes(0, 1).copy()).flatten(1)
    wanted = x @ unpack(torch.from_numpy(weight).view(16, -1), 96).double().T + bias
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=0.05)


@EVERY
def test_rows_are_multiplied_as_they_lie(run: Run, cpu: str, like: Any) -> None:
    torch.manual_seed(0)
    dtype, unit = FORMATS[like], unit_of(cpu)
    weight, x, bias = (torch.randn(shape).to(dtype) for shape in ((16, 64), (4, 64), (16,)))
    out, scores, size = torch.zeros(4, 16, dtype=dtype), torch.zeros(4, 16), dtype.itemsize
    wanted = x.double() @ weight.double().T
    prepared = torch.zeros(4, 64) if is_widened(unit, like) else x
    for row in range(4):
        run(widening, like, Address(x, 64 * size * row), size, Address(prepared, 256 * row))
    for first in range(0, 16, 4):
        run(
            tile_product, like, 4, 3, 4, Address(weight, 64 * size * first), Address(prepared), size,
            Address(weight), 64, Address(bias, size * first), Address(out, size * first), 16 * size,
        )  # fmt: skip
    torch.testing.assert_close(out.double(), wanted + bias, rtol=2**-7, atol=1e-3)
    given = x if unit.add_pairs and dtype == torch.bfloat16 else x.float()
    turned = torch.zeros(64, 16)
    run(transposing, like, Address(weight), 64 * size, size, Address(turned))
    run(score_block, like, 4, Address(turned), Address(given), given.itemsize, Address(scores), 64)
    torch.testing.assert_close(scores.double(), wanted, rtol=1e-4, atol=1e-4)


@EVERY
def test_values_are_mixed(run: Run, cpu: str, like: Any) -> None:
    torch.manual_seed(0)
    values, shares, out = torch.randn(9, 16).to(FORMATS[like]), torch.rand(4, 9), torch.zeros(4, 16)
    run(mix_block, like, 4, Address(shares), 36, Address(values), 16 * values.itemsize, 5, 4, Address(out), 64)
    torch.testing.assert_close(out, shares @ values.float(), rtol=1e-4, atol=1e-4)
