"""The engine over a mock model: what is accepted, committed, shown and learned, to the token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mock_model import MockVerifier, counting, passes, sequence
from scripted_drafter import ScriptedDrafter
from transformers.generation.stopping_criteria import StoppingCriteria

ANSWER = [i % 50 for i in range(3, 80)]


def run(made: Any) -> list[list[int]]:
    return list(passes(made))


def flat(runs: list[list[int]]) -> list[int]:
    return [token for visible in runs for token in visible]


@pytest.mark.parametrize("script", ["right", "wrong", "half", "branchy"])
@pytest.mark.parametrize("mode", ["tree", "chain"])
def test_output_is_the_models_whatever_is_drafted(script: str, mode: Any) -> None:
    verifier = MockVerifier(counting(), mode)
    drafter = ScriptedDrafter(ANSWER, script, vocab=50)
    made = sequence(verifier, drafter, [3, 4, 5])
    shown = flat(run(made))
    assert shown == ANSWER[3:30]
    assert verifier.cache == ANSWER[:29], "the cache holds all but the last token"
    assert drafter.text == ANSWER[:30]
    assert made.text.new_ids.tolist() == shown


def test_no_pass_asks_for_more_than_may_be_emitted() -> None:
    drafter = ScriptedDrafter(ANSWER, "right", length=50, vocab=50)
    run(sequence(MockVerifier(counting()), drafter, [3, 4, 5], max_length=9))
    assert [budget.max_depth for budget in drafter.budgets] == [4]


def test_drafts_end_at_the_position_limit() -> None:
    drafter = ScriptedDrafter(ANSWER, "right", length=50, vocab=50)
    verifier = MockVerifier(counting())
    made = sequence(verifier, drafter, [3, 4, 5], draft_end=8)
    assert flat(run(made)) == ANSWER[3:30]
    assert drafter.budgets[0].max_depth == 4
    assert all(budget.max_nodes == 0 for budget in drafter.budgets[1:])
    assert verifier.passes[2:] == [0] * len(verifier.passes[2:])


class StopAfter(StoppingCriteria):
    """Counts its calls, and stops at a token."""

    def __init__(self, token: int) -> None:
        self.token, self.lengths = token, []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_custom_criteria_see_every_token_once_and_in_order() -> None:
    stop = StopAfter(12)
    drafter = ScriptedDrafter(ANSWER, "right", length=20, vocab=50)
    assert flat(run(sequence(MockVerifier(counting()), drafter, [3], criteria=[stop]))) == list(range(4, 13))
    assert stop.lengths == list(range(2, 11))


def test_what_the_drafter_learns() -> None:
    drafter = ScriptedDrafter(ANSWER, "right", length=3, vocab=50, top_k=2)
    drafter.wants_hidden = "last"
    made = sequence(MockVerifier(counting()), drafter, [3, 4, 5], max_length=12, prompt_logits=2)
    run(made)
    token_ids, top_ids, top_logits = drafter.prompt_rows
    assert token_ids.tolist() == [4, 5]
    assert top_ids.tolist() == [[5, 6], [6, 7]]
    assert top_logits.tolist() == [[3, 1], [3, 1]]
    first, second = drafter.seen[:2]
    assert first.top_ids is None
    assert first.hidden.tolist() == [1.0], "row of the last prompt token"
    assert second.top_ids.tolist() == [[7, 8], [8, 9], [9, 10], [10, 11]]
    assert second.hidden.tolist() == [3.0], "row of the last accepted node"


def test_who_watches_sees_what_the_drafter_sees() -> None:
    """Row 0 of every pass follows the root, also in the prompt's, of which the drafter may have seen more rows."""
    shown: list[Any] = []
    drafter = ScriptedDrafter(ANSWER, "right", length=2, vocab=50, top_k=2)
    made = sequence(MockVerifier(counting()), drafter, ANSWER[:3], max_length=12, prompt_logits=2, on_pass=shown.append)
    emitted = flat(run(made))
    assert [token for verified in shown for token in verified.emitted.tolist()] == emitted
    for verified in shown:
        assert verified.top_ids.shape == (len(verified.tree) + 1, 2)
        assert verified.top_ids[0, 0] == verified.emitted[0]


def test_a_drafter_that_wants_no_logits_gets_none() -> None:
    drafter = ScriptedDrafter(ANSWER, "right", vocab=50, top_k=0)
    run(sequence(MockVerifier(counting()), drafter, [3, 4, 5], prompt_logits=2))
    assert drafter.prompt_rows is None
    assert all(verified.top_ids is None and verified.hidden is None for verified in drafter.seen)


def test_plain_verifiers_get_no_drafts() -> None:
    drafter = ScriptedDrafter(ANSWER, "right", vocab=50)
    verifier = MockVerifier(counting(), "plain")
    assert flat(run(sequence(verifier, drafter, ANSWER[:20], prefill_chunk=4))) == ANSWER[20:30]
    assert not drafter.budgets
    assert set(verifier.passes) == {0}


def test_provenance_joins_what_was_read_in_one_piece() -> None:
    class Reader(ScriptedDrafter):
        def propose(self, budget: Any) -> Any:
            tree = super().propose(budget)
            tree.origin = np.array([700, 701, 900, -1, 40][: len(tree)], np.int64)
            return tree

    drafter = Reader(ANSWER, "right", length=5, vocab=50)
    made = sequence(MockVerifier(counting()), drafter, [3, 4], max_length=9, provenance=True)
    run(made)
    assert made.report.origins == [(1, 2, 700), (3, 1, 900), (5, 1, 40)]
    assert not sequence(MockVerifier(counting()), drafter, [3, 4]).report.origins


def test_auto_budgets_carry_measured_cost() -> None:
    drafter = ScriptedDrafter(ANSWER, "right", vocab=50, length=2)
    made = sequence(MockVerifier(counting()), drafter, [3], nodes=None)
    run(made)
    first = drafter.budgets[0].cost
    assert first is not None
    assert first[0] == 1.0, "nothing measured yet: in units of a plain pass"
    budget = next(budget for budget in reversed(drafter.budgets) if budget.max_nodes)
    cost = budget.cost
    assert cost is not None
    assert cost.dtype == np.float32
    assert cost.shape == (budget.max_nodes + 1,)
    assert (np.diff(cost) >= 0).all()
