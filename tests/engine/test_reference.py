"""The bundled model on real code: identical text, greedy and sampled, with its own tokenizer and stop strings."""

import inspect
import json
from typing import Any

import pytest
import torch
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs

pytestmark = pytest.mark.threads

CODE = inspect.getsource(json.decoder)


@pytest.fixture
def inputs(reference_tokenizer: Any) -> Any:
    return reference_tokenizer(CODE[:1200], return_tensors="pt", return_token_type_ids=False)


@pytest.mark.parametrize("recorded_pass", ["off", "auto"])
@pytest.mark.parametrize("script", ["right", "branchy"])
def test_greedy_and_sampled_text(reference_model: Any, inputs: Any, script: str, recorded_pass: Any) -> None:
    model = reference_model
    drafter = ScriptedDrafter([], script, vocab=8192)
    greedy = {"do_sample": False, "max_new_tokens": 60}
    plain = model.generate(**inputs, **greedy)
    rs.accelerate(model, drafter=drafter, nodes=32, recorded_pass=recorded_pass)
    sampled = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0, "seed": 3, "max_new_tokens": 60}
    undrafted = model.generate(**inputs, **sampled, draft="off")
    for options, wanted in ((greedy, plain), (sampled, undrafted)):
        drafter.turn_to(wanted[0], script)
        assert torch.equal(model.generate(**inputs, **options), wanted)
        assert model.speculation.last.tokens_per_pass > 1.5


def test_stop_strings_cut_a_stream_inside_an_accepted_run(
    reference_model: Any, reference_tokenizer: Any, inputs: Any
) -> None:
    """By the tokenizer that `accelerate` was given."""
    model, length = reference_model, inputs.input_ids.shape[1]
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    stop = reference_tokenizer.decode(whole[0, length:]).strip()[10:14]
    options = {"stop_strings": [stop], "do_sample": False, "max_new_tokens": 40}
    expected = model.generate(**inputs, tokenizer=reference_tokenizer, **options)
    assert expected.shape[1] < whole.shape[1]
    rs.accelerate(model, reference_tokenizer, drafter=ScriptedDrafter(whole[0], vocab=8192), nodes=16)
    shown = "".join(piece.text for piece in rs.generate_stream(model, inputs, **options))
    assert shown == reference_tokenizer.decode(expected[0, length:]) and model.speculation.last.mode == "tree"


def test_accelerated_with_its_own_drafter(reference_model: Any, inputs: Any) -> None:
    model = reference_model
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=80)
    rs.accelerate(model)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=80), greedy)
    plain = model.generate(**inputs, do_sample=True, max_new_tokens=40, seed=1, draft="off")
    assert torch.equal(model.generate(**inputs, do_sample=True, max_new_tokens=40, seed=1), plain)
