"""Vector code compiled for other CPUs than this one: which instructions it has, and that sums stay in registers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from llvmlite import binding, ir
from numba import config, types

from retrieve_spec.kernels.vector_code import block_product, mix_block, score_block, tile_product
from retrieve_spec.kernels.vector_units import VectorUnit, units_of

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="its instructions have no form in Python")
AVX2 = "+avx2,+fma,+f16c"
CPUS = {
    "haswell": ("x86_64-unknown-linux-gnu", "haswell", AVX2),
    "avxvnni": ("x86_64-unknown-linux-gnu", "alderlake", f"{AVX2},+avxvnni"),
    "skylake": ("x86_64-unknown-linux-gnu", "skylake-avx512", f"{AVX2},+avx512f,+avx512bw,+avx512vl"),
    "zen4": ("x86_64-unknown-linux-gnu", "znver4", f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx512bf16"),
    "arm": ("aarch64-unknown-linux-gnu", "generic", "+neon,+fullfp16"),
    "dotprod": ("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+fullfp16,+dotprod"),
}
STACK = re.compile(r"\(%rsp|\(%rbp|\[sp[,\]]")


def loops_of(product: Any, like: Any, cpu: str) -> list[list[str]]:
    """The instructions of the inner loops of a product that is compiled for a CPU, longest first."""
    triple, name, features = CPUS[cpu]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(name, features, opt=3)
    word, code = ir.IntType(64), product._defn
    count = code.__code__.co_argcount - 2
    module = ir.Module()
    module.triple, module.data_layout = triple, str(machine.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * (count + 1)), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    _, codegen = code(None, like, *[types.int64] * count)
    codegen(SimpleNamespace(get_dummy_value=lambda: None), builder, None, function.args)
    builder.ret_void()
    compiled = binding.parse_assembly(str(module))
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(compiled, passes)
    loops = []
    for block in re.split(r"\n(?=\.LBB)", machine.emit_assembly(compiled)):
        label, *lines = block.split("\n")
        label = label.split(":")[0]
        lines = [line.strip() for line in lines if line.startswith("\t") and not line.startswith("\t.")]
        if any(line.endswith(label) for line in lines):
            loops.append(lines[: 1 + max(i for i, line in enumerate(lines) if line.endswith(label))])
    return sorted(loops, key=len, reverse=True)


def unit_of(cpu: str) -> VectorUnit:
    """The fastest unit of a CPU."""
    triple, _, features = CPUS[cpu]
    return next(units_of({feature[1:] for feature in features.split(",")}.__contains__, triple.startswith("x86")))


def count(loop: list[str], instruction: str) -> int:
    return sum(instruction in line.split()[:2] for line in loop)  # a prefix may come first


@pytest.mark.parametrize(
    ("cpu", "bits_4", "bits_8"),
    [
        ("haswell", {"vpmaddubsw": 32, "vpmaddwd": 4}, {"vpmaddubsw": 64, "vpmaddwd": 8}),
        ("avxvnni", {"vpdpbusd": 32}, {"vpdpbusd": 32}),
        ("skylake", {"vpmaddubsw": 64, "vpmaddwd": 8}, {"vpmaddubsw": 128, "vpmaddwd": 16}),
        ("zen4", {"vpdpbusd": 128}, {"vpdpbusd": 128}),
        ("dotprod", {"sdot": 32}, {"sdot": 32}),
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
    """Of products of bytes, and of tiles of float32; nothing wider than the registers there are is used."""
    unit = unit_of(cpu)
    for product, like in ((block_product(unit), types.uint16), (tile_product(unit), types.float32)):
        loops = loops_of(product, like, cpu)
        if cpu in ("haswell", "avxvnni"):
            assert not any(re.search(r"%zmm|%ymm(1[6-9]|[23]\d)", line) for loop in loops for line in loop)
        multiplied = max(loops, key=lambda loop: count(loop, "vfmadd231ps") + count(loop, "fmla"))
        for loop in (multiplied,) if like == types.float32 else loops:
            on_stack = sum(bool(STACK.search(line)) for line in loop)
            assert 8 * on_stack <= len(loop)


@pytest.mark.parametrize("cpu", ["skylake", "arm"])
@pytest.mark.parametrize("like", [types.float32, types.uint16, types.int16], ids=str)
def test_every_cpu_has_code_of_every_product(cpu: str, like: Any) -> None:
    unit = unit_of(cpu)
    for make in (score_block, tile_product, mix_block):
        loops = loops_of(make(unit), like, cpu)
        assert all(any("fm" in line or "dpbf16" in line for line in loop) for loop in loops)
