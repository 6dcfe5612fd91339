"""Scripts that use Triton, each in a process of its own: Triton decides at import whether it interprets.

Run as a program this is the process that interpreting ones are forked from, which has imported what they need.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator

from processes import running

INTERPRETS = "TRITON_INTERPRET"
Interpret = Callable[[str], str]
"""The fixture `interpret`: what a script prints where kernels are interpreted."""


def compiled_by(script: str, cache: os.PathLike[str]) -> str:
    """What a script prints where kernels are compiled; the compiler keeps its code in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETS}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@contextlib.contextmanager
def interpreter() -> Iterator[Interpret]:
    """A process that forks itself for each script, and ends with the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", INTERPRETS: "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with running([sys.executable, __file__], env=environment, **pipes) as server:

        def interpret(script: str) -> str:
            print(json.dumps(script), file=server.stdin, flush=True)
            code, printed, errors = json.loads(server.stdout.readline())
            assert code == 0, errors[-3000:]
            return str(printed.strip())

        yield interpret


def _execute(script: str, output: int, errors: int) -> None:
    """Be the process of a script, which writes to files."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    code = 1
    try:
        exec(script, {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                _execute(json.loads(line), output.fileno(), errors.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            errors.seek(0)
            print(json.dumps([code, output.read(), errors.read()]), flush=True)


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

def registers(done):
    # those of a thread of a kernel that spills nothing
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        told = subprocess.run([DISASSEMBLER, "-res-usage", file.name], capture_output=True, text=True, check=True)
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\\d+)", told.stdout + told.stderr)}
    assert used["STACK"] == used["LOCAL"] == 0, (done.metadata, used)
    return used["REG"]

def compiled(kernel, types, constants, architecture, warps):
    # the code of a kernel that spills nothing and leaves room for another program beside it
    done = made(kernel, types, constants, architecture, num_warps=warps)
    assert registers(done) * warps * 32 <= 65536 / 2, (kernel, constants)
    assert done.metadata.shared <= 24 * 1024, done.metadata.shared
    return done.asm["ptx"]
"""
"""Triton's compiler and assembler, which need no GPU."""

PASSES = """
import torch
from retrieve_spec.attention import TreeMask, attend_split
from retrieve_spec.recorded.recorded_pass import RecordedPass

def run_pass(model, row_kernels, *kept):
    # logits of a recorded pass over eleven tokens, of four heads by two, and what it calls
    recorded, positions = RecordedPass(model, 2, row_kernels=row_kernels), torch.arange(11)[None]
    mask = TreeMask(recorded.groups, model.dtype, torch.device("cpu"))
    mask.set(0, torch.ones(11, 11).tril().bool().numpy(), positions[0].numpy())

    def attend(query, keys, values, layer):
        packed = query.reshape(1, 2, 22, -1)
        found = attend_split(packed, keys, values, mask, recorded.rules[layer])
        return found.reshape(1, 4, 11, -1).transpose(1, 2)

    logits = recorded.run(torch.arange(3, 14)[None], positions, attend, *kept)[0].float()
    called = [node.target for node in recorded._compiled.run.func.__self__.graph.nodes if node.op == "call_function"]
    return logits, called
"""
"""Recorded passes of small models by kernels of rows."""


if __name__ == "__main__":
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

    from retrieve_spec.recorded import packed_pass, recorded_pass  # noqa: F401

    _serve()
