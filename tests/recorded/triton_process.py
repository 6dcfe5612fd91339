"""Scripts that use Triton, each in a process of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys


def run(script: str, **extra: str) -> str:
    """What a script prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **extra}
    if "TRITON_INTERPRET" not in extra:
        environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


COMPILER = """
import re, subprocess, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

def made(kernel, types, constants, architecture, aligned=None, **options):
    # a kernel compiled for a GPU; arguments are aligned as torch's tensors are, all of them or those given
    constants = {name: False for name in kernel.arg_names if name == "OVERLAP"} | constants
    given = types | dict.fromkeys(constants, "constexpr")
    types = {name: given.get(name, "i32") for name in kernel.arg_names}
    aligned = [name for name in types if types[name] != "constexpr"] if aligned is None else aligned
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name in aligned}
    source = ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)

def compiled(kernel, types, constants, architecture, warps):
    # the code of a kernel that spills nothing and leaves room for another program beside it
    done = made(kernel, types, constants, architecture, num_warps=warps)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        told = subprocess.run([DISASSEMBLER, "-res-usage", file.name], capture_output=True, text=True, check=True)
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\\d+)", told.stdout + told.stderr)}
    assert used["STACK"] == used["LOCAL"] == 0, (kernel, constants, used)
    assert used["REG"] * warps * 32 <= 65536 / 2, (kernel, constants, used)
    assert done.metadata.shared <= 24 * 1024, done.metadata.shared
    return done.asm["ptx"]
"""
"""Triton's compiler and assembler, which need no GPU."""
