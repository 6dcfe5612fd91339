"""What an engine shows to drafters and to who watches: every token once, each row as the model has it."""

from typing import Any

import numpy as np
import pytest
import torch
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture
def answer(tiny: Any, prompt: torch.Tensor) -> torch.Tensor:
    return tiny.generate(prompt, **GREEDY)[0]


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_what_drafters_and_who_watches_learn(tiny: Any, prompt: torch.Tensor, answer: Any, recorded_pass: str) -> None:
    """The most probable tokens behind the last rows of the prompt, behind every root, and behind every node."""
    with torch.no_grad():
        best = tiny(answer[None]).logits[0].topk(3)
    drafter = ScriptedDrafter(answer, "half", top_k=3)
    rs.accelerate(tiny, drafter=drafter, nodes=16, prompt_logits=2, recorded_pass=recorded_pass)
    shown: list[Any] = []
    list(rs.generate_stream(tiny, prompt, on_pass=shown.append, **GREEDY))
    token_ids, top_ids, top_logits = drafter.prompt_rows
    assert token_ids.tolist() == answer[10:12].tolist()
    assert top_ids.tolist() == best.indices[10:12].tolist()
    np.testing.assert_allclose(top_logits, best.values[10:12], atol=1e-4)
    at = 11
    for verified in shown:
        rows = [0, *(verified.path + 1)]
        assert verified.top_ids[rows].tolist() == best.indices[at : at + len(rows)].tolist()
        assert verified.emitted.tolist() == answer[at + 1 : at + 1 + len(rows)].tolist()
        at += len(rows)
    assert at == 35 and drafter.seen[0].top_ids is None, "the prompt's were shown before"
    assert [seen.emitted.tolist() for seen in drafter.seen] == [verified.emitted.tolist() for verified in shown]


@pytest.mark.parametrize("door", ["generate", "stream", "many"])
def test_every_kind_of_call_shows_its_passes(tiny: Any, prompt: torch.Tensor, answer: Any, door: str) -> None:
    rs.accelerate(tiny, drafter=ScriptedDrafter(answer), nodes=16, recorded_pass="off")
    emitted: list[int] = []
    options = {**GREEDY, "on_pass": lambda verified: emitted.extend(verified.emitted.tolist())}
    if door == "generate":
        tiny.generate(prompt, **options)
    else:
        list(
            rs.generate_stream(tiny, prompt, **options)
            if door == "stream"
            else rs.generate_many(tiny, [prompt], **options)
        )
    assert emitted == answer[prompt.shape[1] :].tolist()


def test_passes_of_a_model_that_names_no_output_embeddings_are_shown_without_hidden_states(
    tiny: Any, prompt: torch.Tensor, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "get_output_embeddings", lambda: None)
    rs.accelerate(tiny, drafter=ScriptedDrafter(answer), nodes=16, recorded_pass="off")
    shown: list[Any] = []
    assert torch.equal(tiny.generate(prompt, **GREEDY, on_pass=shown.append)[0], answer)
    assert len(shown) < 24 and all(verified.hidden is None for verified in shown)


@pytest.mark.parametrize(("recorded_pass", "most"), [("off", 1024), ("always", 256)])
def test_trees_are_as_wide_as_passes_may_be(
    tiny: Any, prompt: torch.Tensor, answer: Any, recorded_pass: str, most: int
) -> None:
    rs.accelerate(tiny, drafter=ScriptedDrafter(answer, "wide"), nodes=1024, recorded_pass=recorded_pass)
    assert torch.equal(tiny.generate(prompt, **GREEDY)[0], answer)
    assert max(nodes for nodes, *_ in tiny.speculation.last.per_pass) == most


def test_a_drafter_that_wants_no_logits_gets_none(tiny: Any, prompt: torch.Tensor, answer: Any) -> None:
    drafter = ScriptedDrafter(answer, top_k=0)
    rs.accelerate(tiny, drafter=drafter, nodes=16)
    tiny.generate(prompt, **GREEDY)
    assert drafter.prompt_rows is None
    assert all(verified.top_ids is None and verified.hidden is None for verified in drafter.seen)


def test_provenance_joins_what_was_read_in_one_piece(tiny: Any, prompt: torch.Tensor, answer: Any) -> None:
    class Reader(ScriptedDrafter):
        def propose(self, budget: Any) -> Any:
            tree = super().propose(budget)
            tree.origin = np.array([700, 701, 900, -1, 40][: len(tree)], np.int64)
            return tree

    for wanted, origins in ((True, [(1, 2, 700), (3, 1, 900), (5, 1, 40)]), (False, [])):
        rs.accelerate(tiny, drafter=Reader(answer, length=5), nodes=16, provenance=wanted)
        tiny.generate(prompt, do_sample=False, max_new_tokens=7)
        assert tiny.speculation.last.origins == origins
