"""Every family that trees are verified for says the same through the recorded pass and the preallocated cache."""

import copy
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, Family
from packaging.version import Version
from scripted_drafter import ScriptedDrafter
from test_families import NEW, assert_same_cache, greedy, ids, model_of

import retrieve_spec as rs
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier

INTERFACE = "its layers do not use transformers' attention interface"
NOT_RECORDED = {
    "llama-dynamic-ntk": "it cannot be traced",  # frequencies depend on the positions
    "gptj": INTERFACE,
    "falcon": INTERFACE,
    "codegen": INTERFACE,
    "stablelm": INTERFACE,
    "deepseek_v2": "its attention reads other keys than it caches",
    "deepseek_v3": "its attention reads other keys than it caches",
    "llama4_text": "its attention is cut into chunks",
    "biogpt": INTERFACE,
    "xglm": INTERFACE,
    "dbrx": "it cannot be traced",  # experts are looped over
    "lfm2": "layers of type LinearAttentionLayer",
    **dict.fromkeys(["falcon-alibi", "bloom", "mpt"], "the model derives positions itself"),
    **dict.fromkeys(["mamba", "mamba2", "falcon_h1", "jamba", "qwen3_next"], INTERFACE),  # recurrent state
}
if Version(transformers.__version__) < Version("5.23"):
    NOT_RECORDED["phi3-longrope"] = "it cannot be traced"  # its frequencies depended on the positions, too
"""Families whose forward cannot be recorded, and what the reason mentions."""
CASES = [pytest.param(family, id=family.name) for family in FAMILIES if family.mode == "tree"]

pytestmark = pytest.mark.filterwarnings("ignore")


def accelerate(family: Family, model: Any, said: Any) -> bool:
    """Accelerate with the recorded pass; whether it is used is as listed, and a refusal is logged."""
    rs.accelerate(model, drafter=ScriptedDrafter([], "branchy"), nodes=24, recorded_pass="always")
    verifier = model.speculation._make_verifier()
    static = isinstance(verifier, RecordedVerifier)
    assert static != (family.name in NOT_RECORDED), said.text
    if not static:
        assert NOT_RECORDED[family.name] in said.text
    return static


@pytest.mark.parametrize("family", CASES)
def test_the_recorded_pass_says_what_generate_says(family: Family, caplog: pytest.LogCaptureFixture) -> None:
    """Greedy, crossing every window; sampled; the cache handed back and continued."""
    caplog.set_level("INFO", logger="retrieve_spec")
    model = model_of(family, family.attention[0])
    texts = []
    cases = () if family.name in NOT_RECORDED else ((40, "branchy"), (5, "half"))
    for length, script in cases:  # what the model says before it is accelerated, which takes longest, once
        inputs = {"input_ids": ids(length)}
        plain = greedy(model, inputs, return_dict_in_generate=True)
        more = {"input_ids": torch.cat([plain.sequences, ids(6, step=53)], dim=1)}
        further = greedy(model, more, past_key_values=copy.deepcopy(plain.past_key_values))
        texts.append((script, inputs, plain, more, further))
    try:
        if not accelerate(family, model, caplog):
            return
        drafter = model.speculation.drafter()
        for script, inputs, plain, more, further in texts:
            drafter.turn_to(plain.sequences[0], script)
            ours = greedy(model, inputs, return_dict_in_generate=True)
            assert torch.equal(ours.sequences, plain.sequences)
            if model.speculation.last.mode == "tree":
                assert model.speculation.last.tokens_per_pass > 1
                assert_same_cache(ours.past_key_values, plain.past_key_values)
            options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}
            drafted = model.generate(**inputs, **options)
            assert torch.equal(model.generate(**inputs, **options, draft="off"), drafted)
            drafter.turn_to(further[0], "branchy")
            assert torch.equal(greedy(model, more, past_key_values=ours.past_key_values), further)
    finally:
        rs.restore(model)
