"""Prompts of several sequences: read in shared passes of bounded size, and what follows is what each row says alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch_rows import KINDS, left_padded, script, small_model

import retrieve_spec as rs
from retrieve_spec.config import PassConfig
from retrieve_spec.engine import engine
from retrieve_spec.engine.sequence import Sequence

LENGTHS = (40, 3, 90, 1, 17, 66)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """By pass over prompts, the tokens read of each."""
    seen: list[list[int]] = []
    together = engine.read_together

    def noting(batch: list[Sequence], pieces: list[Any]) -> None:
        seen.append([len(piece) for piece in pieces])
        together(batch, pieces)

    monkeypatch.setattr(engine, "read_together", noting)
    return seen


@pytest.mark.parametrize(("model_type", "extra"), KINDS)
def test_prompts_are_read_together(
    model_type: str,
    extra: dict[str, Any],
    passes: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In passes of at most so many rows, several prompts each; text and scripts' drafts are those of plain rows."""
    model = small_model(model_type, **extra)
    inputs, options = left_padded(LENGTHS), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    script(model, monkeypatch, plain, "branchy", recorded_pass="always")
    for rows, most in ((64, 12), (512, 2)):
        passes.clear()
        monkeypatch.setattr(engine, "PASS", PassConfig(max_rows=rows))
        assert torch.equal(model.generate(**inputs, **options), plain)
        assert (model.speculation.last.rows, model.speculation.last.mode) == (len(LENGTHS), "tree")
        assert sum(map(sum, passes)) == sum(LENGTHS)
        shared = [p for p in passes if len(p) > 1]
        assert len(passes) - len(shared) <= 1, "the last one"
        assert max(map(sum, shared)) <= rows
        assert len(shared) <= most


@pytest.mark.parametrize("recorded_pass", ["always", "off"])
def test_running_sequences_wait_for_a_bounded_piece(
    tiny: Any, recorded_pass: str, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come while others write: between two of their passes no more is read than is stated, of all."""
    monkeypatch.setattr(engine, "PASS", PassConfig(prompt_piece=16))
    rs.accelerate(tiny, recorded_pass=recorded_pass, draft="off")
    prompts = [[3 + (i * 37 + 11 * row) % 190 for i in range(length)] for row, length in enumerate(LENGTHS)]
    alone = [tiny.generate(torch.tensor([p]), max_new_tokens=9 + 2 * i)[0, len(p) :] for i, p in enumerate(prompts)]
    passes.clear()
    by_step: dict[int, int] = {}
    together = engine.read_together

    def noting(batch: list[Sequence], pieces: list[Any]) -> None:
        step = tiny.speculation.engine.steps
        by_step[step] = by_step.get(step, 0) + sum(map(len, pieces))
        together(batch, pieces)

    monkeypatch.setattr(engine, "read_together", noting)
    requests = [{"inputs": p, "max_new_tokens": 9 + 2 * i} for i, p in enumerate(prompts)]
    said = rs.generate_many(tiny, requests, rows=3)
    assert [one.token_ids.tolist() for one in said] == [row.tolist() for row in alone]
    first, *later = by_step.values()
    assert first == sum(LENGTHS[:3]), "nobody waits"
    assert sum(later) == sum(LENGTHS[3:])
    assert max(later) <= 16


def test_a_pass_over_several_texts_that_fails_is_taken_alone(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, options = left_padded((5, 17, 9)), {"max_new_tokens": 6, "do_sample": False}
    plain = tiny.generate(**inputs, **options)
    together, calls = engine.forward_together, []

    def failing(*given: Any) -> Any:
        calls.append(given)
        if len(calls) % 2:
            raise torch.OutOfMemoryError("too much at once")
        return together(*given)

    monkeypatch.setattr(engine, "forward_together", failing)
    rs.accelerate(tiny, recorded_pass="always")
    assert torch.equal(tiny.generate(**inputs, **options), plain)
    assert len(calls) > 2
