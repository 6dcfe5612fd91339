"""Batches whose rows are decoded in step: the tokens of plain `generate`, and of every row alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import LENGTHS, drawn_trees, left_padded, script
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafter import ScriptedDrafter
from small_decoders import build, ids
from transformers import LogitsProcessor, StoppingCriteria

import retrieve_spec as rs
from retrieve_spec.config import PASS, PassConfig
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine import driving, joining
from retrieve_spec.engine.budget import share_evenly, share_out
from retrieve_spec.errors import ConfigError
from retrieve_spec.quantized import WeightOnlyConfig, quantize
from retrieve_spec.recorded import recorded_verifier
from retrieve_spec.sampling.samplers import make_sampler


@pytest.mark.parametrize(("recorded_pass", "kind"), [("always", "recorded"), ("off", "model's own")])
@pytest.mark.parametrize("name", ["right", "wrong", "half", "branchy"])
def test_greedy_rows_are_those_of_generate(
    tiny: Any, name: str, recorded_pass: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left-padded rows that end at different times; whatever is drafted, tokens and padding are plain `generate`'s."""
    inputs, options = left_padded(), {"max_new_tokens": 40, "do_sample": False}
    free = tiny.generate(**inputs, **options)
    options["eos_token_id"] = [int(free[0, 17 + 9]), int(free[1, 17 + 22])]
    plain = tiny.generate(**inputs, **options)
    ends = {int((row[17:] != 0).sum()) for row in plain}
    assert len(ends) > 2, "rows of different length"
    drafters = script(tiny, monkeypatch, free, name, recorded_pass=recorded_pass)
    assert torch.equal(tiny.generate(**inputs, **options), plain)
    report = tiny.speculation.last
    assert (report.mode, report.rows, report.pass_kind) == ("tree", 4, kind)
    assert report.new_tokens == int((plain[:, 17:] != 0).sum())
    assert [len(d.text) for d in drafters] == [int((row != 0).sum()) for row in plain]
    assert [d.finished for d in drafters] == [1] * 4
    most = max(len(d.seen) for d in drafters)
    assert report.passes == most, "as many passes as the row that needs most of them"
    if name == "right":
        assert report.passes < max(ends) / 3
    assert torch.equal(tiny.generate(**inputs, **options, draft="off"), plain)


@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 0.9},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 5},
    ],
)
def test_sampled_rows_are_those_of_each_row_alone(
    tiny: Any, rules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts and without, and row by row through the ordinary verifier with the noise of that row."""
    inputs = left_padded()
    options = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, "seed": 5} | rules
    rs.accelerate(tiny, draft="off", recorded_pass="always")
    undrafted = tiny.generate(**inputs, **options)
    assert tiny.speculation.last.rows == 4
    assert len({tuple(row[17:].tolist()) for row in undrafted}) == 4
    script(tiny, monkeypatch, undrafted, "branchy", recorded_pass="always")
    assert torch.equal(tiny.generate(**inputs, **options), undrafted)
    assert tiny.speculation.last.tokens_per_pass > 4.5
    for row in range(4):
        alone = {name: part[row : row + 1] for name, part in inputs.items()}
        monkeypatch.setattr(
            joining, "make_sampler", lambda *given, at=row, **named: make_sampler(*given, **{**named, "row": at})
        )
        assert torch.equal(tiny.generate(**alone, **options, draft="off"), undrafted[row : row + 1])


def test_rows_draft_for_themselves_and_budgets_are_shared(tiny: Any) -> None:
    """`auto`: nothing of one row is drafted in another, and one pass never holds more nodes than a pass may."""
    inputs, options = left_padded(), {"max_new_tokens": 60, "do_sample": False}
    plain = tiny.generate(**inputs, **options)
    rs.accelerate(tiny, recorded_pass="always")
    own = [row[17 - length :].tolist() for row, length in zip(plain, LENGTHS, strict=True)]
    ours = tiny.generate(**inputs, **options, prediction=own, nodes=256)
    assert torch.equal(ours, plain)
    guided = tiny.speculation.last
    assert guided.passes < 20
    assert sum(nodes for nodes, *_ in guided.per_pass) <= (PASS.tree_rows - 4) * guided.passes
    options["nodes"] = 16  # what is drafted depends on no clock
    again = tiny.generate(**inputs, **options)
    assert torch.equal(again, plain)
    first = tiny.speculation.last.passes
    assert torch.equal(tiny.generate(**inputs, **options, prediction=own[0]), plain), "one prediction for all rows"
    with pytest.raises(ConfigError, match="each of 4 rows"):
        tiny.generate(**inputs, **options, prediction=own[:3])
    rs.accelerate(tiny, recorded_pass="always", session=True)
    tiny.generate(**inputs, **options)
    assert torch.equal(tiny.generate(**inputs, **options), plain)
    assert tiny.speculation.last.passes < first, "a session remembers the rows"


class Marked(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


class Watching(StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logits_processor": [Marked()]}, "Marked may tell the rows"),
        ({"stopping_criteria": [Watching()]}, "Watching may tell the rows of a batch apart: generate_many"),
        ({"max_time": 100.0}, "there is no end-of-text token"),
        ({"num_beams": 2}, "beams"),
        (
            {"attention_mask": torch.ones(4, 17, dtype=torch.long).index_fill(0, torch.tensor([3]), 0)},
            "has no text",
        ),
    ],
)
def test_what_is_left_to_generate(tiny: Any, change: dict[str, Any], reason: str) -> None:
    options = left_padded() | {"max_new_tokens": 6, "do_sample": False} | change
    plain = tiny.generate(**options)
    rs.accelerate(tiny, recorded_pass="always")
    ours = tiny.generate(**options)
    assert torch.equal(getattr(ours, "sequences", ours), getattr(plain, "sequences", plain))
    assert tiny.speculation.last.mode == "delegated"
    assert reason in tiny.speculation.last.reason


def allowed(row: int, input_ids: torch.Tensor) -> list[int]:
    """Tokens that a row may go on with: its number, its length and its last token tell."""
    first = (7 * row + len(input_ids) + int(input_ids[-1])) % 5
    return [*range(3 + first, 199, 5), 77]


@pytest.mark.parametrize("name", ["right", "half", "branchy"])
def test_what_is_allowed_is_asked_for_each_row(tiny: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rows, samples and requests: each under its own number in the call."""
    options: dict[str, Any] = {"max_new_tokens": 24, "prefix_allowed_tokens_fn": allowed, "max_time": 900.0}
    options |= {"eos_token_id": 77, "pad_token_id": 0, "do_sample": False}
    plain = tiny.generate(**left_padded(), **options)
    script(tiny, monkeypatch, plain, name, recorded_pass="always")
    assert torch.equal(tiny.generate(**left_padded(), **options), plain)
    assert tiny.speculation.last.mode == "tree"
    assert tiny.speculation.last.tokens_per_pass > 1.5
    one = {"input_ids": left_padded()["input_ids"][1:2], "do_sample": True, "num_return_sequences": 3, "seed": 5}
    drafted = tiny.generate(**options | one)
    assert torch.equal(tiny.generate(**options | one, draft="off"), drafted)
    for row, text in enumerate(drafted):
        assert all(int(text[i]) in (*allowed(row, text[:i]), 0) for i in range(17, len(text)))


def test_own_processors_and_criteria_are_called_for_each_request(tiny: Any) -> None:
    """Where a batch is left to `generate`, requests are drafted for."""

    def favour(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(1, input_ids[0, -1:] % 7, torch.full((len(scores), 1), 2.0))

    own = {"logits_processor": [favour], "stopping_criteria": [lambda ids, _scores: ids[:, -1] % 9 == 4]}
    prompts = [left_padded()["input_ids"][row, 17 - length :] for row, length in enumerate(LENGTHS)]
    wanted = [tiny.generate(ids[None], **own, max_new_tokens=20, do_sample=False)[0, len(ids) :] for ids in prompts]
    rs.accelerate(tiny, recorded_pass="always")
    done = list(rs.generate_many(tiny, prompts, **own, max_new_tokens=20, do_sample=False))
    assert [one.token_ids.tolist() for one in done] == [ids.tolist() for ids in wanted]
    assert all(one.outputs[0].report.mode == "tree" for one in done)


@pytest.mark.parametrize("bits", [8, 16])
def test_numbers_of_a_text_do_not_depend_on_drafts_and_company(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of fewer and of more tokens than one pass reads, where long ones get torch's attention."""
    model = build("llama", torch.bfloat16, hidden_size=64, intermediate_size=128, head_dim=32)
    if bits < 16:
        quantize(model, WeightOnlyConfig(bits=bits))
    monkeypatch.setattr(recorded_verifier, "attends_fast_for_many", lambda _dtype: False)
    rs.accelerate(model, recorded_pass="always")
    prompts = [ids(length)[0, length % 7 :] for length in (12, 40, 71, 130, 257, 261, 300, 530)]
    sampled = {"max_new_tokens": 8, "do_sample": True, "seed": 3, "return_logprobs": True}

    def numbers(asked: list[torch.Tensor], **options: Any) -> list[list[float]]:
        done = sorted(rs.generate_many(model, asked, **sampled, **options), key=lambda one: one.index)
        return [one.outputs[0].raw_logprobs.tolist() for one in done]

    wanted = [numbers([prompt], draft="off")[0] for prompt in prompts]
    assert numbers(prompts, draft="off") == wanted
    assert [numbers([prompt], nodes=16)[0] for prompt in prompts] == wanted
    assert numbers(prompts, nodes=16) == wanted


def test_a_drafter_that_was_given_serves_one_text(tiny: Any) -> None:
    inputs, options = left_padded(), {"max_new_tokens": 6, "do_sample": False}
    plain = tiny.generate(**inputs, **options)
    rs.accelerate(tiny, recorded_pass="always", drafter=ScriptedDrafter(plain[0]))
    assert torch.equal(tiny.generate(**inputs, **options), plain)
    assert "the drafter that was given serves one text" in tiny.speculation.last.reason


def test_more_rows_than_a_pass_serves_wait(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options = left_padded(tuple(range(1, 14))), {"max_new_tokens": 9, "do_sample": False}
    plain = tiny.generate(**inputs, **options)
    rs.accelerate(tiny, recorded_pass="always", draft="off")
    assert torch.equal(tiny.generate(**inputs, **options), plain)
    assert (tiny.speculation.last.rows, tiny.speculation.last.passes) == (13, 9)
    monkeypatch.setattr(driving, "PASS", PassConfig(batch_rows=4))
    assert torch.equal(tiny.generate(**inputs, **options), plain)
    assert tiny.speculation.last.passes == 1 + 8 * 4, "four at a time"
    monkeypatch.setattr(driving, "PASS", PassConfig(batch_bytes=1))
    assert torch.equal(tiny.generate(**inputs, **options), plain)
    assert tiny.speculation.last.passes == 1 + 8 * 13, "one after another"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_shares_are_the_best_there_are(data: st.DataObject) -> None:
    """Against every choice of how many of the most probable nodes to keep; parents stay with their children."""
    trees = drawn_trees(data)
    total, rows = sum(map(len, trees)), len(trees)
    steps = data.draw(st.lists(st.floats(0.0, 1.0), min_size=total + 1, max_size=total + 1))
    seconds = (1.0 + np.cumsum(steps)).astype(np.float32)
    most = data.draw(st.integers(0, total))
    kept = share_out(trees, seconds, most)
    flat = sorted((float(np.exp(p)) for tree in trees for p in tree.log_p), reverse=True)
    rates = [(rows + sum(flat[:n])) / seconds[n] for n in range(min(most, total) + 1)]
    got = (rows + sum(tree.expected_accepted for tree in kept)) / seconds[sum(map(len, kept))]
    assert got == pytest.approx(max(rates), rel=1e-4)
    for tree in kept:
        assert (tree.parent < np.arange(len(tree))).all()


def test_what_stands_behind_a_node_that_does_not_pay_is_not_kept_without_it() -> None:
    """Drafters may hope more of it: its position would be another one in the text."""
    tree = DraftTree.from_paths([[1, 2, 3, 4], [1, 5]])
    tree.log_p[:] = [0.0, -9.0, -0.1, -0.2, -0.5]
    for left in share_out([tree, tree], None, 7):
        left.validate()
    (left,) = share_evenly([tree], None, 4)
    assert left.token_ids.tolist() == [1, 5]
