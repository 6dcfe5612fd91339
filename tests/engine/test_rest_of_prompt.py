"""The rest of a prompt behind a given cache: a few tokens are read in one pass with the first draft."""

import copy
from typing import Any

import pytest
import torch
from batch_rows import KINDS, script, small_model
from transformers import DynamicCache

import retrieve_spec as rs

PROMPT = torch.tensor([[3 + (i * 37 + 7) % 190 for i in range(60)]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SAMPLED = OPTIONS | {"do_sample": True, "temperature": 1.0, "seed": 3}


def read(model: Any, tokens: int) -> DynamicCache:
    """A cache that holds the prompt's beginning."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(PROMPT[:, :tokens], past_key_values=cache)
    return cache


@pytest.mark.parametrize("options", [OPTIONS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rest", [1, 2, 16, 17, 40])
def test_the_first_pass_behind_a_cache_drafts(
    rest: int, options: Any, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(small_model, "llama")
    rs.accelerate(model, recorded_pass="always")
    expected = model.generate(PROMPT, draft="off", **options)
    rs.restore(model)
    script(model, monkeypatch, expected, "right", recorded_pass="always")
    cache = read(model, 60 - rest)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, **options), expected)
    assert cache.get_seq_length() == 83, "all but the last token"
    report = model.speculation.last
    assert (report.mode, report.new_tokens) == ("tree", 24)
    apart = rest > 16  # a pass of its own reads them
    assert report.passes == len(report.per_pass) + apart
    assert report.per_pass[0][:2] == (6, 6)
    assert report.passes == 4 + apart
    cache.crop(-1)
    again = model.generate(expected[:, :-1], past_key_values=cache, **options | {"max_new_tokens": 1})
    assert torch.equal(again, expected)


@pytest.mark.parametrize(("model_type", "settings"), KINDS[1:], ids=["windows", "learned positions"])
@pytest.mark.parametrize("rest", [1, 5])
def test_other_caches_are_read_as_before_and_the_text_is_the_same(
    model_type: str, settings: Any, rest: int, shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(small_model, model_type, **settings)
    expected = model.generate(PROMPT, **OPTIONS)
    script(model, monkeypatch, expected, "branchy", recorded_pass="always")
    assert torch.equal(model.generate(PROMPT, past_key_values=read(model, 60 - rest), **OPTIONS), expected)


def test_a_copied_cache_is_left_alone(shared: Any) -> None:
    model = shared(small_model, "llama")
    rs.accelerate(model, recorded_pass="always")
    cache = read(model, 59)
    twin = copy.deepcopy(cache)
    first, second = (model.generate(PROMPT, past_key_values=held, **OPTIONS) for held in (cache, twin))
    assert torch.equal(first, second)
