"""Known calls are what the original `generate` prepares, whatever is asked for and whatever changes in between."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from batch_rows import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxTimeCriteria,
    StoppingCriteria,
    TemperatureLogitsWarper,
)

import retrieve_spec as rs
from retrieve_spec.engine.known_calls import KnownCalls
from retrieve_spec.verify.steps import Captured, capture

PAD = 5


class Nothing(LogitsProcessor):
    """A processor of the caller's own."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class Never(StoppingCriteria):
    """A criterion of the caller's own."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.fixture(scope="module")
def model() -> Any:
    made = small_model("llama")
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = PAD, 2
    return made


def original(model: Any) -> Any:
    return types.MethodType(GenerationMixin.generate, model)


def counted(model: Any, asked: list[int]) -> Any:
    """The original `generate`, which notes that it was asked."""

    class Counting:
        __func__ = staticmethod(GenerationMixin.generate)

        def __call__(self, **arguments: Any) -> Any:
            asked.append(1)
            return GenerationMixin.generate(model, **arguments)

    return Counting()


def said(captured: Captured) -> Any:
    """All that was prepared, in a form that compares."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return "tensor", value.dtype, str(value.device), value.tolist()
        if isinstance(value, DynamicCache):
            return "cache", [type(layer).__name__ for layer in value.layers], value.get_seq_length()
        if isinstance(value, (list, tuple)):
            return type(value).__name__, [plain(each) for each in value]
        if isinstance(value, dict):
            return [(name, plain(each)) for name, each in value.items()]
        if type(value).__module__.startswith("transformers"):
            return type(value).__name__, plain({**vars(value), "initial_timestamp": None})  # when it was prepared
        return value

    lists = [plain(list(each)) for each in (captured.logits_processor, captured.stopping_criteria)]
    kinds = [type(each).__name__ for each in (captured.logits_processor, captured.stopping_criteria)]
    return captured.input_ids, kinds, lists, plain(vars(captured.generation_config)), plain(captured.model_kwargs)


def check(known: KnownCalls, model: Any, asked: list[int], arguments: dict[str, Any]) -> None:
    """A known call is what `generate` prepares, the caller's own objects the same ones, or fails as it does."""
    wanted: Any
    try:
        wanted = said(original(model)(**arguments, custom_generate=capture))
    except Exception as error:
        wanted = type(error), str(error)
    try:
        got: Any = said(known.captured(model, counted(model, asked), dict(arguments)))
    except Exception as error:
        got = type(error), str(error)
    assert got[0] is wanted[0] or wanted[0] is not arguments["input_ids"]
    assert got[1:] == wanted[1:]


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.5, 1.0, 1]),
        "top_k": st.sampled_from([0, 3, 50]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "min_p": st.sampled_from([None, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "no_repeat_ngram_size": st.sampled_from([0, 3]),
        "min_new_tokens": st.sampled_from([None, 2]),
        "eos_token_id": st.sampled_from([7, [7, 9], [PAD, 9], None]),
        "pad_token_id": st.sampled_from([PAD, 6]),
        "suppress_tokens": st.sampled_from([None, [4]]),
        "begin_suppress_tokens": st.sampled_from([None, [4]]),
        "forced_eos_token_id": st.sampled_from([None, 9]),
        "bad_words_ids": st.just([[4, 3]]),
        "max_time": st.just(5.0),
        "use_cache": st.just(True),
        "num_return_sequences": st.sampled_from([1, 2]),
        "output_scores": st.booleans(),
        "return_dict_in_generate": st.booleans(),
        "max_length": st.sampled_from([None, 30]),
        "renormalize_logits": st.booleans(),
    },
)
ITEM = st.sampled_from([Nothing, Never, TemperatureLogitsWarper, MaxTimeCriteria])


def brought(kinds: list[type]) -> dict[str, Any]:
    """Processors and criteria of the caller's own."""
    made = [kind(0.5) if kind in (TemperatureLogitsWarper, MaxTimeCriteria) else kind() for kind in kinds]
    processors = [each for each in made if isinstance(each, LogitsProcessor)]
    criteria = [each for each in made if isinstance(each, StoppingCriteria)]
    return {"logits_processor": processors, "stopping_criteria": criteria} if made else {}


@given(
    SETTINGS,
    st.lists(ITEM, max_size=3),
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 9), st.sampled_from(["ids", "mask", "holes"]), st.integers(0, 3)),
        min_size=3, max_size=7,
    ),
    st.booleans(),
    st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=150)
def test_they_are_what_generate_prepares(
    model: Any,
    options: dict[str, Any],
    kinds: list[type],
    calls: list[tuple[int, int, str, int]],
    cached: bool,
    pads: int,
) -> None:
    """Random settings; prompts of random lengths, with padding tokens in them, masks, caches and own processors."""
    known, asked = KnownCalls(), list[int]()
    for number, (length, most, shape, at) in enumerate(calls):
        ids = torch.arange(10, 10 + length)[None]
        if number < pads:
            ids[0, at % length] = PAD
        arguments: dict[str, Any] = {"input_ids": ids, "max_new_tokens": most, **options, **brought(kinds)}
        if shape != "ids":
            arguments["attention_mask"] = torch.ones_like(ids)
        if shape == "holes":
            arguments["attention_mask"][0, 0] = 0
        if cached:
            arguments["past_key_values"] = DynamicCache(config=model.config)
        check(known, model, asked, arguments)


def test_generate_is_asked_until_two_lengths_agree(model: Any) -> None:
    known, asked = KnownCalls(), list[int]()
    for length in (4, 4, 4, 7, 7, 4, 9, 1):
        check(known, model, asked, {"input_ids": torch.arange(10, 10 + length)[None], "max_new_tokens": length})
    assert len(asked) == 4
    for number in range(4):
        check(known, model, asked, {"input_ids": torch.full((1, 3 + number), 10), "max_new_tokens": 5, "top_k": number})
    assert len(asked) == 8  # other settings are other kinds


def test_what_has_changed_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's settings, a config that comes along, methods of the class and of transformers."""
    known, asked = KnownCalls(), list[int]()
    own, given_config = model.generation_config, GenerationConfig(top_k=3, do_sample=True)

    def again(**more: Any) -> int:
        asked.clear()
        for length in (3, 5, 6, 8):
            check(known, model, asked, {"input_ids": torch.arange(10, 10 + length)[None], "max_new_tokens": 4, **more})
        return len(asked)

    assert again() == 2
    assert again() == 0
    monkeypatch.setattr(own, "repetition_penalty", 1.5)
    assert again() == 2
    monkeypatch.setattr(own, "eos_token_id", [2, 3])
    assert again() == 2
    own.eos_token_id.append(4)
    assert again() == 2
    monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=9, pad_token_id=9))
    assert again() == 2
    assert again(generation_config=given_config) == 2
    given_config.top_k = 4
    assert again(generation_config=given_config) == 2
    assert again(generation_config=given_config) == 0
    monkeypatch.setattr(model.config, "max_position_embeddings", 77)
    assert again(generation_config=given_config) == 2
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, **kwargs: forward(input_ids, **kwargs), raising=False)
    assert again() == 4  # takes no mask, so it cannot be told that none is left out
    monkeypatch.undo()
    assert again() > 0
    prepare = GenerationMixin._get_logits_processor
    monkeypatch.setattr(GenerationMixin, "_get_logits_processor", lambda self, **kwargs: prepare(self, **kwargs))
    assert again() == 2
    monkeypatch.setattr(type(model), "_prepare_special_tokens", GenerationMixin._prepare_special_tokens, raising=False)
    assert again() == 0
    special = GenerationMixin._prepare_special_tokens
    monkeypatch.setattr(type(model), "_prepare_special_tokens", lambda self, *a, **k: special(self, *a, **k))
    assert again() == 4  # a class that prepares in its own manner is always asked


def test_a_generate_of_somebody_else_is_always_asked(model: Any) -> None:
    known, seen = KnownCalls(), list[int]()

    def wrapper(**arguments: Any) -> Any:
        seen.append(arguments["input_ids"].shape[1])
        return GenerationMixin.generate(model, **arguments)

    for length in (3, 4, 5, 6):
        known.captured(model, wrapper, {"input_ids": torch.arange(length)[None] + 10, "max_new_tokens": 4})
    assert seen == [3, 4, 5, 6]


def test_kinds_are_bounded_and_keep_nothing_of_a_call(model: Any) -> None:
    """No prompt, cache or processor of a caller stays behind."""
    import gc
    import weakref

    known, asked, refs = KnownCalls(), list[int](), list[Any]()
    for number in range(200):
        ids, cache, own = torch.full((1, 3 + number % 5), 10), DynamicCache(config=model.config), Nothing()
        refs += [weakref.ref(ids), weakref.ref(cache), weakref.ref(own)]
        arguments = {"input_ids": ids, "past_key_values": cache, "logits_processor": [own], "top_k": number // 3}
        check(known, model, asked, {**arguments, "max_new_tokens": 4})
    del ids, cache, own, arguments
    gc.collect()
    assert len(known._known) <= 64
    assert not [ref for ref in refs if ref() is not None]


def test_texts_are_those_of_plain_generate() -> None:
    """Calls of `generate` of one kind, with processors and pads, after the first ones are known."""
    model = small_model("llama")
    model.generation_config.pad_token_id = PAD
    prompts = [torch.randint(10, 90, (1, length)) for length in (9, 30, 17, 64, 5, 33)]
    prompts[4][0, 2] = PAD
    wanted = [model.generate(ids, max_new_tokens=12, do_sample=False, repetition_penalty=1.2) for ids in prompts]
    rs.accelerate(model)
    try:
        for _ in range(2):
            for ids, plain in zip(prompts, wanted, strict=True):
                assert torch.equal(
                    model.generate(ids, max_new_tokens=12, do_sample=False, repetition_penalty=1.2), plain
                )
    finally:
        rs.restore(model)
