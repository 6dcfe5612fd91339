"""The GPU kernel for linear layers of few rows, run by Triton's interpreter on the CPU, against torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import COMPILER, PASSES, Interpret, compiled_by

pytest.importorskip("triton")

AGREES = """
import itertools, torch
from torch.nn.functional import linear
from retrieve_spec.kernels.triton_products import linear_add_rms_norm, linears
from retrieve_spec.kernels.triton_rows import add_rms_norm

torch.manual_seed(0)
biased = itertools.cycle((False, True))  # each number of rows, and each width, meets both
for rows in (1, 16, 17, 65, 129):
    for inputs, outputs in ((64, (24,)), (192, (48, 16)), (256, (33, 16, 80))):
        x = torch.randn(1, rows, inputs).half()
        weights = [torch.randn(n, inputs).half() for n in outputs]
        biases = [torch.randn(n).half() for n in outputs] if next(biased) else [None] * len(outputs)
        for got, weight, bias in zip(linears(x, weights, biases), weights, biases, strict=True):
            torch.testing.assert_close(got, linear(x, weight, bias), atol=2e-2, rtol=2e-3)
        other, norm = torch.randn(1, rows, outputs[0]).half(), torch.randn(outputs[0]).half()
        ours = linear_add_rms_norm(x, weights[0], other, norm, 1e-5)
        theirs = add_rms_norm(other, linear(x, weights[0]), norm, 1e-5)
        for got, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, wanted, atol=2e-2, rtol=4e-3)

# what is added may be part of another tensor
x, weight, others = torch.randn(1, 5, 64).half(), torch.randn(48, 64).half(), torch.randn(48, 3).half()
wanted = linear(x, weight, others[:, 1])
torch.testing.assert_close(linears(x, [weight], [others[:, 1]])[0], wanted, atol=2e-2, rtol=2e-3)

# a row's sums do not depend on those beside it
x, weight = torch.randn(1, 128, 256).half(), [torch.randn(32, 256).half()]
whole = linears(x, weight, [None])[0]
assert all(torch.equal(linears(x[:, :n], weight, [None])[0], whole[:, :n]) for n in (1, 16, 17, 40, 65))
print("same")
"""

IN_ORDER = """
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

def in_order(self, a, b, total, *_):
    # one input after another, in float32, as the steps of tensor cores are; NumPy has no bfloat16 and its own order
    a, b = (self.cast_impl(x, tl.float32).data for x in (a, b))
    total = total.data.copy()
    for column, row in zip(a.T, b, strict=True):
        total += column[:, None] * row
    return TensorHandle(total, tl.float32)

InterpreterBuilder.create_dot = in_order
"""
"""The interpreter's products as a GPU's."""

PACKED = (
    IN_ORDER
    + """
import itertools
import torch
from torch.nn.functional import linear
from retrieve_spec.kernels.cpu import unpack
from retrieve_spec.kernels.triton_products import linear_add_rms_norm, linears
from retrieve_spec.kernels.triton_rows import add_rms_norm
from retrieve_spec.quantized import pack

torch.manual_seed(0)
FORMATS = ((4, False), (8, False), (8, True), (4, True))  # bits, and whether they are floats
CASES = ((1, 96, (48,)), (7, 64, (32, 16)), (64, 160, (80, 16, 144)), (130, 64, (144,)))
for kind, close, cases in (
    (torch.float16, {"atol": 1e-2, "rtol": 2e-3}, CASES),
    (torch.bfloat16, {"atol": 0.3, "rtol": 2e-2}, CASES[1:3]),  # the interpreter does not round to it
):
    for form, (rows, inputs, outputs) in itertools.product(FORMATS, cases):
        near = close | {"atol": 3 * close["atol"]} if form == (4, True) else close  # by a polynomial
        x = torch.randn(1, rows, inputs).to(kind)
        weights = [pack(torch.randn(n, inputs), *form) for n in outputs]
        plain = [unpack(weight, inputs).to(kind).float() for weight in weights]
        biases = [torch.randn(n).to(kind) if rows > 1 else None for n in outputs]
        for got, weight, bias in zip(linears(x, weights, biases), plain, biases, strict=True):
            wanted = linear(x.float(), weight, None if bias is None else bias.float())
            assert got.dtype == kind
            torch.testing.assert_close(got.float(), wanted, **near)
        other, norm = torch.randn(1, rows, outputs[0]).to(kind), torch.randn(outputs[0]).to(kind)
        ours = linear_add_rms_norm(x, weights[0], other, norm, 1e-5)
        theirs = add_rms_norm(other, linear(x.float(), plain[0]).to(kind), norm, 1e-5)
        for got, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, wanted, **near)

# weights are what `unpack` gives, to the bit but for NF4: ones pick them out
for form, rows in itertools.product(FORMATS, (16, 32)):
    weight = pack(torch.randn(176, 32), *form)
    got = linears(torch.eye(32)[None, :rows].half(), [weight], [None])[0][0]
    wanted = unpack(weight, 32).half().T[:rows]
    torch.testing.assert_close(got, wanted, atol=0.0, rtol=2e-4 + 2**-10 if form == (4, True) else 0.0)

# a row's sums do not depend on those beside it
x, weight = torch.randn(1, 65, 256).half(), pack(torch.randn(32, 256), 4)
other, norm = torch.randn(1, 65, 32).half(), torch.randn(32).half()
whole = [linears(x, [weight], [None])[0], *linear_add_rms_norm(x, weight, other, norm, 1e-5)]
for n in (1, 7, 16, 17, 64):
    few = [linears(x[:, :n], [weight], [None])[0], *linear_add_rms_norm(x[:, :n], weight, other[:, :n], norm, 1e-5)]
    assert all(torch.equal(some, all[:, :n]) for some, all in zip(few, whole, strict=True)), n
print("same")
"""
)

EPILOGUES = (
    IN_ORDER
    + """
import itertools
import torch
from retrieve_spec.kernels.triton_products import linears
from retrieve_spec.kernels.triton_rows import gate, rotate_both
from retrieve_spec.quantized import pack

def heads_of(product, width):
    return product.unflatten(2, (-1, width)).transpose(1, 2)

torch.manual_seed(0)
kind = torch.float16
FORMATS = (None, (4, False), (8, True), (4, True))  # unpacked; bits, and whether they are floats
for form, (rows, inputs, outputs, width) in itertools.product(
    FORMATS, ((1, 64, 192, 64), (7, 64, 192, 64), (17, 128, 128, 128), (3, 64, 144, 48), (130, 64, 64, 64))
):
    x = torch.randn(1, rows, inputs).to(kind)
    weights = [torch.randn(n, inputs).to(kind) for n in (outputs, outputs, width)]
    weights = [weight if form is None else pack(weight, *form) for weight in weights]
    biases = [torch.randn(n).to(kind) if rows > 1 else None for n in (outputs, outputs, width)]
    apart = linears(x, weights, biases)
    both = linears(x, weights[:2], biases[:2], is_gated=True)
    assert len(both) == 1 and torch.equal(both[0], gate(*apart[:2])), (form, rows, "gate")
    angles = [torch.randn(1, 1, rows, width).to(kind) for _ in range(2)]
    turned = linears(x, weights, biases, angles=angles)
    wanted = rotate_both(*(heads_of(each, width) for each in apart[:2]), *angles)
    for got, each in zip(turned, wanted):
        assert torch.equal(heads_of(got, width), each), (form, rows, width, "rotation")
    assert torch.equal(turned[2], apart[2])
print("same")
"""
)
"""What is done to the results of layers gives the same bits in their launch as in its own."""

SMALL = (
    PASSES
    + """
from transformers import AutoConfig, AutoModelForCausalLM
from retrieve_spec.kernels import triton_products as products, triton_rows as kernels

def built(family, dtype):
    config = AutoConfig.for_model(
        family, vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2,
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model

def all_are_fused(family, called):
    # by layer: queries with keys and values, gates with what they open, two whose sums are normalised; and the head
    assert called.count(products.linears) == 5 and called.count(products.linear_add_rms_norm) == 4
    assert kernels.gate not in called
    assert called.count(kernels.rotate_both) == (2 if family == "qwen3" else 0)  # its heads are normalised before

torch.manual_seed(0)
"""
)
"""Models of two layers."""

RECORDED = (
    SMALL
    + """
for family in ("qwen2", "qwen3"):
    model = built(family, torch.float16)
    (plain, _), (ours, called) = (run_pass(model, by, slice(3, None)) for by in (None, kernels))
    assert plain.shape == (1, 8, 99)
    assert (plain - ours).abs().max() <= 0.01 * plain.std(), (plain - ours).abs().max()
    all_are_fused(family, called)
    assert torch.nn.functional.linear not in called
print("same")
"""
)

PACKED_PASSES = (
    IN_ORDER
    + SMALL
    + """
import copy
from retrieve_spec.kernels.cpu import unpack
from retrieve_spec.quantized import WeightOnlyConfig, pack_model

for family, form in (
    ("llama", {"bits": 4}), ("qwen2", {"bits": 8}), ("llama", {"bits": 8, "floats": True}),
    ("llama", {"bits": 4, "floats": True}),
):
    model = built(family, torch.bfloat16)
    plain = copy.deepcopy(model)
    pack_model(model, WeightOnlyConfig(**form))
    for name, parameter in plain.named_parameters():
        if not (packed := model.get_parameter(name)).is_floating_point():
            parameter.data = unpack(packed, parameter.shape[1])[: len(parameter)].bfloat16()
    (wanted, _), (ours, called) = (run_pass(each, kernels) for each in (plain, model))
    assert wanted.shape == ours.shape == (1, 11, 99)
    best, least = wanted.topk(2).values, 0.02 if form == {"bits": 4, "floats": True} else 0.0  # by a polynomial
    clear = best[..., 0] - best[..., 1] >= least * wanted.std()
    assert torch.equal(wanted.argmax(-1)[clear], ours.argmax(-1)[clear]), "the same text"
    assert (wanted - ours).abs().max() <= 0.1 * wanted.std()
    all_are_fused(family, called)
    assert torch.ops.retrieve_spec.packed_product.default not in called
print("same")
"""
)

COMPILED = (
    COMPILER
    + """
import itertools
from retrieve_spec.kernels.triton_products import _linears

names = ["x", "cos", "sin"] + [f"{name}_{i}" for name in ("weight", "bias", "out") for i in range(3)]
aligned = [*names, "outputs_0", "outputs_1", "outputs_2", "inputs", "share"]
PLAIN, GATE, TURN = ({"GATED": gated, "HALF": half} for gated, half in ((False, 0), (True, 0), (False, 32)))

def product(architecture, rows, outputs, inputs, warps, stages, types, **constants):
    constants |= {"BLOCK_M": rows, "BLOCK_N": outputs, "BLOCK_K": inputs, "BIASED": False}
    return made(_linears, types, constants, architecture, aligned, num_warps=warps, num_stages=stages,
                enable_fp_fusion=not constants["HALF"])

for architecture, shared in ((80, 163), (90, 227)):
    for rows, outputs, stages, epilogue in (
        (16, 64, 5, GATE), (64, 64, 4, TURN), (128, 64, 4, GATE), (16, 16, 5, TURN), (64, 16, 4, PLAIN),
    ):
        out = "bf16" if epilogue is not PLAIN else "fp32"
        types = dict.fromkeys(names, "*bf16") | dict.fromkeys(names[-3:], f"*{out}")
        done = product(architecture, rows, outputs, 128, 4, stages, types, BITS=16, FLOATS=False, **epilogue)
        assert done.metadata.shared <= shared << 10, done.metadata.shared
        assert registers(done) <= 190
        assert re.search(r"cp.async.cg.shared.global .*, 0x10,", done.asm["ptx"]), "weights are read ahead"
        if architecture == 90:
            assert outputs < 64 or "wgmma" in done.asm["ptx"]
            assert epilogue is not TURN or "fma.rn.bf16" not in done.asm["ptx"], "products are rounded before the sum"
types = dict.fromkeys(names, "*bf16") | {f"weight_{i}": "*i32" for i in range(3)}
forms = ((4, False), (8, False), (8, True), (4, True))
packed = itertools.product((80, 89, 90), forms, ((16, 64, 64, TURN), (64, 128, 32, GATE)))
for architecture, (bits, floats), (rows, outputs, inputs, epilogue) in packed:
    done = product(architecture, rows, outputs, inputs, 2, 4, types, BITS=bits, FLOATS=floats, **epilogue)
    assert registers(done) <= (250 if floats and bits == 4 else 240) and done.metadata.shared <= 32 << 10
    assert re.search(r"cp.async.cg.shared.global .*, 0x10,", done.asm["ptx"]), "read ahead, 16 bytes at once"
    assert "mma.sync" in done.asm["ptx"]
    assert "ttg.local_alloc %" not in done.asm["ttgir"], "what was unpacked stays in registers"
print("compiled")
"""
)


@pytest.mark.parametrize(
    "script",
    [AGREES, PACKED, EPILOGUES, RECORDED, PACKED_PASSES],
    ids=["products", "packed products", "epilogues", "passes", "packed passes"],
)
def test_products_agree_with_torch(interpret: Interpret, script: str) -> None:
    assert interpret(script) == "same"


def test_products_compile(tmp_path: Path) -> None:
    """By Triton's compiler and assembler, which need no GPU."""
    assert compiled_by(COMPILED, tmp_path) == "compiled"
