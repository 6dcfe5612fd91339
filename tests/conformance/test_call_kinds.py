"""The first call of each kind, pictures and all, is held to single steps on its own prompt."""

import inspect
from typing import Any

import pytest
import torch
from batch_rows import small_model
from census import Planted, build, prompt
from census_models import picture_prompt
from transformers import LlamaForCausalLM

import retrieve_spec as rs
from retrieve_spec.verify.steps import keeping_texts

pytestmark = pytest.mark.filterwarnings("ignore")
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def wrong_behind_pictures(name: str, when: str) -> Any:
    """A model whose passes over drafts are wrong once it has seen a picture: with siblings, or whenever it drafts."""
    model = build(name, "image")

    class Wrong(type(model)):  # type: ignore[misc]
        saw = False

        def forward(self, **kwargs: Any) -> Any:
            ids, cache, mask = (kwargs.get(name) for name in ("input_ids", "past_key_values", "attention_mask"))
            if not cache.get_seq_length():
                self.saw = bool(kwargs.get("mm_encoder_outputs") or kwargs.get("pixel_values") is not None)
            drafted = ids.shape[1] > 1 and cache.get_seq_length() > 0
            out = super().forward(**kwargs)
            masked = isinstance(mask, dict) or getattr(mask, "ndim", 2) == 4
            if self.saw and drafted and (when == "drafts" or masked):
                out.logits[:, 1:, 5] += 100.0
            return out

    Wrong.forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    model.__class__ = Wrong
    return model


def decoded(model: Any, inputs: dict[str, Any], planted: Planted, wanted: torch.Tensor) -> tuple[bool, Any]:
    planted.plant(wanted[0], inputs["input_ids"].shape[1], "branchy")
    return torch.equal(model.generate(**inputs, **GREEDY), wanted), model.speculation.last


@pytest.mark.parametrize(("when", "mode"), [("siblings", "chain"), ("drafts", "plain")])
def test_a_model_that_is_wrong_behind_pictures_alone(when: str, mode: str) -> None:
    model = wrong_behind_pictures("got_ocr2", when)
    inputs = picture_prompt(model)
    text = {"input_ids": prompt(model, 20)}
    wanted, wanted_text = (type(model).generate(model, **given, **GREEDY) for given in (inputs, text))
    planted = Planted()
    rs.accelerate(model, drafter=planted, nodes=12, recorded_pass="off")
    assert model.speculation.mode == "tree"
    for given, answer, expected in (
        (inputs, wanted, mode), (text, wanted_text, "tree"), (inputs, wanted, mode),
    ):  # fmt: skip
        same, last = decoded(model, given, planted, answer)
        assert same
        assert last.mode == expected
        assert ("after " in last.reason) == (expected != "tree")
    drawn = [model.generate(**inputs, max_new_tokens=12, do_sample=True, seed=2, draft=d) for d in ("off", None)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("name", "mapping"),
    [("recurrent_gemma", "causal"), ("mamba", "causal"), ("mamba2", "causal"), ("qwen2_vl", "image")],
)
def test_streams_read_in_turn_keep_what_is_of_their_texts(name: str, mapping: str) -> None:
    """States in modules, what stands in for mixers while a pass runs, how far positions are behind slots."""
    model = build(name, mapping)
    first = {"input_ids": prompt(model, 9)} if mapping == "causal" else picture_prompt(model)
    calls = [first, {"input_ids": prompt(model, 25)}, first]
    wanted = [model.generate(**given, **GREEDY)[0, given["input_ids"].shape[1] :].tolist() for given in calls]
    rs.accelerate(model, nodes=8, recorded_pass="off")
    found = model.speculation.interface
    streams = [rs.generate_stream(model, given, **GREEDY) for given in calls]
    shown: list[list[int]] = [[], [], []]
    for _ in range(GREEDY["max_new_tokens"]):
        for tokens, stream in zip(shown, streams, strict=True):
            piece = next(stream, None)
            tokens += piece.token_ids.tolist() if piece else []
    assert shown == wanted
    assert model.speculation.interface is found, "what a stream puts on the model is no change of it"


def test_a_recording_that_is_tried_leaves_every_part_its_attention() -> None:
    model = build("got_ocr2", "image")
    configs = model.config, model.config.text_config, model.config.vision_config
    before = [config._attn_implementation for config in configs]
    assert len(set(before)) > 1
    inputs = picture_prompt(model)
    wanted = model.generate(**inputs, **GREEDY)
    planted = Planted()
    rs.accelerate(model, drafter=planted, nodes=12, recorded_pass="always")
    assert [config._attn_implementation for config in configs] == before
    same, last = decoded(model, inputs, planted, wanted)
    assert same
    assert (last.mode, last.tokens_per_pass > 1.5) == ("tree", True)


class MixesRows(LlamaForCausalLM):  # type: ignore[misc]
    """With a bonus, what it says of a token depends on the others of the same pass."""

    def forward(  # type: ignore[no-untyped-def]
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, bonus=None,
        logits_to_keep=0, **kwargs,
    ):  # fmt: skip
        text = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if bonus is None:
            kwargs["logits_to_keep"] = logits_to_keep
        out = super().forward(**text, past_key_values=past_key_values, **kwargs)
        if bonus is not None:
            out.logits = (out.logits + bonus * out.logits.cumsum(1).roll(3, -1))[:, -logits_to_keep:]
        return out


def test_requests_of_many_are_looked_at_like_any_call() -> None:
    """Also where the model is recorded, and such a request is left to the model's own forward."""
    model = small_model(MixesRows, vocab_size=64, num_hidden_layers=1)
    ids = torch.randint(3, 9, (1, 60), generator=torch.Generator().manual_seed(3))
    bonus = torch.tensor([[[0.3]]])
    wanted = LlamaForCausalLM.generate(model, ids, bonus=bonus, max_new_tokens=60, do_sample=False)[0, 60:]
    rs.accelerate(model, nodes=16, recorded_pass="always")
    assert model.speculation.pass_kind == "recorded"
    (answer,) = rs.generate_many(model, [{"inputs": ids, "bonus": bonus}], max_new_tokens=60, do_sample=False)
    assert answer.token_ids.tolist() == wanted.tolist()
    assert "after bonus" in model.speculation.last.reason


@pytest.mark.parametrize("recorded", ["off", "always"])
def test_texts_beside_pictures_keep_the_fastest_pass_and_share_it(recorded: str) -> None:
    """What the model keeps of a picture's prompt is not read by passes that are given positions."""
    model = build("qwen2_vl", "image")
    picture, rows = picture_prompt(model), prompt(model, 60).reshape(3, 20)
    mask = (torch.arange(20) >= torch.tensor([[0], [7], [3]])).long()
    calls = [picture, {"input_ids": rows[:1]}, {"input_ids": rows}, {"input_ids": rows * mask, "attention_mask": mask}]
    wanted = [type(model).generate(model, **given, **GREEDY) for given in calls]
    rs.accelerate(model, nodes=8, recorded_pass=recorded)
    kind = "recorded" if recorded == "always" else "model's own"
    for _ in range(2):
        for given, answer in zip(calls, wanted, strict=True):
            assert torch.equal(model.generate(**given, **GREEDY), answer)
            last = model.speculation.last
            assert (last.mode, last.rows) == ("tree", len(given["input_ids"]))
            assert last.pass_kind == ("model's own" if given is picture else kind)


class ReadsWhatItKeeps(LlamaForCausalLM):  # type: ignore[misc]
    """What it says turns on how long the prompt was that it read last."""

    kept: Any

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> Any:
        if is_first_iteration:
            self.kept = torch.tensor(float(input_ids.shape[1]))
        return super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if self.reads and self.kept is not None:
            out.logits = out.logits + self.kept * torch.arange(64) * self.reads
        return out


@pytest.mark.parametrize("reads", [0.0, 0.5])
def test_models_that_read_what_they_keep_of_texts_are_not_recorded(reads: float) -> None:
    ReadsWhatItKeeps.forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)  # type: ignore[attr-defined]
    model = small_model(ReadsWhatItKeeps, vocab_size=64, num_hidden_layers=1)
    model.kept, model.reads = None, reads
    texts = [torch.arange(3, 3 + length)[None] for length in (8, 20, 8)]
    wanted = [LlamaForCausalLM.generate(model, ids, **GREEDY) for ids in texts]
    rs.accelerate(model, nodes=4, recorded_pass="always")
    for ids, answer in zip(texts, wanted, strict=True):
        assert torch.equal(model.generate(ids, **GREEDY), answer)
    assert (model.speculation.last.pass_kind == "recorded") == (not reads), model.speculation.last.pass_reason


def test_looking_at_a_kind_of_call_leaves_what_the_model_keeps() -> None:
    """Also where it kept nothing before, or had no such attribute."""
    model = torch.nn.Linear(1, 1)
    model.nothing, model.something = None, (tensor := torch.zeros(2))
    with keeping_texts(model):
        model.nothing, model.something, model.new = torch.ones(1), None, torch.ones(1)
    assert (model.nothing, model.something is tensor, hasattr(model, "new")) == (None, True, False)
