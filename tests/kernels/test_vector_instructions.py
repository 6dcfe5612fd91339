"""Vector code compiled for other CPUs than this one: which instructions it has, and that sums stay in registers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cross_compiled import CPUS, loops_of, unit_of
from llvmlite import binding
from numba import config, types

from retrieve_spec.kernels.compiled_code import arm_features
from retrieve_spec.kernels.cpu.amx_code import MOST_BLOCKS, amx_product
from retrieve_spec.kernels.cpu.vector_code import block_product, mix_block, score_block, tile_product
from retrieve_spec.kernels.cpu.vector_units import units_of

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="its instructions have no form in Python")
STACK = re.compile(r"\(%rsp|\(%rbp|\[sp[,\]]")


def count(loop: list[str], instruction: str) -> int:
    return sum(instruction in line.split()[:2] for line in loop)  # a prefix may come first


@pytest.mark.parametrize(
    ("cpu", "bits_4", "bits_8"),
    [
        ("haswell", {"vpmaddubsw": 72, "vpmaddwd": 9}, {"vpmaddubsw": 144, "vpmaddwd": 18}),
        ("avxvnni", {"vpdpbusd": 72}, {"vpdpbusd": 72}),
        ("skylake", {"vpmaddubsw": 64, "vpmaddwd": 8}, {"vpmaddubsw": 128, "vpmaddwd": 16}),
        ("zen4", {"vpdpbusd": 128}, {"vpdpbusd": 128}),
        ("dotprod", {"sdot": 72}, {"sdot": 72}),
    ],
)
def test_bytes_are_multiplied_by_the_instructions_there_are(
    cpu: str, bits_4: dict[str, int], bits_8: dict[str, int]
) -> None:
    """One for four products of each row of a block with as many weights as a register holds; by pairs, one to widen."""
    unit = unit_of(cpu)
    loops = loops_of(block_product(unit), types.uint16, cpu)
    assert len(loops) == 2 * len(unit.blocks)
    found = [{name: count(loop, name) for name in bits_4} for loop in loops]
    assert bits_4 in found and bits_8 in found


@pytest.mark.parametrize("cpu", ["haswell", "avxvnni", "zen4", "dotprod"])
def test_sums_stay_in_registers(cpu: str) -> None:
    """Of products of bytes, and of tiles of float32 and bfloat16; no register is wider than the CPU's."""
    unit = unit_of(cpu)
    tiles = tile_product(unit)
    for product, like in ((block_product(unit), types.uint16), (tiles, types.float32), (tiles, types.uint16)):
        loops = loops_of(product, like, cpu)
        if cpu in ("haswell", "avxvnni"):
            assert not any(re.search(r"%zmm|%ymm(1[6-9]|[23]\d)", line) for loop in loops for line in loop)
        multiplied = max(loops, key=lambda loop: count(loop, "vfmadd231ps") + count(loop, "fmla"))
        for loop in (multiplied,) if product is tiles else loops:
            on_stack = sum(bool(STACK.search(line)) for line in loop)
            assert 8 * on_stack <= len(loop)


def test_matrices_are_multiplied_with_one_load_of_weights_for_all_rows() -> None:
    loops = loops_of(amx_product(unit_of("amx")), types.uint16, "amx")
    found = sorted((count(loop, "tdpbf16ps"), count(loop, "tileloadd"), count(loop, "prefetcht1")) for loop in loops)
    assert found == [(0, 0, 0), *((blocks, blocks + 1, 16) for blocks in range(1, MOST_BLOCKS + 1))]
    assert not any(STACK.search(line) for loop in loops if count(loop, "tdpbf16ps") for line in loop)
    assert not loops_of(amx_product(unit_of("zen4")), types.uint16, "zen4")


@pytest.mark.parametrize("product", [tile_product, score_block])
def test_arm_multiplies_pairs_of_bfloat16(product: Any) -> None:
    loops = loops_of(product(unit_of("bf16")), types.uint16, "bf16")
    assert all(count(loop, "bfdot") and not count(loop, "fmla") for loop in loops)


@pytest.mark.parametrize("cpu", ["skylake", "arm"])
@pytest.mark.parametrize("like", [types.float32, types.uint16, types.int16], ids=str)
def test_every_cpu_has_code_of_every_product(cpu: str, like: Any) -> None:
    unit = unit_of(cpu)
    for make in (score_block, tile_product, mix_block):
        loops = loops_of(make(unit), like, cpu)
        assert all(any("fm" in line or "dpbf16" in line for line in loop) for loop in loops)


@pytest.mark.parametrize(
    ("triple", "cpu", "listed", "found"),
    [
        ("arm64-apple-darwin", "apple-a12", "", set()),
        ("arm64-apple-darwin", "apple-m1", "", {"dotprod"}),
        ("arm64-apple-darwin", "apple-m2", "", {"dotprod", "bf16"}),
        ("aarch64-unknown-linux-gnu", "cortex-a72", "+neon", set()),
        ("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+crc", {"dotprod"}),
        ("aarch64-unknown-linux-gnu", "generic", "+neon,+bf16", {"bf16"}),
    ],
)
def test_features_that_the_name_of_an_arm_cpu_implies_are_found(
    triple: str, cpu: str, listed: str, found: set[str]
) -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    assert arm_features(triple, cpu, listed) == found


@pytest.mark.parametrize("left_out", ["amx-tile", "amx-bf16", "avx512f", "avx512bw", "avx2"])
def test_nothing_is_used_that_stands_on_what_is_left_out(left_out: str) -> None:
    """Who tells Numba to leave out a feature may leave those in that stand on it; LLVM ends the process over these."""
    named = set(CPUS["amx"][2].replace("+", "").split(",")) - {left_out}
    units = list(units_of(named.__contains__, True))
    assert not any(unit.has_amx for unit in units)
    if left_out.startswith("avx512"):
        assert units and all(unit.lanes == 8 for unit in units)
    assert left_out != "avx2" or not units
