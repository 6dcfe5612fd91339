"""Drafters that come late: told at once what they would have been told pass by pass, or never asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.drafters import DrafterLease

PROMPT = np.array([4, 5, 6], np.int32)


class Noted:
    """A drafter that notes what it is told."""

    top_k, wants_hidden = 2, None

    def __init__(self) -> None:
        self.said: list[Any] = []

    def start(self, prompt_ids: Any, prediction_ids: Any = None) -> None:
        self.said.append(("start", prompt_ids.tolist()))

    def observe_prompt(self, token_ids: Any, top_ids: Any, top_logits: Any) -> None:
        self.said.append(("prompt", len(token_ids)))

    def propose(self, budget: Budget) -> DraftTree:
        self.said.append("propose")
        return DraftTree()

    def observe(self, verified: VerifiedPass) -> None:
        self.said.append(("observe", verified.emitted.tolist()))

    def finish(self) -> None:
        self.said.append("finish")


def lent(drafter: Any, may_wait: bool = True) -> DrafterLease:
    """One that is told to wait, and has been shown two passes."""
    made = DrafterLease(lambda: drafter, PROMPT, None, None, may_wait)
    made.wait()
    assert made.start() == ""
    for token in (7, 8):
        made.observe(seen(token), prompt=token == 7)
    return made


def seen(token: int) -> VerifiedPass:
    """A pass over no draft, behind which the target says a token."""
    return VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([token], np.int32))


def ask(made: DrafterLease) -> DraftTree:
    return made.propose(Budget(8, 8))


def test_a_drafter_that_was_waited_for_is_told_everything_at_once() -> None:
    drafter = Noted()
    made = lent(drafter)
    assert drafter.said == [] and made.drafts and made.top_k == 0
    ask(made)
    assert drafter.said == [("start", [4, 5, 6]), ("observe", [7, 8]), "propose"]
    assert made.top_k == 2
    made.finish()
    assert drafter.said[3:] == ["finish"] and not made.drafts


def test_one_that_is_never_asked_takes_in_the_text_at_the_end() -> None:
    drafter = Noted()
    lent(drafter).finish()
    assert drafter.said == [("start", [4, 5, 6]), ("observe", [7, 8]), "finish"]


def test_who_may_not_wait_comes_at_the_start() -> None:
    drafter = Noted()
    lent(drafter, may_wait=False)
    assert drafter.said == [("start", [4, 5, 6]), ("observe", [7]), ("observe", [8])]


def test_one_that_was_interrupted_or_cannot_be_had_is_not_asked_again() -> None:
    drafter = Noted()
    made = lent(drafter)
    made.spoil()
    assert not made.drafts and len(ask(made)) == 0
    made.finish()
    assert drafter.said == []
    refused = lent("drafting is off")
    assert len(ask(refused)) == 0 and not refused.drafts
    refused.finish()
