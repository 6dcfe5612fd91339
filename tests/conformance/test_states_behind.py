"""Recurrent states that stay behind their text: rows that were accepted go through the mixers once more, in the pass
that follows, and a cache that is handed back holds the states behind every token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, build
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.server.backend import Backend
from retrieve_spec.server.jobs import DraftHints
from retrieve_spec.server.sampling import Sampling
from retrieve_spec.verify import candidates
from retrieve_spec.verify.denormals import are_flushed, flushed
from retrieve_spec.verify.mixer_site import MixerSite

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


@pytest.fixture
def own_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixers run their own scans, as those of which ours know nothing."""
    monkeypatch.setattr(candidates, "replaceable", lambda _module: {})


@pytest.mark.parametrize("way", ["rows", "scan"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_states_lack_are_carried(name: str, way: str, request: pytest.FixtureRequest) -> None:
    """Drafts that are right in part, with passes without a draft between them; more rows than may be carried."""
    if way == "scan":
        request.getfixturevalue("own_scans")
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


@pytest.mark.usefixtures("own_scans")
@pytest.mark.parametrize("name", NAMES[:2])
def test_mixers_have_hooks_while_drafts_are_verified_and_a_few_passes_longer(name: str) -> None:
    """A text for which nothing is drafted is decoded at the price of plain decoding."""
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family, family.attention[0])
    expected = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)[0]
    drafted = range(len(PROMPT[0]) + 20, len(PROMPT[0]) + 30)
    hooked: list[bool] = []

    class Now(ScriptedDrafter):
        """Drafts in the middle of the text alone."""

        def propose(self, budget: Any) -> DraftTree:
            hooked.append(any(module._forward_pre_hooks for module in model.modules()))
            return super().propose(budget) if len(self.text) in drafted else DraftTree()

    rs.accelerate(model, drafter=Now(expected, "half", vocab=VOCAB), nodes=8, recorded_pass="off")
    hooked.clear()
    assert torch.equal(model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)[0], expected)
    first, last = hooked.index(True), len(hooked) - hooked[::-1].index(True)
    assert first >= 15 and all(hooked[first:last]) and last < len(hooked) - 10
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.usefixtures("own_scans")
@pytest.mark.parametrize("name", NAMES[:3])
def test_every_pass_calls_a_mixer_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a draft was right in part, and behind such a one."""
    replayed: list[int] = []
    replay = MixerSite.replayed

    def noted(self: MixerSite, base: Any, rows: Any) -> Any:
        replayed.append(rows.hidden.shape[1])
        return replay(self, base, rows)

    family = next(family for family in FAMILIES if family.name == name)
    model = build(family, family.attention[0])
    expected = model.generate(PROMPT, max_new_tokens=24, do_sample=False)
    rs.accelerate(model, drafter=ScriptedDrafter(expected[0], "half", vocab=VOCAB), nodes=16, recorded_pass="off")
    monkeypatch.setattr(MixerSite, "replayed", noted)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=24, do_sample=False), expected)
    assert model.speculation.last.passes < 24
    assert not replayed


@pytest.mark.usefixtures("own_scans")
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_multiplied_as_a_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those behind rows that are carried: torch multiplies what was cut out of a longer batch far slower."""
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family, family.attention[0])
    expected = model.generate(PROMPT, max_new_tokens=24, do_sample=False)
    rs.accelerate(model, drafter=ScriptedDrafter(expected[0], "half", vocab=VOCAB), nodes=16, recorded_pass="off")
    linear, strides = torch.nn.functional.linear, []

    def noted(rows: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        if rows.ndim == 3 and 1 < rows.shape[1] < PROMPT.shape[1]:
            strides.append(rows.stride(0) == rows.stride(1) * rows.shape[1])
        return linear(rows, *others, **more)

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=24, do_sample=False), expected)
    assert strides
    assert all(strides)


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
