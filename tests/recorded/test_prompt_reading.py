"""Prompts read by the recorded pass: same tokens and cache as the model's own reading, in chunks or in turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from found_once import FoundOnce
from small_decoders import accelerate, build, ids
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.recorded import recorded_verifier
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.verify.verifier import VerifierInputs

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def chunks_of_eight(monkeypatch):
    monkeypatch.setattr(recorded_verifier, "PIECE", 8)
    monkeypatch.setattr(recorded_verifier, "FEW", 4)


@pytest.fixture(scope="module")
def _llama():
    return FoundOnce(build("llama"))


@pytest.fixture
def model(_llama, rows, monkeypatch):
    _llama.use(monkeypatch)
    yield _llama.model
    rs.restore(_llama.model)


@pytest.fixture
def rows(monkeypatch):
    """Rows of every recorded pass, which reads prompts whether or not that is faster here."""
    seen: list[int] = []
    run = RecordedPass.run

    def watched(self, input_ids, *arguments):
        seen.append(input_ids.shape[1])
        return run(self, input_ids, *arguments)

    always = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(RecordedPass, "reads_prompts", always, raising=False)
    monkeypatch.setattr(RecordedPass, "run", watched)
    return seen


@pytest.mark.parametrize("length", [5, 8, 9, 17, 31])
def test_output_and_cache_are_those_of_generate(model, rows, length):
    plain = model.generate(ids(length), **GREEDY, return_dict_in_generate=True)
    accelerate(model, answer=plain.sequences[0], prompt_logits=1)
    rows.clear()
    ours = model.generate(ids(length), **GREEDY, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, plain.sequences)
    chunks = [*[8] * ((length - 1) // 8), length % 8 or 8]
    assert rows[: len(chunks)] == chunks
    for layer, wanted in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
        size = min(layer.keys.shape[2], wanted.keys.shape[2])
        torch.testing.assert_close(layer.keys[:, :, :size], wanted.keys[:, :, :size], atol=2e-5, rtol=2e-5)


def test_the_model_begins_in_a_cache_that_has_no_layers_yet(model, rows):
    plain = model.generate(ids(17), **GREEDY)
    accelerate(model, answer=plain[0], script="right", prompt_logits=1)
    cache = DynamicCache()
    rows.clear()
    assert torch.equal(model.generate(ids(17), **GREEDY, past_key_values=cache), plain)
    assert cache.get_seq_length() == 28 and rows[:2] == [8, 8], rows


@pytest.mark.parametrize("keep", [1, 5, 8, 13])
@pytest.mark.parametrize("chunk", [31, 12, 5])
def test_kept_logits_and_states_are_the_models(model, rows, keep, chunk):
    rs.accelerate(model, recorded_pass="always")
    (verifier,) = model.speculation.verifiers()
    prompt = ids(31)
    cache = DynamicCache(config=model.config)
    verifier.start(
        VerifierInputs(prompt, {"past_key_values": cache, "position_ids": torch.arange(31)[None]}, max_length=64)
    )
    rows.clear()
    tokens = prompt[0].numpy().astype(np.int32)
    with torch.no_grad():
        while len(tokens) > chunk:
            verifier.forward(tokens[:chunk], want_hidden="last")
            verifier.commit(np.empty(0, np.int32))
            tokens = tokens[chunk:]
        out = verifier.forward(tokens, keep=min(keep, len(tokens)), want_hidden="last")
        verifier.commit(np.empty(0, np.int32))
        whole = model(prompt, output_hidden_states=True)
    assert rows
    kept = min(keep, len(tokens))
    assert out.logits.shape[0] == out.hidden.shape[0] == kept
    torch.testing.assert_close(out.logits, whole.logits[0, -kept:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.hidden, whole.hidden_states[-1][0, -kept:], atol=1e-4, rtol=1e-4)


def test_a_second_turn_is_read_on_the_cache_of_the_first(model, rows):
    expected = model.generate(ids(20), max_new_tokens=60, do_sample=False)
    accelerate(model, answer=expected[0], script="right", prompt_logits=1)
    cache = DynamicCache(config=model.config)
    model.generate(ids(20), max_new_tokens=10, do_sample=False, past_key_values=cache)
    rows.clear()
    ours = model.generate(expected[:, :60], max_new_tokens=20, do_sample=False, past_key_values=cache)
    assert torch.equal(ours, expected)
    assert rows[:4] == [8, 8, 8, 7]  # 31 tokens behind the 29 that the cache holds


def test_windows_are_left_to_the_model(rows):
    model = build("mistral", sliding_window=12)
    expected = model.generate(ids(31), **GREEDY)
    accelerate(model, answer=expected[0], script="wrong", nodes=2, prompt_logits=1)
    rows.clear()
    assert torch.equal(model.generate(ids(31), **GREEDY), expected)
    assert max(rows) == 3


@pytest.mark.parametrize("length", [10, 19])
def test_a_cache_in_another_format_is_read_by_the_model(model, length):
    """Which plain generate makes one in the model's format with the first rows that it adds."""
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(ids(20)[:, :length], past_key_values=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.half(), layer.values.half()
    plain = model.generate(ids(20), **GREEDY, past_key_values=caches[0])
    accelerate(model, nodes=8)
    assert torch.equal(model.generate(ids(20), **GREEDY, past_key_values=caches[1]), plain)
    assert model.speculation.last.pass_reason == "the cache holds numbers of another format"
