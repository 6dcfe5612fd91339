"""Calls that are made from an earlier one are what `generate` would have prepared."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.logits_process import LogitsProcessor

import retrieve_spec as rs
from retrieve_spec.engine.joining import CallOptions
from retrieve_spec.errors import UnknownTokenError
from retrieve_spec.generation import request
from retrieve_spec.generation.request import prepare_call
from retrieve_spec.generation.templates import Templates

OPTIONS = [
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.3, "eos_token_id": [1, 5]},
    {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": None, "eos_token_id": [1]},
    {"do_sample": True, "temperature": 1.0, "top_k": 5, "top_p": 1.0, "min_p": 0.1},
    {"do_sample": False, "sequence_bias": [[[3], 2.0], [[4], -1.0]]},
]
OF_ONE_TEXT = [
    {"do_sample": False, "eos_token_id": [1], **one}
    for one in ({"min_new_tokens": 3}, {"forced_eos_token_id": 2}, {"no_repeat_ngram_size": 2}, {"max_time": 60.0})
]


class Guide(LogitsProcessor):
    """A processor of one call: no token below 10."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, :10] = -torch.inf
        return scores


def calls(model, options):
    """Arguments of calls with other texts, caches, lengths and processors."""
    for length, past, most, guides in [
        (7, 0, 4, []),
        (12, 5, 9, [Guide()]),
        (3, 2, 1, [Guide(), Guide()]),
        (20, 0, 6, []),
    ]:
        ids = torch.arange(length)[None] % 50 + 3
        cache = DynamicCache(config=model.config)
        if past:
            model(ids[:, :past], past_key_values=cache, use_cache=True)
        yield {
            "input_ids": ids,
            "past_key_values": cache,
            "max_new_tokens": most,
            **options,
            **({"logits_processor": guides} if guides else {}),
        }


def described(prepared):
    """What a call begins with, in a form that can be compared."""
    inputs, config = prepared.inputs, prepared.config.to_dict()
    return {
        "ids": inputs.input_ids.tolist(),
        "cache": id(inputs.model_kwargs["past_key_values"]),
        "kwargs": {k: v.tolist() if torch.is_tensor(v) else v for k, v in inputs.model_kwargs.items()},
        "lengths": (inputs.past_length, inputs.holds_past, inputs.max_length, inputs.returns_cache),
        "is_callers": prepared.callers_cache,
        "processors": [
            id(one) if isinstance(one, Guide) else (type(one), repr(sorted(vars(one).items())))
            for one in prepared.processors
        ],
        "criteria": [
            (type(one), {name: repr(value) for name, value in vars(one).items() if name != "initial_timestamp"})
            for one in prepared.criteria
        ],
        "config": {name: repr(value) for name, value in config.items()},
    }


@pytest.mark.parametrize("options", [*OPTIONS, *OF_ONE_TEXT], ids=repr)
@torch.no_grad()
def test_a_call_from_a_template_is_what_generate_prepares(tiny, options):
    templates = Templates(rs.accelerate(tiny))
    for arguments in calls(tiny, options):
        assert described(templates.prepare(copy.copy(arguments))) == described(prepare_call(tiny, arguments))


@torch.no_grad()
def test_generate_prepares_each_kind_of_call_once(tiny, monkeypatch):
    templates, prepared, original = Templates(rs.accelerate(tiny)), [], request.original

    def generate(**arguments):
        prepared.append(arguments)
        return original(tiny)(**arguments)

    monkeypatch.setattr(request, "original", lambda model: generate)
    for _ in range(3):
        for options in OPTIONS:
            for arguments in calls(tiny, options):
                templates.prepare(arguments)
    assert len(prepared) == len(OPTIONS)
    for arguments in calls(tiny, OF_ONE_TEXT[0]):  # prepared each time, and once more for the template
        templates.prepare(arguments)
    assert len(prepared) == len(OPTIONS) + 5


@torch.no_grad()
def test_a_token_that_the_model_does_not_embed_is_refused_in_later_calls_too(tiny):
    templates = Templates(rs.accelerate(tiny))
    for arguments in calls(tiny, OPTIONS[0]):
        templates.prepare(arguments)
    arguments["input_ids"] = torch.full((1, 20), 10**6)
    with pytest.raises(UnknownTokenError):
        templates.prepare(arguments)


@torch.no_grad()
def test_nothing_of_a_text_is_kept(tiny):
    templates, (arguments, *_) = Templates(rs.accelerate(tiny)), calls(tiny, OPTIONS[0])
    templates.prepare(arguments)
    ids, cache = (weakref.ref(arguments.pop(name)) for name in ("input_ids", "past_key_values"))
    gc.collect()
    assert ids() is None and cache() is None


@torch.no_grad()
def test_texts_of_templates_are_those_of_generate(tiny):
    plain = copy.deepcopy(tiny)
    model = rs.accelerate(tiny)
    templates = Templates(model)
    for options in OPTIONS[:2]:
        for arguments in calls(plain, options):
            expected = plain.generate(**copy.deepcopy(arguments))[0].tolist()
            sequence = templates.open(arguments.pop("input_ids"), CallOptions(), **arguments)
            for _ in model.speculation.engine.run([sequence]):
                pass
            assert sequence.text.ids.tolist() == expected
