"""Every family says what plain `generate` says, whatever is drafted."""

import functools
import warnings
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, Family, build
from scripted_drafter import SCRIPTS, ScriptedDrafter

import retrieve_spec as rs

NEW = 20
CASES = [
    pytest.param(family, attention, id=f"{family.name}-{attention}")
    for family in FAMILIES
    for attention in family.attention
]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.rotates]


def ids(length: int, step: int = 37) -> torch.Tensor:
    return torch.tensor([[3 + (i * step + 11) % (VOCAB - 3) for i in range(length)]])


@functools.cache
def model_of(family: Family, attention: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(family, attention)


def greedy(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


def plain(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """What the model says by itself, accelerated or not."""
    return type(model).generate(model, **inputs, max_new_tokens=NEW, do_sample=False, **options)


def with_answer(model: Any, answer: Any, script: str) -> ScriptedDrafter:
    """Let a model draft so; one that is accelerated goes on to be, since probing it takes longer than all else."""
    speculation = getattr(model, "speculation", None)
    drafter = speculation.drafter() if speculation else None
    if isinstance(drafter, ScriptedDrafter):
        drafter.turn_to(answer, script)
    else:
        drafter = ScriptedDrafter(answer, script, vocab=VOCAB)
        rs.accelerate(model, drafter=drafter, nodes=24)
    return drafter


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_greedy_output_is_that_of_generate(family: Family, attention: str) -> None:
    model = model_of(family, attention)
    for length in (40, 5):  # longer than every window; crossing it while generating
        inputs = {"input_ids": ids(length)}
        expected = plain(model, inputs)
        for script in SCRIPTS:
            drafter = with_answer(model, expected[0], script)
            assert model.speculation.mode == family.mode, model.speculation.reason
            assert torch.equal(greedy(model, inputs), expected), script
            report = model.speculation.last
            crosses = "longrope" in family.name and length <= 32 < length + NEW
            assert report.mode == ("delegated" if crosses else family.mode)
            if family.mode != "plain" and "ntk" not in family.name:
                check_acceptance(script, report, drafter, family.mode)


def check_acceptance(script: str, report: Any, drafter: ScriptedDrafter, mode: str) -> None:
    """Right drafts are all accepted: six and a bonus per pass after the first token; wrong ones never are."""
    if script == "right":
        assert report.passes == 1 + -(-(NEW - 1) // 7)
    elif script == "wrong":
        assert report.passes == NEW
        assert not report.accepted_by_source
    elif script == "half" or mode == "tree":
        assert 1 < report.tokens_per_pass < 4
    assert drafter.finished == 1
    assert drafter.text == drafter.answer


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_sampled_output_does_not_depend_on_drafting(family: Family, attention: str) -> None:
    model = model_of(family, attention)
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}
    with_answer(model, [], "right")
    torch.manual_seed(7)
    undrafted = model.generate(ids(40), draft="off", **options)
    for script in ("right", "branchy"):
        with_answer(model, undrafted[0], script)
        torch.manual_seed(7)
        assert torch.equal(model.generate(ids(40), **options), undrafted)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_left_padding_is_honoured(family: Family, attention: str) -> None:
    model = model_of(family, attention)
    inputs = {
        "input_ids": torch.cat([torch.zeros(1, 5, dtype=torch.long), ids(30)], dim=1),
        "attention_mask": torch.tensor([[0] * 5 + [1] * 30]),
    }
    expected = plain(model, inputs)
    for script in ("right", "branchy"):
        with_answer(model, expected[0], script)
        assert torch.equal(greedy(model, inputs), expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba2", "mamba", "jamba", "lfm2"])
def test_prompts_may_come_in_pieces(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model = model_of(family, family.attention[0])
    expected = greedy(model, {"input_ids": ids(22)})
    drafter = ScriptedDrafter(expected[0], "half", vocab=VOCAB)
    try:
        rs.accelerate(model, drafter=drafter, nodes=24, prefill_chunk=5, recorded_pass="off")
        assert torch.equal(greedy(model, {"input_ids": ids(22)}), expected)
    finally:
        rs.restore(model)


def layers_of(cache: Any) -> list[dict[str, Any]]:
    """What a cache holds, layer by layer."""
    names = ("keys", "values", "cumulative_length", "record_past", "conv_states", "recurrent_states")
    return [{name: getattr(layer, name) for name in names if hasattr(layer, name)} for layer in cache.layers]


def assert_same_cache(cache: Any, expected: Any) -> None:
    assert type(cache) is type(expected)
    for layer, wanted in zip(layers_of(cache), layers_of(expected), strict=True):
        assert layer.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(layer[name], value, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_cache_is_left_as_generate_leaves_it(family: Family, attention: str) -> None:
    model = model_of(family, attention)
    inputs = {"input_ids": ids(30)}
    more = ids(6, step=53)
    kept = plain(model, inputs, return_dict_in_generate=True)
    for script in ("branchy", "right"):
        with_answer(model, kept.sequences[0], script)
        ours = greedy(model, inputs, return_dict_in_generate=True)
        assert torch.equal(ours.sequences, kept.sequences)
    assert ours.keys() == kept.keys()
    if family.model_type in ("mamba", "mamba2", "recurrent_gemma"):
        return  # no cache of attention layers
    assert_same_cache(ours.past_key_values, kept.past_key_values)
    longer = {"input_ids": torch.cat([kept.sequences, more], dim=1)}
    expected = plain(model, longer, past_key_values=kept.past_key_values)
    plain(model, {"input_ids": ids(5)})  # dynamic NTK keeps what the longest text made of it until a short one comes
    with_answer(model, expected[0], "branchy")
    got = greedy(model, longer, past_key_values=ours.past_key_values)
    assert torch.equal(got, expected)
    assert_same_cache(ours.past_key_values, kept.past_key_values)
