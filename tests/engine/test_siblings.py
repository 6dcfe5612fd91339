"""Samples of one prompt draft from what the others write; no text changes, and no other prompt's samples see it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import retrieve_spec as rs
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.engine.drafters import Drafters
from retrieve_spec.engine.memories import Siblings

OPTIONS: dict[str, Any] = {"do_sample": True, "seed": 4, "max_new_tokens": 24}


def prompts() -> torch.Tensor:
    return torch.tensor([[3 + (i * 37 + 11 * row + 7) % 190 for i in range(8)] for row in range(2)])


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def test_what_one_wrote_the_next_drafts(tiny: Any) -> None:
    """Samples that say nearly the same, one after another."""
    rs.accelerate(tiny, recorded_pass="always", nodes=32)
    options = OPTIONS | {"temperature": 0.001, "num_return_sequences": 4, "max_new_tokens": 60}
    (shared,) = rs.generate_many(tiny, [prompts()[0]], rows=1, **options)
    (apart,) = rs.generate_many(tiny, [prompts()[0]], rows=1, **options, siblings="off")
    for ours, theirs in zip(shared.outputs, apart.outputs, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    later = [sum(output.report.passes for output in one.outputs[1:]) for one in (shared, apart)]
    assert later[0] < later[1] / 2


def test_nothing_is_learned_from_a_memory_that_holds_the_answer(tiny: Any) -> None:
    """What a sample has just written is shared only when its drafter has learned how well its siblings knew it.

    Text without any pattern is explained by no source; the samples' own text would explain all of it.
    """
    rs.accelerate(tiny, recorded_pass="off", nodes=4)
    options = OPTIONS | {"temperature": 100.0, "top_k": 0, "num_return_sequences": 4, "max_new_tokens": 40}
    tiny.generate(prompts(), **options)
    right, _ = tiny.speculation.drafter().calibration.statistics().get("session", (0.0, 0.0))
    assert right < 8 * 40 / 2


def test_prompts_are_kept_apart(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt has a memory of its own, single rows have none, and nothing of it outlives the call."""
    lend, lent = Drafters.lend, []

    def noted(self: Drafters, *given: Any) -> Any:
        drafter = lend(self, *given)
        assert isinstance(drafter, MixtureDrafter)
        lent.append((drafter, drafter.session))
        return drafter

    monkeypatch.setattr(Drafters, "lend", noted)
    rs.accelerate(tiny, recorded_pass="always")
    tiny.generate(prompts(), **OPTIONS, num_return_sequences=3)
    memories = [session for _, session in lent]
    assert all(isinstance(memory, Siblings) for memory in memories)
    assert sorted(Counter(map(id, memories)).values()) == [3, 3]
    assert all(drafter.session is None for drafter, _ in lent)
    lent.clear()
    tiny.generate(prompts(), **OPTIONS)
    assert [session for _, session in lent] == [None, None]


def test_beside_a_session(tiny: Any) -> None:
    """The session is drafted from as well, and remembers every sample once, at its end."""
    rs.accelerate(tiny, recorded_pass="always", session=True)
    session = tiny.speculation.session()
    rows = tiny.generate(prompts()[:1], **OPTIONS, num_return_sequences=3)
    assert tiny.speculation.session() is session
    assert sorted(text.tolist() for text in session.texts) == sorted(rows[:, 8:].tolist())
    again = tiny.generate(prompts()[:1], **OPTIONS, num_return_sequences=3)
    assert torch.equal(again, rows)
    assert tiny.speculation.last.accepted_by_source.get("session", 0) > 20


def test_what_is_heard_is_bounded() -> None:
    full = Siblings(max_tokens=10)
    for tokens in (range(8), [9]):
        full.hear(1, ids(*tokens))
        with full:
            assert len(full.automata[-1]) == 8
