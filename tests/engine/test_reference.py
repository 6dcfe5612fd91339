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
    options = {"max_new_tokens": 60}
    greedy = model.generate(**inputs, do_sample=False, **options)
    rs.accelerate(model, drafter=ScriptedDrafter(greedy[0], script, vocab=8192), nodes=32, recorded_pass=recorded_pass)
    assert torch.equal(model.generate(**inputs, do_sample=False, **options), greedy)
    assert model.speculation.last.tokens_per_pass > 1.5
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0, "seed": 3}
    plain = model.generate(**inputs, draft="off", **sampling, **options)
    rs.accelerate(model, drafter=ScriptedDrafter(plain[0], script, vocab=8192), nodes=32, recorded_pass=recorded_pass)
    assert torch.equal(model.generate(**inputs, **sampling, **options), plain)
    assert model.speculation.last.tokens_per_pass > 1.5


def test_stop_strings_cut_inside_an_accepted_run(reference_model: Any, reference_tokenizer: Any, inputs: Any) -> None:
    model, length = reference_model, inputs.input_ids.shape[1]
    whole = model.generate(**inputs, do_sample=False, max_new_tokens=40)
    text = reference_tokenizer.decode(whole[0, length:])
    stop = text.strip()[10:14]
    options = {"stop_strings": [stop], "do_sample": False, "max_new_tokens": 40}
    expected = model.generate(**inputs, tokenizer=reference_tokenizer, **options)
    assert expected.shape[1] < whole.shape[1]
    rs.accelerate(model, reference_tokenizer, drafter=ScriptedDrafter(whole[0], vocab=8192), nodes=16)
    assert torch.equal(model.generate(**inputs, tokenizer=reference_tokenizer, **options), expected)
    assert model.speculation.last.mode == "tree"
    pieces = rs.generate_stream(model, inputs, **options)
    shown = "".join(piece.text for piece in pieces)
    assert shown == reference_tokenizer.decode(expected[0, length:])


def test_accelerated_with_its_own_drafter(reference_model: Any, inputs: Any) -> None:
    model = reference_model
    greedy = model.generate(**inputs, do_sample=False, max_new_tokens=80)
    rs.accelerate(model)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=80), greedy)
    plain = model.generate(**inputs, do_sample=True, max_new_tokens=40, seed=1, draft="off")
    assert torch.equal(model.generate(**inputs, do_sample=True, max_new_tokens=40, seed=1), plain)
