"""Products compiled for other CPUs than this one."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from llvmlite import binding, ir
from numba import types

from retrieve_spec.kernels.cpu.vector_units import VectorUnit, units_of

AVX2 = "+avx2,+fma,+f16c"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512vnni,+avx512bf16"
CPUS = {
    "haswell": ("x86_64-unknown-linux-gnu", "haswell", AVX2),
    "avxvnni": ("x86_64-unknown-linux-gnu", "alderlake", f"{AVX2},+avxvnni"),
    "skylake": ("x86_64-unknown-linux-gnu", "skylake-avx512", f"{AVX2},+avx512f,+avx512bw,+avx512vl"),
    "zen4": ("x86_64-unknown-linux-gnu", "znver4", AVX512),
    "amx": ("x86_64-unknown-linux-gnu", "sapphirerapids", f"{AVX512},+amx-tile,+amx-bf16"),
    "arm": ("aarch64-unknown-linux-gnu", "generic", "+neon"),
    "dotprod": ("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon,+dotprod"),
    "bf16": ("aarch64-unknown-linux-gnu", "neoverse-v1", "+neon,+dotprod,+bf16"),
}
"""By name, LLVM's target, CPU and features."""


def unit_of(cpu: str) -> VectorUnit:
    """The fastest unit of a CPU."""
    triple, _, features = CPUS[cpu]
    return next(units_of({feature[1:] for feature in features.split(",")}.__contains__, triple.startswith("x86")))


def compiled(product: Any, like: Any, cpu: str) -> tuple[Any, Any]:
    """A product as a module with one function, ``void product(int64_t, …)``, and the machine it is compiled for."""
    triple, name, features = CPUS[cpu]
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine(name, features, reloc="pic", opt=3)
    word, code = ir.IntType(64), product._defn
    count = code.__code__.co_argcount - 2
    module = ir.Module()
    module.triple, module.data_layout = triple, str(machine.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * (count + 1)), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    _, codegen = code(None, like, *[types.int64] * count)
    codegen(SimpleNamespace(get_dummy_value=lambda: None), builder, None, function.args)
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return parsed, machine


def loops_of(product: Any, like: Any, cpu: str) -> list[list[str]]:
    """The instructions of the inner loops of a product that is compiled for a CPU, longest first."""
    module, machine = compiled(product, like, cpu)
    loops = []
    for block in re.split(r"\n(?=\.LBB)", machine.emit_assembly(module)):
        label, *lines = block.split("\n")
        label = label.split(":")[0]
        lines = [line.strip() for line in lines if line.startswith("\t") and not line.startswith("\t.")]
        if any(line.endswith(label) for line in lines):
            loops.append(lines[: 1 + max(i for i, line in enumerate(lines) if line.endswith(label))])
    return sorted(loops, key=len, reverse=True)
