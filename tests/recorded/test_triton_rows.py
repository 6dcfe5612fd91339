"""The GPU kernels for rows, run by Triton's interpreter on the CPU, against the operations they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import COMPILER, PASSES, Interpret, compiled_by

pytest.importorskip("triton")

AGREES = (
    PASSES
    + """
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from retrieve_spec.kernels import triton_rows as kernels

torch.manual_seed(0)
dtype = torch.DTYPE
for rows, width in ((1, 32), (7, 48), (3, 200)):
    x, weight = (torch.randn(1, rows, width) * 3).to(dtype), torch.randn(width).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), weight * normed.to(dtype), atol=1e-6, rtol=2e-3)
    up = torch.randn(1, rows, width).to(dtype)
    total, normed = kernels.add_rms_norm(x, up, weight, 1e-5)
    assert torch.equal(total, x + up) and torch.equal(normed, kernels.rms_norm(x + up, weight, 1e-5))
    torch.testing.assert_close(kernels.gate(x, up), functional.silu(x) * up, atol=1e-6, rtol=2e-6)
heads = torch.randn(1, 5, 3, 24).to(dtype).transpose(1, 2)
cos, sin = (torch.randn(1, 1, 5, 24).to(dtype) for _ in range(2))
low, high = heads[..., :12], heads[..., 12:]
got = kernels.rotate(heads, cos, sin)
assert torch.equal(got, heads * cos + torch.cat([-high, low], -1) * sin)
assert got.transpose(1, 2).is_contiguous()
keys = torch.randn(1, 5, 2, 24).to(dtype).transpose(1, 2)
both = kernels.rotate_both(heads, keys, cos, sin)
assert torch.equal(both[0], got) and torch.equal(both[1], kernels.rotate(keys, cos, sin))

sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, initializer_range=0.2)
for model, norms in (
    (LlamaForCausalLM(LlamaConfig(**sizes)), 1), (Qwen3ForCausalLM(Qwen3Config(**sizes)), 5),  # on heads, too
):
    model = model.to(dtype).eval()
    outs = []
    for fused in (False, True):
        logits, called = run_pass(model, kernels if fused else None)
        outs.append(logits)
        ours = (kernels.rms_norm, kernels.add_rms_norm, kernels.rotate, kernels.rotate_both, kernels.gate)
        counts = [called.count(kernel) for kernel in ours]
        assert counts == ([norms, 4, 0, 2, 2] if fused else [0, 0, 0, 0, 0]), counts
    assert (outs[0] - outs[1]).abs().max() <= 0.01 * outs[0].std(), (outs[0] - outs[1]).abs().max()
print("same")
"""
)


COMPILED = (
    COMPILER
    + """
from retrieve_spec.kernels import triton_rows as kernels

tensors = ("x", "other", "keys", "weight", "total", "out", "keys_out", "cos", "sin", "gate", "up")
for architecture, overlaps in ((80, False), (90, False), (90, True)):
    for kernel, constants in (
        (kernels._rms_norm, {"D": 4096, "BLOCK_D": 4096, "SUM": False, "PARTS": 1}),
        (kernels._rms_norm, {"D": 4096, "BLOCK_D": 4096, "SUM": True, "PARTS": 2}),
        (kernels._rotate, {"HALF": 64, "BLOCK_HALF": 64}),
        (kernels._gate, {"BLOCK": 1024}),
    ):
        types = dict.fromkeys(tensors, "*bf16") | {"eps": "fp32"}
        constants |= {"OVERLAP": overlaps}
        options = {"enable_fp_fusion": False} if kernel is kernels._rotate else {}
        code = made(kernel, types, constants, architecture, **options, launch_pdl=overlaps).asm["ptx"]
        if kernel is kernels._rotate and architecture == 90:  # before, products and sums are such instructions, too
            assert "fma" not in code, "each product is rounded before the sum, as torch does"
        if overlaps:  # nothing is read or written before the launch before it has ended
            touched = min(code.find(word) % len(code) for word in ("ld.global", "st.global"))
            assert 0 < code.find("griddepcontrol.wait") < touched
print("compiled")
"""
)


@pytest.mark.parametrize("dtype", ["float16", "float32"])  # the interpreter cuts bfloat16 off where a GPU rounds
def test_kernels_and_passes_agree_with_torch(interpret: Interpret, dtype: str) -> None:
    assert interpret(AGREES.replace("DTYPE", dtype)) == "same"


def test_kernels_compile(tmp_path: Path) -> None:
    """By Triton's compiler and assembler, which need no GPU."""
    assert compiled_by(COMPILED, tmp_path) == "compiled"
