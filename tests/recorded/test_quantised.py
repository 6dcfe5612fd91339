"""Quantised targets: what is verified how, and that the output stays the target's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from scripted_drafter import ScriptedDrafter
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import retrieve_spec as rs

IDS = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(30)]])


class WeightOnly(nn.Module):
    """A linear layer with int8 weights and one scale per output, as weight-only quantisation stores it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.in_features = linear.in_features

    def _save_to_state_dict(self, *args: Any) -> None:
        """Lose something, as 4-bit layers of bitsandbytes do on a CPU."""
        self.codes.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes.float() * self.scale).T


@pytest.fixture(scope="module")
def full() -> Any:
    config = LlamaConfig(
        vocab_size=199, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def check(model: Any, script: str, tokens_per_pass: float) -> None:
    plain = model.generate(IDS, max_new_tokens=40, do_sample=False)
    rs.accelerate(model, drafter=ScriptedDrafter(plain[0], script), nodes=24, recorded_pass="always")
    assert torch.equal(model.generate(IDS, max_new_tokens=40, do_sample=False), plain)
    assert model.speculation.last.tokens_per_pass >= tokens_per_pass


def test_weight_only_quantisation_is_recorded_and_verified_in_trees(full: Any) -> None:
    model = copy.deepcopy(full)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, WeightOnly(child))
    check(model, "branchy", 2.0)
    assert model.speculation.mode == "tree" and model.speculation.last.pass_kind == "recorded"


@pytest.mark.filterwarnings("ignore")
def test_activations_quantised_over_all_rows_leave_plain_decoding(full: Any) -> None:
    """One scale for all rows of a pass: a row's logits depend on its neighbours, so drafts cannot be verified."""
    quantised = torch.ao.quantization.quantize_dynamic(full, {nn.Linear}, dtype=torch.qint8)
    check(quantised, "right", 1.0)
    assert quantised.speculation.mode == "plain"
    assert "scale their inputs over all rows of a pass" in quantised.speculation.reason


@pytest.mark.parametrize("kind", ["Linear8bitLt", "Linear4bit"])
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_layers_say_what_they_say_alone(full: Any, kind: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = copy.deepcopy(full)
    for layer in model.model.layers:
        for name, linear in list(layer.mlp.named_children()):
            if not isinstance(linear, nn.Linear):
                continue
            made = getattr(bitsandbytes.nn, kind)(linear.in_features, linear.out_features, bias=False)
            if kind == "Linear4bit":
                made.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            else:
                made.state.has_fp16_weights = False
                made.weight = bitsandbytes.nn.Int8Params(
                    linear.weight.data, requires_grad=False, has_fp16_weights=False
                )
            setattr(layer.mlp, name, made.to("cpu"))
    check(model.eval(), "branchy", 1.0)
    assert model.speculation.mode == "tree"
