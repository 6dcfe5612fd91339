"""The drafters of an accelerated model: what its sequences share, and what a change of stores leaves behind."""

from __future__ import annotations

from typing import Any

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.presets import PRESETS
from retrieve_spec.engine.drafters import Drafters


def lent(drafters: Drafters, count: int) -> list[Any]:
    """So many drafters at once, given back."""
    made = [drafters.lend() for _ in range(count)]
    for drafter in made:
        drafters.give_back(drafter)
    return made


def test_sequences_share_what_is_learned_and_kept() -> None:
    drafters = Drafters(SpeculationConfig(session=True), [], None, "model")
    first, second, third = lent(drafters, 3)
    assert first is drafters.of(None)
    assert len({id(first), id(second), id(third)}) == 3
    assert first.session is second.session is third.session is not None
    assert first.calibration is second.calibration is third.calibration
    assert lent(drafters, 2) == [first, second], "they are kept"
    assert drafters.lend("off") == "drafting is off"


def test_one_that_was_interrupted_amid_its_work_is_not_lent_again() -> None:
    drafters = Drafters(SpeculationConfig(), [], None, "model")
    spoiled = drafters.lend()
    drafters.give_back(spoiled, spoiled=True)
    assert drafters.lend() is not spoiled


def test_other_stores_are_drafted_from_in_every_sequence() -> None:
    """A drafter knows the stores it was made with, so all are made anew; what they learned goes along."""
    drafters = Drafters(SpeculationConfig(session=True), [], None, "model")
    before = lent(drafters, 3)
    at_work = drafters.lend()
    drafters.use([])
    after = lent(drafters, 3)
    assert not {id(drafter) for drafter in before} & {id(drafter) for drafter in after}
    drafters.give_back(at_work)
    assert drafters.lend() is after[0]
    assert all(drafter.session is before[0].session for drafter in after)
    assert all(drafter.calibration is before[0].calibration for drafter in after)


def test_whoever_asked_last_does_not_ask_for_the_next() -> None:
    """A sequence that ends before it begins leaves its drafter as it was lent."""
    drafters = Drafters(SpeculationConfig(session=True), [], None, "model")
    drafter = drafters.lend(scope="alice")
    assert isinstance(drafter, MixtureDrafter)
    assert drafter.requester_id == "alice" and drafter.session is drafters.sessions.of("alice")
    drafters.give_back(drafter)
    assert drafters.lend(call="call") is drafter
    assert drafter.requester_id == "call" and drafter.session is drafters.sessions.of("")
    drafters.give_back(drafter)
    assert drafters.lend() is drafter and drafter.requester_id is None


def test_a_given_drafter_stands_in_for_what_is_configured_alone() -> None:
    given = PRESETS["prompt-lookup"]()
    drafters = Drafters(SpeculationConfig(draft="suffix"), [], given, "model")
    assert drafters.of(None) is drafters.of("suffix") is drafters.of("auto") is given
    assert drafters.of("prompt-lookup") is not given
    assert drafters.of("off") is None
    assert drafters.lend() is given
    assert drafters.lend() == "the given drafter is at work for another sequence"
