"""Recurrent states under drafts: a cache that is handed back holds the states behind every token."""

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, build
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.server.backend import Backend, DraftHints
from retrieve_spec.server.sampling import Sampling
from retrieve_spec.verify.mixers import are_flushed, flushed

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("mamba2", "falcon_h1", "qwen3_next", "lfm2")
"""Chunks by an attribute and by an argument, mixers beside attention, short convolutions."""
PROMPT = torch.tensor([[3 + (i * 37 + 11) % (VOCAB - 3) for i in range(12)]])
NEW = 60


class Resting(ScriptedDrafter):
    """Drafts nothing in some passes."""

    rests = False

    def propose(self, budget: Any) -> DraftTree:
        return DraftTree() if self.rests and len(self.seen) % 2 else super().propose(budget)


@pytest.mark.parametrize(("name", "way"), [*((name, "rows") for name in NAMES), ("mamba", "steps"), ("jamba", "steps")])
def test_states_are_those_of_the_accepted_rows(name: str, way: str) -> None:
    """Drafts that are right in part, with passes without a draft between them."""
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family, family.attention[0])
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(PROMPT, max_new_tokens=NEW, **options)
    drafter = Resting(expected.sequences[0], "half", vocab=VOCAB)
    rs.accelerate(model, drafter=drafter, nodes=16, recorded_pass="off")
    assert model.speculation.interface.recurrence.way == way
    for script, rests in (("half", False), ("half", True), ("branchy", False), ("branchy", True), ("wrong", True)):
        drafter.turn_to(expected.sequences[0], script)
        drafter.rests = rests
        got = model.generate(PROMPT, max_new_tokens=NEW, **options)
        assert torch.equal(got.sequences, expected.sequences), (script, rests)
        for layer, wanted in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
            for states in ("conv_states", "recurrent_states"):
                for i, state in getattr(wanted, states, {}).items():
                    if state is not None:
                        torch.testing.assert_close(getattr(layer, states)[i], state, atol=1e-4, rtol=1e-3)


def test_streams_and_the_server_hand_over_a_cache_by_the_name_that_the_model_has_for_it() -> None:
    """Mamba calls it `cache_params`; transformers 5.24 calls that of many others `cache`."""
    family = next(family for family in FAMILIES if family.name == "mamba2")
    model = build(family, family.attention[0])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    first = model.generate(PROMPT, return_dict_in_generate=True, **options)
    more = torch.cat([first.sequences, PROMPT[:, :5]], dim=1)
    wanted = model.generate(more, cache_params=copy.deepcopy(first.past_key_values), **options)
    rs.accelerate(model, drafter=ScriptedDrafter(wanted[0], "half", vocab=VOCAB), nodes=16)
    stream = rs.generate_stream(model, more, past_key_values=first.past_key_values, **options)
    assert [token for piece in stream for token in piece.token_ids.tolist()] == wanted[0, more.shape[1] :].tolist()
    backend = Backend(model, range(VOCAB))
    cache, ids = backend.new_cache(), more[0].tolist()
    with torch.no_grad():
        model(input_ids=more[:, :20], cache_params=cache, use_cache=True)
    text = backend.decode(
        cache, ids, max_tokens=12, end_ids=frozenset(), sampling=Sampling(temperature=0.0), hints=DraftHints()
    )
    said = []
    while not text.over:
        backend.step([text])
        said += text.take()
    text.close()
    assert said == wanted[0, more.shape[1] :].tolist()


@pytest.mark.parametrize("before", [False, True])
def test_denormal_numbers_are_zero_while_drafts_are_verified(before: bool) -> None:
    """In passes over drafts, whatever ends them; behind them they are what they were for the caller."""
    if not torch.set_flush_denormal(before):
        pytest.skip("this processor cannot take them for zero")
    family = next(family for family in FAMILIES if family.name == "qwen3_next")
    model = build(family, family.attention[0])
    expected = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    rs.accelerate(model, drafter=ScriptedDrafter(expected[0], "half", vocab=VOCAB), nodes=16, recorded_pass="off")
    seen: list[bool] = []
    model.model.norm.register_forward_hook(lambda *_args: seen.append(are_flushed()))
    try:
        assert torch.equal(model.generate(PROMPT, max_new_tokens=12, do_sample=False), expected)
        assert True in seen
        assert are_flushed() == before
        with pytest.raises(KeyError), flushed():
            raise KeyError
        assert are_flushed() == before
    finally:
        torch.set_flush_denormal(False)
