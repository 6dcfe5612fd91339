"""Prompts of several sequences: read in shared passes of bounded size, and what follows is what each row says alone."""

from typing import Any

import pytest
import torch
from batch_rows import KINDS, left_padded, script, small_model

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
