"""What a call may do besides asking for tokens goes as in plain `generate`: errors, copies, calls in calls."""

import copy
import math
from typing import Any

import pytest
import torch
from scripted_drafter import ScriptedDrafter
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.errors import DistributionError

GREEDY = {"do_sample": False, "max_new_tokens": 24}


def accelerate(model: Any, answer: torch.Tensor, script: str = "branchy", **options: Any) -> None:
    rs.accelerate(model, drafter=ScriptedDrafter(answer[0], script, length=9), nodes=32, **options)


def same_accelerated(model: Any, call: Any, **options: Any) -> torch.Tensor:
    """The text of a call on the model as it is, after checking that it is the same on the accelerated model."""
    expected: torch.Tensor = call()
    accelerate(model, expected, **options)
    got = call()
    assert got.dtype == expected.dtype and torch.equal(got, expected)
    return expected


class Interrupted:
    """A processor (which gives the scores back) or criterion (which never stops) that raises at its n-th call."""

    def __init__(self, calls: int, who: str) -> None:
        self.left, self.who = calls, who

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return scores if self.who == "logits_processor" else torch.tensor([False])


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
@pytest.mark.parametrize("script", ["right", "branchy"])
@pytest.mark.parametrize("who", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("calls", [1, 9])
def test_a_cache_is_whole_after_an_interruption(
    tiny: Any, prompt: torch.Tensor, who: str, calls: int, script: str, recorded_pass: Any
) -> None:
    answer = tiny.generate(prompt, **GREEDY)

    def interrupted() -> tuple[int, DynamicCache]:
        cache = DynamicCache(config=tiny.config)
        with pytest.raises(KeyboardInterrupt):
            tiny.generate(prompt, past_key_values=cache, **{who: [Interrupted(calls, who)]}, **GREEDY)
        return cache.get_seq_length(), cache

    length, expected = interrupted()
    accelerate(tiny, answer, script, recorded_pass=recorded_pass)
    got_length, got = interrupted()
    assert got_length == length
    for a, b in zip(got.layers, expected.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(a.values, b.values, atol=1e-4, rtol=1e-3)
    both = [tiny.generate(answer, max_new_tokens=1, past_key_values=held, do_sample=False) for held in (got, None)]
    assert torch.equal(*both)


def test_an_accelerated_assistant_assists(tiny: Any, prompt: torch.Tensor) -> None:
    assistant = copy.deepcopy(tiny)
    accelerate(assistant, tiny.generate(prompt, **GREEDY))
    same_accelerated(tiny, lambda: tiny.generate(prompt, assistant_model=assistant, **GREEDY))


def test_narrow_prompts_become_int64(tiny: Any, prompt: torch.Tensor) -> None:
    assert same_accelerated(tiny, lambda: tiny.generate(prompt.int(), **GREEDY)).dtype == torch.int64


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_a_generation_within_a_generation(tiny: Any, prompt: torch.Tensor, recorded_pass: Any) -> None:
    """A processor, a criterion and a streamer that ask the same model for tokens."""

    def guided(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        hint = tiny.generate(prompt[:, :5], max_new_tokens=2, do_sample=False)[0, -1]
        return scores + 3.0 * (torch.arange(scores.shape[1]) == hint)

    class Echo:
        def put(self, value: torch.Tensor) -> None:
            tiny.generate(prompt[:, :4], max_new_tokens=2, do_sample=False)

        def end(self) -> None:
            pass

    def call() -> torch.Tensor:
        return tiny.generate(prompt, logits_processor=[guided], streamer=Echo(), **GREEDY)

    same_accelerated(tiny, call, recorded_pass=recorded_pass)
    assert tiny.speculation.last.tokens_per_pass > 1
    tiny.generate(prompt, **GREEDY)
    assert tiny.speculation.last.mode == "tree", "the next call is nobody's inner call"


def broken(model: Any, value: float, rows: slice) -> Any:
    """A copy whose logits are `value`, or NaN, for some tokens."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight[rows] = value
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [slice(5, 6), slice(190, 199), slice(None)], ids=["one", "tail", "all"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_decoding_of_a_model_that_overflows(
    tiny: Any, prompt: torch.Tensor, value: float, rows: slice, penalty: float
) -> None:
    model = broken(tiny, value, rows)
    same_accelerated(model, lambda: model.generate(prompt, repetition_penalty=penalty, **GREEDY))


@pytest.mark.parametrize("rules", [{}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.9}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sampling_from_no_distribution_is_an_error(
    tiny: Any, prompt: torch.Tensor, value: float, rules: dict[str, Any]
) -> None:
    def leave_none(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf)

    model = broken(tiny, value, slice(5, 6))
    options = {"do_sample": True, "max_new_tokens": 8, "top_k": 0} | rules
    own: dict[str, Any] = {"logits_processor": [leave_none]}
    for given in ({}, own):
        with pytest.raises(RuntimeError):
            model.generate(prompt, **given, **options)
    accelerate(model, prompt)
    for given in ({}, own):
        with pytest.raises(DistributionError, match="scores to sample from"):
            model.generate(prompt, **given, **options)


@pytest.mark.parametrize("rows", [1, 2])
def test_half_a_token_more_is_one(tiny: Any, prompt: torch.Tensor, rows: int) -> None:
    """As where a limit is a share of a length."""
    ids = prompt.expand(rows, -1)
    text = same_accelerated(tiny, lambda: tiny.generate(ids, do_sample=False, max_new_tokens=9.5))
    assert text.shape[1] == ids.shape[1] + 10
