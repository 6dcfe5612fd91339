"""The recorded verifier: same tokens as plain `generate`, cache handed back, refusals with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripted_drafter import SCRIPTS, ScriptedDrafter
from small_decoders import FAMILIES, VOCAB, build, ids
from transformers import DynamicCache

import retrieve_spec as rs
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.recorded.recorded_pass import RecordedPass, RecordingError
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.recorded.verifier_factory import try_recording
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.probe import probe


def made(model: Any, **options: Any) -> Any:
    finding = probe(model, read_interface(model))
    return try_recording(model, finding, SpeculationConfig(**{"recorded_pass": "always", **options}))


WIDTHS = [*((family, 8) for family in FAMILIES), *((family, 16) for family in ("mistral", "gemma2", "gemma3_text"))]
"""Heads of 16 numbers are attended by programs over rows, those of 8 by torch."""


@pytest.mark.parametrize(("model_type", "head_dim"), WIDTHS)
def test_output_and_cache_are_those_of_generate(model_type: str, head_dim: int, shared: Any) -> None:
    model = shared(build, model_type, head_dim=head_dim)
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(ids(30), **options)
    drafter = ScriptedDrafter(plain.sequences[0], vocab=VOCAB)
    rs.accelerate(model, drafter=drafter, nodes=24, recorded_pass="always")
    assert isinstance(model.speculation._make_verifier(), RecordedVerifier)
    for script in SCRIPTS:
        drafter.turn_to(plain.sequences[0], script)
        ours = model.generate(ids(30), **options)
        assert torch.equal(ours.sequences, plain.sequences), script
        assert (model.speculation.last.tokens_per_pass > 3) == (script == "right")
        if script == "right":
            for layer, wanted in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
                torch.testing.assert_close(layer.keys, wanted.keys, atol=2e-5, rtol=2e-5)
                torch.testing.assert_close(layer.values, wanted.values, atol=2e-5, rtol=2e-5)
    rs.restore(model)
    both = torch.cat([ids(30), ids(30).flip(1)])
    wanted = model.generate(both, max_new_tokens=24, do_sample=False)
    rs.accelerate(model, nodes=8, recorded_pass="always")
    assert torch.equal(model.generate(both, max_new_tokens=24, do_sample=False), wanted)
    assert (model.speculation.last.pass_kind, model.speculation.last.rows) == ("recorded", 2)
    rs.restore(model)
    assert model.config._attn_implementation == ("eager" if model_type in ("gemma2", "gpt_oss") else "sdpa")


def test_cache_grows_and_is_continued() -> None:
    """More tokens than one block, and a second turn on the cache of the first."""
    model = build("llama")
    expected = model.generate(ids(20), max_new_tokens=300, do_sample=False)
    rs.accelerate(model, drafter=ScriptedDrafter(expected[0], "branchy", vocab=VOCAB), nodes=24, recorded_pass="always")
    cache = DynamicCache(config=model.config)
    first = model.generate(ids(20), max_new_tokens=100, do_sample=False, past_key_values=cache)
    assert torch.equal(first, expected[:, :120])
    assert cache.get_seq_length() == 119
    assert torch.equal(model.generate(first, max_new_tokens=200, do_sample=False, past_key_values=cache), expected)


@pytest.mark.parametrize(
    ("model_type", "extra", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "cannot be traced"),
        ("gptj", FAMILIES["gpt2"] | {"rotary_dim": 4}, "attention interface"),
    ],
)
def test_what_cannot_be_recorded_says_why(model_type: str, extra: dict[str, Any], reason: str) -> None:
    make, why = made(build(model_type, **extra))
    assert make is None
    assert reason in why


def test_switches() -> None:
    model = build("llama")
    assert made(model, recorded_pass="off") == (None, "recorded_pass is off")
    assert made(model, recorded_pass="auto")[1] == "the model has fewer than 1,000,000 parameters"
    with pytest.raises(RecordingError, match="training"):
        RecordedPass(model.train(), 2)


def test_cudnn_plans_nothing_while_a_model_is_examined() -> None:
    """It plans anew for every length of a text, and a trial reads many."""
    model, allowed = build("llama"), list[bool]()
    model.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    rs.accelerate(model, draft="off")
    model.generate(ids(20), max_new_tokens=2, do_sample=False)
    assert (allowed[0], allowed[-1]) == (False, True)


def test_long_texts_of_longrope_are_those_of_generate() -> None:
    """Their rotary frequencies are others than those of the short texts that a recording is held to."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    plain, model = (build("phi3", rope_parameters=rope, original_max_position_embeddings=32) for _ in range(2))
    rs.accelerate(model, nodes=8, recorded_pass="always")
    options = {"max_new_tokens": 8, "do_sample": False}
    for length in (20, 33, 60):
        assert torch.equal(model.generate(ids(length), **options), plain.generate(ids(length), **options)), length
        can_be_recorded = length == 20 and "traced" not in model.speculation.pass_reason  # older releases branch there
        assert model.speculation.last.pass_kind == ("recorded" if can_be_recorded else "model's own")
    texts = []
    for each in (model, plain):
        cache = DynamicCache(config=model.config)
        each.generate(ids(20), past_key_values=cache, **options)
        texts.append(each.generate(ids(40), past_key_values=cache, **options))
    assert torch.equal(*texts)
    assert "recomputes its cache" in model.speculation.last.reason


class Overflowing(ScriptedDrafter):
    """Drafts an answer, and one token in front of it and behind each of the first tokens of it."""

    def __init__(self, answer: Any, token: int) -> None:
        super().__init__(answer, "right", vocab=VOCAB)
        self._token = token

    def propose(self, budget: Any) -> DraftTree:
        right = super().propose(budget).token_ids.tolist()[:4]
        paths = [[self._token, 9], [*right[:2], self._token], right]
        return DraftTree.from_paths([path[: budget.max_depth] for path in paths])


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_a_draft_that_overflows_changes_no_row_beside_it(model_type: str, recorded_pass: str) -> None:
    """Its values are infinite, and 0 · inf is no number; heads of 8 are attended by torch."""
    model, token = build(model_type, head_dim=8), 5
    attention = model.model.layers[0].self_attn
    embedded = model.get_input_embeddings().weight
    with torch.no_grad():  # the first number of this token alone is not zero
        embedded[:, 0], embedded[token] = 0.0, 0.0
        embedded[token, 0] = 1.0
        attention.v_proj.weight[0], attention.v_proj.weight[0, 0] = 0.0, 1e38
        model.get_output_embeddings().weight[token] = 0.0
    assert model(torch.tensor([[token]])).logits.isnan().all()
    prompt = ids(30)
    prompt[prompt == token] = 6
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(prompt, **options)
    assert token not in plain and not model(plain).logits.isnan().any()
    for answer, is_accepted in (([token] * 80, False), (plain[0], True)):
        drafter = Overflowing(answer, token)
        rs.accelerate(model, drafter=drafter, nodes=12, recorded_pass=recorded_pass)
        assert torch.equal(model.generate(prompt, **options), plain)
        report = model.speculation.last
        assert report.nodes > 0 and (report.passes < 10) == is_accepted
        assert report.pass_kind == ("recorded" if recorded_pass == "always" else "model's own")
