"""The drafters of an accelerated model: what sequences share, what a change of stores leaves, who comes late."""

from typing import Any

import numpy as np
import pytest
from scripted_drafter import ScriptedDrafter

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.drafters import Drafters, DraftOptions
from retrieve_spec.engine.text_drafter import TextDrafter


def opened(drafters: Drafters, count: int) -> list[Any]:
    """So many drafters that were open at once."""
    made = [open_one(drafters) for _ in range(count)]
    for drafter in made:
        drafters.close(drafter)
    return made


def open_one(drafters: Drafters, **options: Any) -> Any:
    return drafters.open(DraftOptions(**options))


def test_a_drafter_that_failed_amid_its_work_is_not_opened_again() -> None:
    drafters = Drafters(SpeculationConfig(), [], None, "model")
    failed = open_one(drafters)
    drafters.close(failed, failed=True)
    assert open_one(drafters) is not failed


def test_other_stores_are_drafted_from_in_every_sequence() -> None:
    """A drafter knows the stores it was made with, so all are made anew; what they learned goes along."""
    drafters = Drafters(SpeculationConfig(session=True), [], None, "model")
    before = opened(drafters, 3)
    at_work = open_one(drafters)
    drafters.use([])
    after = opened(drafters, 3)
    assert not {id(drafter) for drafter in before} & {id(drafter) for drafter in after}
    drafters.close(at_work)
    assert open_one(drafters) is after[0]
    assert all(drafter.session is before[0].session for drafter in after)
    assert all(drafter.calibration is before[0].calibration for drafter in after)


def test_whoever_asked_last_does_not_ask_for_the_next() -> None:
    """A sequence that ends before it begins leaves its drafter as it was."""
    drafters = Drafters(SpeculationConfig(session=True), [], None, "model")
    drafter = open_one(drafters, scope="alice")
    assert isinstance(drafter, MixtureDrafter)
    assert drafter.requester_id == "alice" and drafter.session is drafters.sessions.get("alice")
    drafters.close(drafter)
    assert open_one(drafters, call="call") is drafter
    assert drafter.requester_id == "call" and drafter.session is drafters.sessions.get("")
    drafters.close(drafter)
    assert open_one(drafters) is drafter and drafter.requester_id is None


PROMPT = np.array([4, 5, 6], np.int32)


class Noted(ScriptedDrafter):
    """A drafter that notes what it is told."""

    def __init__(self) -> None:
        super().__init__([], top_k=2)
        self.said: list[Any] = []

    def start(self, prompt_ids: Any, prediction_ids: Any = None) -> None:
        self.said.append(("start", prompt_ids.tolist()))

    def propose(self, budget: Budget) -> DraftTree:
        self.said.append("propose")
        return DraftTree()

    def observe(self, verified: VerifiedPass) -> None:
        self.said.append(("observe", verified.emitted.tolist()))

    def finish(self) -> None:
        self.said.append("finish")


@pytest.mark.parametrize("asked", [True, False])
def test_a_deferred_drafter_observes_everything_at_once(asked: bool) -> None:
    """When it is first asked for a tree; at the end where it never is."""
    drafter = Noted()
    made = TextDrafter(Drafters(SpeculationConfig(), [], drafter, "model"), DraftOptions(), PROMPT, may_defer=True)
    made.defer()
    assert made.start() == "" and made.drafts and made.top_k == 0
    for token in (7, 8):
        shown = VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([token], np.int32))
        made.observe(shown, prompt=token == 7)
    assert drafter.said == []
    if asked:
        made.draft(Budget(8, 8))
        assert made.top_k == 2
    made.finish()
    told = [("start", [4, 5, 6]), ("observe", [7, 8])]
    assert drafter.said == [*told, *["propose"] * asked, "finish"] and not made.drafts


def test_what_tokens_look_like_is_not_forgotten_with_the_texts() -> None:
    class Tokenizer:
        asked = 0

        def get_vocab(self) -> dict[str, int]:
            self.asked += 1
            return {"a": 0, "1": 1}

    drafters = Drafters(SpeculationConfig(), [], None, "model", tokenizer := Tokenizer())
    for _ in range(3):
        assert len(open_one(drafters).calibration.classes) == 2
        drafters.forget()
    assert tokenizer.asked == 1
