"""`exact=True`: log-probabilities with drafts are those without, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted_drafter import ScriptedDrafter
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import retrieve_spec as rs
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


def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    model = made("llama", torch.bfloat16)
    rs.accelerate(model, nodes=12, recorded_pass="always", exact=True)
    prompts = torch.cat([IDS, IDS.flip(1), IDS.roll(60, 1)])
    alone = [model.generate(ids[None], draft="off", return_dict_in_generate=True, return_logprobs=True, **GREEDY)
             for ids in prompts]  # fmt: skip
    batch = model.generate(prompts, return_dict_in_generate=True, return_logprobs=True, **GREEDY)
    assert model.speculation.last.nodes > 0
    for row, one in enumerate(alone):
        assert torch.equal(batch.sequences[row], one.sequences[0])
        assert torch.equal(batch.logprobs[row], one.logprobs[0])


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
