"""The Hugging Face verifier: hidden states, modes by attention and cache, and the probe's verdicts."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import retrieve_spec as rs
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.probe import probe
from retrieve_spec.verify.verifier import VerifierInputs


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
@pytest.mark.parametrize("layer", ["last", 1])
def test_drafters_that_want_hidden_states_get_those_of_the_last_accepted_token(
    tiny: Any, prompt: torch.Tensor, layer: Any, recorded_pass: str
) -> None:
    """Of one that was drafted, and of the root where all drafts were rejected."""
    answer = tiny.generate(prompt, do_sample=False, max_new_tokens=16)
    with torch.no_grad():
        states = tiny(answer, output_hidden_states=True).hidden_states[-1 if layer == "last" else layer][0]
    drafter = ScriptedDrafter(answer[0])
    drafter.wants_hidden = layer
    rs.accelerate(tiny, drafter=drafter, nodes=16, recorded_pass=recorded_pass)
    for script in ("branchy", "wrong"):
        drafter.turn_to(answer[0], script)
        tiny.generate(prompt, do_sample=False, max_new_tokens=16)
        assert (tiny.speculation.last.pass_kind == "recorded") == (recorded_pass == "always")
        at = prompt.shape[1] - 1
        for verified in drafter.seen:
            at += len(verified.emitted)
            assert verified.hidden is not None and len(verified.hidden) == len(verified.tree) + 1
            np.testing.assert_allclose(verified.last_hidden, states[at - 1].numpy(), atol=1e-4)
        assert tiny.speculation.last.passes == len(drafter.seen)


def test_caches_that_cannot_be_rolled_back_are_plain(tiny: Any, prompt: torch.Tensor) -> None:
    expected = tiny.generate(prompt, do_sample=False, max_new_tokens=10)
    rs.accelerate(tiny, drafter=ScriptedDrafter(expected[0]), nodes=8)
    static = StaticCache(config=tiny.config, max_cache_len=64)
    assert torch.equal(tiny.generate(prompt, past_key_values=static, do_sample=False, max_new_tokens=10), expected)
    assert tiny.speculation.last.mode == "plain"
    assert "StaticCache" in tiny.speculation.last.reason


def test_unknown_attention_is_decoded_in_chains(tiny: Any, prompt: torch.Tensor) -> None:
    """A registered implementation without a mask function gets no masks at all, so nothing but one token is right."""
    AttentionInterface.register("tests_own", sdpa_attention_forward)
    expected = tiny.generate(prompt, do_sample=False, max_new_tokens=10)
    model = copy.deepcopy(tiny)
    model.set_attn_implementation("tests_own")
    interface = read_interface(model)
    assert (interface.mode, interface.mask_form) == ("chain", "none")
    rs.accelerate(model, drafter=ScriptedDrafter(expected[0]), nodes=8)
    assert model.speculation.mode in ("chain", "plain")
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=10), expected)


def test_a_model_that_ignores_masks_is_found_out(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe, not the config, has the last word."""
    forward = tiny.model.forward

    def blind(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(*args, attention_mask=None, **kwargs)

    monkeypatch.setattr(tiny.model, "forward", blind)
    finding = probe(tiny, read_interface(tiny))
    assert finding.mode == "chain" and "other logits" in finding.reason


@pytest.mark.parametrize("training", [False, True])
def test_accelerate_leaves_the_training_flag(tiny: Any, training: bool) -> None:
    model = copy.deepcopy(tiny).train(training)
    assert rs.accelerate(model, draft="off").training is training


def test_states_of_a_layer_that_was_not_recorded_come_from_the_model_itself(tiny: Any, prompt: torch.Tensor) -> None:
    rs.accelerate(tiny, nodes=8, recorded_pass="always")
    verifier = tiny.speculation._make_verifier()
    kwargs = {"past_key_values": DynamicCache(config=tiny.config)}
    verifier.start(VerifierInputs(prompt, kwargs, max_length=64))
    with torch.no_grad():
        rows = verifier.forward(prompt[0].numpy().astype(np.int32), want_hidden=1).hidden
        verifier.commit(np.empty(0, np.int32))
        whole = tiny(prompt, output_hidden_states=True).hidden_states[1][0, -1:]
    torch.testing.assert_close(rows, whole, atol=1e-5, rtol=1e-5)
    assert verifier.pass_reason == "hidden states of layer 1 are not recorded"
