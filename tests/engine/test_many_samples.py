"""Any number of samples of a prompt, sharing and remembering: the texts of drafting off, the model's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batch_rows import CHAINS, small_model

import retrieve_spec as rs

COUNTS = (1, 32)


@pytest.mark.parametrize(
    ("model_type", "temperature"),
    [("llama", None), ("llama", 0.7), ("llama", 1.0), ("gpt_neo", None), ("gpt_neo", 0.7), ("gpt_neo", 1.0)],
)
def test_the_same_with_and_without_drafts(model_type: str, temperature: float | None) -> None:
    """Families that verify trees and chains; greedy rows are equal prompts of a batch."""
    extra = CHAINS if model_type == "gpt_neo" else {}
    model = small_model(model_type, **extra)
    rs.accelerate(model, nodes=12, recorded_pass="off", rollouts=rs.RolloutMemory())
    prompt = torch.tensor([[3 + (i * 37 + 7) % 190 for i in range(7)]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": temperature is not None}
    if temperature is not None:
        options |= {"temperature": temperature, "top_k": 0, "seed": 3}
    for count in COUNTS:
        ids = prompt if temperature is not None else prompt.repeat(count, 1)
        given = options | ({} if temperature is None else {"num_return_sequences": count})
        shared = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        drafted = model.speculation.last
        assert len(shared) == count
        assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **given, draft="off"), shared)
        (done,) = rs.generate_many(model, [prompt[0]], **options, num_return_sequences=count if temperature else 1)
        assert [o.token_ids.tolist() for o in done.outputs] == shared[: len(done.outputs), 7:].tolist()
        if model_type == "llama" or count == 1:
            assert drafted.mode == ("tree" if model_type == "llama" else "chain")
            assert drafted.nodes > 0
