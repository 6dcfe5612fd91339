"""Calls that ask for a cache of a fixed size and do not get it back are decoded over one that grows, with drafts."""

from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, build
from transformers import StaticCache

import retrieve_spec as rs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3-sliding"])
def test_texts_are_those_over_the_cache_that_was_asked_for(name: str) -> None:
    model = build(next(family for family in FAMILIES if family.name == name), "sdpa")
    ids = torch.randint(3, VOCAB, (3, 20), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
    wanted = [type(model).generate(model, rows, **options) for rows in (ids[:1], ids)]
    rs.accelerate(model, nodes=8, recorded_pass="off")
    for rows, answer in zip((ids[:1], ids), wanted, strict=True):
        assert torch.equal(model.generate(rows, **options), answer)
        assert model.speculation.last.mode == "tree"
    config = model.generation_config.__class__(**options, pad_token_id=0)
    assert torch.equal(model.generate(ids[:1], generation_config=config), wanted[0])
    assert model.speculation.last.mode == "tree"
    assert config.cache_implementation == "static"
    told = model.generate(ids[:1], **options, return_dict_in_generate=True)
    assert isinstance(told.past_key_values, StaticCache)
    assert torch.equal(told.sequences, wanted[0])
    assert "cache implementation" in model.speculation.last.reason


def test_a_model_that_sees_other_keys_in_one_has_it() -> None:
    """GPT-Neo's windows are cut by slot from a buffer, which an empty slot moves."""
    family = next(family for family in FAMILIES if family.name == "gpt_neo")
    model = build(family, family.attention[0])
    ids = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    fixed = type(model).generate(model, ids, **options, cache_implementation="static")
    assert not torch.equal(fixed, type(model).generate(model, ids, **options))
    rs.accelerate(model, nodes=8)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), fixed)
