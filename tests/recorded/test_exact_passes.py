"""`exact=True`: log-probabilities with drafts are those without, bit for bit; and the row kernels of bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted_drafter import ScriptedDrafter
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import retrieve_spec as rs
from retrieve_spec.kernels import bfloat16_rows
from retrieve_spec.verify.number_format import rows_for_one_order

SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
IDS = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(170)]])
GREEDY = {"max_new_tokens": 60, "do_sample": False}
SAMPLED = {"max_new_tokens": 60, "do_sample": True, "temperature": 1.3, "seed": 5}


def made(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=40)).to(dtype).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype).eval()


def answer(model: Any, **options: Any) -> Any:
    return model.generate(IDS, return_dict_in_generate=True, return_logprobs=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_drafts_do_not_change_a_bit(family: str, dtype: torch.dtype) -> None:
    model, drafter = made(family, dtype), ScriptedDrafter([0] * 300)
    rs.accelerate(model, drafter=drafter, nodes=24, recorded_pass="always", exact=True)
    for options in (GREEDY, SAMPLED):
        alone = answer(model, draft="off", **options)
        assert model.speculation.last.passes == 60
        for script in ("right", "half", "branchy"):
            drafter.turn_to(alone.sequences[0], script)
            drafted = answer(model, **options)
            assert torch.equal(drafted.sequences, alone.sequences)
            assert all(map(torch.equal, drafted.logprobs, alone.logprobs))
            assert model.speculation.last.passes < 45
    assert model.speculation.last.pass_kind == "recorded"


def test_calls_that_are_not_recorded_are_not_drafted_for() -> None:
    model = made("llama", torch.bfloat16)
    plain = model.generate(inputs_embeds=model.get_input_embeddings()(IDS), **GREEDY)
    rs.accelerate(model, drafter=ScriptedDrafter([0] * 300), nodes=24, recorded_pass="always", exact=True)
    assert torch.equal(model.generate(inputs_embeds=model.get_input_embeddings()(IDS), **GREEDY), plain)
    assert model.speculation.last.mode == "plain" and model.speculation.last.passes == 60


class OrderByRows(nn.Linear):
    """A linear layer that adds up otherwise where it is given fewer than four rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if x.shape[-2] >= 4 else 1.0078125)


class NoOrder(nn.Linear):
    """A linear layer whose products differ with every number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.shape[-2]


def test_rows_from_which_there_is_one_order() -> None:
    layers = [nn.Linear(32, 16), OrderByRows(32, 16), NoOrder(32, 16)]
    of_layers = [nn.ModuleList([layer]).to(torch.float16) for layer in layers]
    for module in of_layers:
        module.device, module.dtype = torch.device("cpu"), torch.float16
    with torch.inference_mode():
        assert [rows_for_one_order(module) for module in of_layers] == [1, 4, 0]


def test_a_model_without_one_order_is_decoded_plainly() -> None:
    model = made("llama", torch.float16)
    model.lm_head.__class__ = NoOrder
    plain = model.generate(IDS, **GREEDY)
    rs.accelerate(model, recorded_pass="always", exact=True)
    assert torch.equal(model.generate(IDS, **GREEDY), plain)
    assert model.speculation.last.mode == "plain" and "in another order" in model.speculation.last.reason


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_bfloat16_rows_are_what_torch_computes(rows: int) -> None:
    torch.manual_seed(rows)
    x, up, weight = ((torch.randn(1, n, 200) * 3).bfloat16() for n in (rows, rows, 1))
    weight = weight[0, 0]
    wide = (x + up).float()
    normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    total, ours = bfloat16_rows.add_rms_norm(x, up, weight, 1e-5)
    assert torch.equal(total, x + up) and torch.equal(bfloat16_rows.rms_norm(total, weight, 1e-5), ours)
    torch.testing.assert_close(ours, normed, atol=0.0, rtol=2**-7)
    assert float((ours != normed).float().mean()) < 1e-3  # where a sum in another order is rounded otherwise
    assert torch.equal(bfloat16_rows.gate(x, up), functional.silu(x) * up)
    cos, sin = (torch.randn(1, 1, rows, 24).bfloat16() for _ in range(2))
    heads, keys = (torch.randn(1, rows, n, 24).bfloat16().transpose(1, 2) for n in (3, 2))
    for given, turned in zip((heads, keys), bfloat16_rows.rotate_both(heads, keys, cos, sin), strict=True):
        low, high = given[..., :12], given[..., 12:]
        assert torch.equal(turned, given * cos + torch.cat([-high, low], -1) * sin)
        assert turned.transpose(1, 2).is_contiguous()


def test_bfloat16_rows_keep_what_is_no_number() -> None:
    x = torch.tensor([[[float("nan"), 1.0], [float("inf"), 1.0], [3.4e38, 1.0]]]).bfloat16()
    total, _ = bfloat16_rows.add_rms_norm(x, x, torch.ones(2).bfloat16(), 1e-5)
    torch.testing.assert_close(total, x + x, equal_nan=True)
