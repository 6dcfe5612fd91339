"""`exact=True`: log-probabilities with drafts are those without, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted_drafter import ScriptedDrafter
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import retrieve_spec as rs
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN
from retrieve_spec.quantized import WeightOnlyConfig, pack_model
from retrieve_spec.verify.comparison import rows_for_one_order

SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
IDS = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(170)]])
NEW = 40
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.3, "seed": 5}


def made(family: str, dtype: torch.dtype | int) -> Any:
    """A random model in a number format, or with so many bits a weight."""
    torch.manual_seed(0)
    if isinstance(dtype, int):
        model = made(family, torch.float32)
        pack_model(model, WeightOnlyConfig(dtype))
        return model
    if family == "mistral":
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=40)).to(dtype).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype).eval()


def needs_one_order(model: Any) -> None:
    """Skip a test where torch's products, which depend on the CPU, have no one order: programs have no odd widths."""
    if not rows_for_one_order(model):
        pytest.skip("no products of one order")


def answer(model: Any, **options: Any) -> Any:
    return model.generate(IDS, return_dict_in_generate=True, return_logprobs=True, **options)


@pytest.mark.skipif(not CAN_RUN, reason="no products")
def test_programs_are_of_one_order_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs attend, they do so whatever is drafted, and though torch's products have no one order."""
    monkeypatch.setattr("retrieve_spec.recorded.verifier_factory.rows_for_one_order", lambda model: 0)
    sizes = SIZES | {"vocab_size": 208, "hidden_size": 128}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).eval()
    drafter = ScriptedDrafter([0] * 300, length=90)
    rs.accelerate(model, drafter=drafter, nodes=100, recorded_pass="always", exact=True)
    options = GREEDY | {"max_new_tokens": 200}
    alone = answer(model, draft="off", **options)
    drafter.turn_to(alone.sequences[0], "right")
    drafted = answer(model, **options)
    assert torch.equal(drafted.sequences, alone.sequences)
    assert all(map(torch.equal, drafted.logprobs, alone.logprobs))
    assert model.speculation.last.passes < 10


FORMATS = [
    ("llama", torch.bfloat16),
    ("mistral", torch.bfloat16),
    ("llama", torch.float16),
    *(
        pytest.param(family, bits, marks=pytest.mark.skipif(not CAN_RUN, reason="no products"))
        for family, bits in (("llama", 4), ("mistral", 8))
    ),
]


@pytest.mark.parametrize(("family", "dtype"), FORMATS)
def test_drafts_do_not_change_a_bit(family: str, dtype: torch.dtype | int) -> None:
    model, drafter = made(family, dtype), ScriptedDrafter([0] * 300)
    needs_one_order(model)
    rs.accelerate(model, drafter=drafter, nodes=24, recorded_pass="always", exact=True)
    for options in (GREEDY, SAMPLED):
        alone = answer(model, draft="off", **options)
        assert model.speculation.last.passes == NEW
        for script in ("right", "half", "branchy"):
            drafter.turn_to(alone.sequences[0], script)
            drafted = answer(model, **options)
            assert torch.equal(drafted.sequences, alone.sequences)
            assert all(map(torch.equal, drafted.logprobs, alone.logprobs))
            assert model.speculation.last.passes < 0.75 * NEW
    assert model.speculation.last.pass_kind == "recorded"


def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    model = made("llama", torch.bfloat16)
    needs_one_order(model)
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
    assert model.speculation.last.mode == "plain" and model.speculation.last.passes == NEW


class OrderByRows(nn.Linear):
    """A linear layer that adds up otherwise where it is given fewer rows than `from_rows`."""

    from_rows = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if x.shape[-2] >= self.from_rows else 1.0078125)


def test_rows_from_which_there_is_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrieve_spec.verify.comparison.nn.Linear", OrderByRows)
    module: Any = nn.ModuleList([OrderByRows(64, 16)]).to(torch.float16)
    module.device, module.dtype = torch.device("cpu"), torch.float16
    OrderByRows.from_rows = 1
    here = rows_for_one_order(module)  # depends on the CPU
    if not here:
        pytest.skip("no products of one order")
    found = []
    for OrderByRows.from_rows in (4, 7, 100):
        found.append(rows_for_one_order(module))
    assert here <= 7 and found == [here, 7, 0]


def test_models_without_one_order_are_decoded_plainly() -> None:
    experts = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)).to(torch.bfloat16).eval()
    narrow = LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 80})).to(torch.bfloat16).eval()
    for model, why in (
        (made("llama", torch.float32), "for 16 bits"),
        (experts, "is not the weight of a linear layer"),
        (narrow, "80 wide"),
    ):
        plain = model.generate(IDS, **GREEDY)
        rs.accelerate(model, recorded_pass="always", exact=True)
        assert torch.equal(model.generate(IDS, **GREEDY), plain)
        assert model.speculation.last.mode == "plain" and why in model.speculation.last.reason


def test_the_first_token_is_exact_too() -> None:
    torch.manual_seed(0)
    wide = {**SIZES, "hidden_size": 1536, "vocab_size": 4000, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**wide)).to(torch.bfloat16).eval()
    rs.accelerate(model, nodes=8, recorded_pass="always", exact=True)
    for shift in range(12):
        ids = (IDS + 97 * shift) % 4000
        drafted, alone = (
            model.generate(
                ids, max_new_tokens=2, do_sample=False, draft=draft, output_logits=True, return_dict_in_generate=True
            )
            for draft in ("auto", "off")
        )
        assert all(map(torch.equal, drafted.logits, alone.logits))
