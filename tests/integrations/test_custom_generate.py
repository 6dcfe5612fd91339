"""`custom_generate`: a call of a plain model drafts, by the folder and as a callable; others stay as they are."""

import functools

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, TextStreamer

import retrieve_spec
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.errors import ConfigError, UnknownPresetError
from retrieve_spec.integrations import transformers as recipe

BY_FOLDER = {"custom_generate": recipe.FOLDER, "trust_remote_code": True}
AS_CALLABLE = {"custom_generate": recipe.generate}
TEXT = "def add(a, b):\n    return a + b\n\n\ndef add_all(numbers):\n    total = 0\n"


@pytest.fixture
def inputs(reference_tokenizer):
    return reference_tokenizer(TEXT, return_tensors="pt").to("cpu")


@pytest.fixture(params=[BY_FOLDER, AS_CALLABLE], ids=["folder", "callable"])
def way(request, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return request.param


@pytest.mark.parametrize("asked", [{}, {"do_sample": True, "temperature": 0.8, "top_k": 20}], ids=["greedy", "sampled"])
def test_text_is_that_of_an_accelerated_model(reference_model, inputs, way, asked):
    asked = {"max_new_tokens": 48, **asked}
    with retrieve_spec.accelerated(reference_model):
        wanted = reference_model.generate(**inputs, **asked, seed=7)
    assert torch.equal(reference_model.generate(**inputs, **way, **asked, seed=7), wanted)
    last = reference_model.speculation.last
    assert last.mode == "tree" and last.passes < last.new_tokens


def test_other_calls_stay_as_they_are(tiny, prompt, way):
    before = tiny.generate
    tiny.generate(prompt, **way, max_new_tokens=4)
    prepared, report = tiny.speculation, tiny.speculation.last
    assert "generate" not in vars(tiny) and tiny.generate == before
    tiny.generate(prompt, max_new_tokens=4)
    assert tiny.speculation.last is report
    tiny.generate(prompt, **way, max_new_tokens=4)
    assert tiny.speculation is prepared and prepared.last is not report, "prepared once"
    retrieve_spec.restore(tiny)
    assert not hasattr(tiny, "speculation") and tiny.generate == before
    tiny.generate(prompt, **way, max_new_tokens=4)
    assert isinstance(tiny.speculation, Speculation)


def test_options_of_calls_and_of_models(reference_model, reference_tokenizer, inputs, way, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text(TEXT * 4)
    build_datastore(tmp_path / "store", tmp_path / "texts", reference_tokenizer)
    stores = {"datastores": [str(tmp_path / "store")]}
    plain = reference_model.generate(**inputs, max_new_tokens=16)
    right = {"prediction": plain[0, inputs.input_ids.shape[1] :].tolist(), "nodes": 16}
    for given in ({"draft": "off"}, {"nodes": 3}, right):
        assert torch.equal(reference_model.generate(**inputs, **way, max_new_tokens=16, **given), plain)
    first = reference_model.speculation
    assert first.last.passes < 4, "the prediction came true"
    assert torch.equal(reference_model.generate(**inputs, **way, max_new_tokens=16, **stores), plain)
    second = reference_model.speculation
    assert second is not first and len(second.drafters.datastores) == 1
    for given in ({}, stores):
        reference_model.generate(**inputs, **way, max_new_tokens=4, **given)
        assert reference_model.speculation is second
    with pytest.raises(UnknownPresetError):
        reference_model.generate(**inputs, **way, draft="nonsense")


def test_fields_of_the_configuration_by_the_folder(reference_model, reference_tokenizer, inputs, tmp_path, capsys):
    way = BY_FOLDER
    assert not recipe._ONCE & set(GenerationConfig().to_dict())
    reference_model.generate(**inputs, **way, max_new_tokens=8, session=True, recorded_pass="off")
    assert reference_model.speculation.config.session is True
    streamer = TextStreamer(reference_tokenizer)
    reference_model.generate(**inputs, **way, max_new_tokens=8, streamer=streamer, tokenizer=reference_tokenizer)
    assert len(capsys.readouterr().out) > len(TEXT)
    found = reference_model.generate(
        **inputs, **way, max_new_tokens=40, stop_strings=["\n"], tokenizer=reference_tokenizer
    )
    assert reference_tokenizer.decode(found[0, inputs.input_ids.shape[1] :]).count("\n") == 1
    out = reference_model.generate(
        **inputs, **way, max_new_tokens=4, return_logprobs=True, return_dict_in_generate=True
    )
    assert out.logprobs.shape == (1, 4)


def test_a_callers_cache_is_filled(tiny, prompt, way):
    cache = DynamicCache(config=tiny.config)
    text = tiny.generate(prompt, **way, max_new_tokens=9, past_key_values=cache)
    assert cache.get_seq_length() == text.shape[1] - 1
    longer = torch.cat([text, prompt], 1)
    found = tiny.generate(longer, **way, max_new_tokens=9, past_key_values=cache)
    assert torch.equal(found, tiny.generate(longer, max_new_tokens=9))


def test_batches(tiny, prompt, way):
    batch = torch.cat([prompt, prompt.flip(1)])
    wanted = tiny.generate(batch, max_new_tokens=20)
    assert torch.equal(tiny.generate(batch, **way, max_new_tokens=20), wanted)
    left = "a batch goes on from a cache that was given"  # the callable is not told whose it is
    assert tiny.speculation.last.reason == (left if way is AS_CALLABLE else "")
    if way is BY_FOLDER:
        samples = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "seed": 7}
        found = tiny.generate(prompt, **way, **samples)
        with retrieve_spec.accelerated(tiny):
            assert torch.equal(tiny.generate(prompt, **samples), found)


def test_a_model_that_is_accelerated(tiny, prompt, way):
    wanted = tiny.generate(prompt, max_new_tokens=12)
    retrieve_spec.accelerate(tiny)
    ours = tiny.generate
    assert torch.equal(tiny.generate(prompt, **way, max_new_tokens=12), wanted)
    assert tiny.generate == ours
    with pytest.raises(ConfigError, match="not accelerated, got one, and datastores"):
        tiny.generate(prompt, **way, max_new_tokens=12, datastores=[])
    retrieve_spec.restore(tiny)
    tiny.generate(prompt, **way, max_new_tokens=2)
    assert retrieve_spec.accelerate(tiny).generate == ours
    assert torch.equal(tiny.generate(prompt, max_new_tokens=12), wanted)


def test_a_models_repository_may_have_it_as_its_generate(tiny, prompt):
    """As `from_pretrained` sets it: with the model bound, whatever else is given by place or by name."""
    wanted = {beams: tiny.generate(prompt, max_new_tokens=12, num_beams=beams) for beams in (1, 2)}
    tiny.generate = functools.partial(tiny.load_custom_generate(recipe.FOLDER, trust_remote_code=True), model=tiny)
    try:
        for beams in (1, 2, 1):
            assert torch.equal(tiny.generate(prompt, max_new_tokens=12, num_beams=beams), wanted[beams])
        retrieve_spec.accelerate(tiny)
        for beams in (1, 2):
            assert torch.equal(tiny.generate(prompt, max_new_tokens=12, num_beams=beams), wanted[beams])
    finally:
        retrieve_spec.restore(tiny)
        vars(tiny).pop("generate", None)
