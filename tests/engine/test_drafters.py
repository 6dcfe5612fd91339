"""The drafters of an accelerated model: what the rows of a batch share, and what a change of stores leaves behind."""

from __future__ import annotations

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.presets import PRESETS
from retrieve_spec.engine.drafters import Drafters


def test_rows_share_what_is_learned_and_kept() -> None:
    drafters = Drafters(SpeculationConfig(session=True), [], None, "model")
    first, second, third = drafters.of_rows(None, 3)
    assert first is drafters.of(None)
    assert len({id(first), id(second), id(third)}) == 3
    assert first.session is second.session is third.session is not None
    assert first.calibration is second.calibration is third.calibration
    assert drafters.of_rows(None, 2) == [first, second], "they are kept"
    assert drafters.of_rows("off", 2) == [None, None]


def test_other_stores_are_drafted_from_in_every_row() -> None:
    """A drafter knows the stores it was made with, so all are made anew; what they learned goes along."""
    drafters = Drafters(SpeculationConfig(session=True), [], None, "model")
    before = drafters.of_rows(None, 3)
    drafters.use([])
    after = drafters.of_rows(None, 3)
    assert not {id(drafter) for drafter in before} & {id(drafter) for drafter in after}
    assert all(drafter.session is before[0].session for drafter in after)
    assert all(drafter.calibration is before[0].calibration for drafter in after)


def test_a_given_drafter_stands_in_for_what_is_configured_alone() -> None:
    given = PRESETS["prompt-lookup"](SpeculationConfig(), (), None, None)
    drafters = Drafters(SpeculationConfig(draft="suffix"), [], given, "model")
    assert drafters.of(None) is drafters.of("suffix") is drafters.of("auto") is given
    assert drafters.of("prompt-lookup") is not given
    assert drafters.of("off") is None
