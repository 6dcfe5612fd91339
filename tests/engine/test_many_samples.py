"""Any number of samples of a prompt, sharing and remembering: the texts of drafting off, the model's distribution."""

from __future__ import annotations

from collections import Counter
from statistics import NormalDist
from typing import Any

import pytest
import torch
from batch_rows import CHAINS, small_model

import retrieve_spec as rs

COUNTS = (1, 32)
SAMPLES = 600


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


def test_pairs_of_tokens_are_distributed_as_the_model_says() -> None:
    """Chi-square of the first two tokens of samples at temperature 1, drafted from siblings and rollouts."""
    model = small_model("llama", vocab_size=60)
    with torch.no_grad():
        model.lm_head.weight *= 2.0  # few tokens have most of the mass
    rs.accelerate(model, nodes=8, recorded_pass="off", rollouts=rs.RolloutMemory(answers=64))
    prompt = torch.tensor([[3, 6, 5]])
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": 3}
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(12):
        (done,) = rs.generate_many(model, [prompt[0]], rows=1, **options, num_return_sequences=SAMPLES // 12, seed=seed)
        for output in done.outputs:
            found[tuple(output.token_ids[:2].tolist())] += 1
            accepted += sum(output.report.accepted_by_source.values())
    assert accepted > SAMPLES / 4
    rs.restore(model)
    with torch.no_grad():
        first = model(prompt).logits[0, -1].softmax(-1)
        both = torch.cat([prompt.repeat(60, 1), torch.arange(60)[:, None]], dim=1)
        second = model(both).logits[:, -1].softmax(-1)
    expected = (first[:, None] * second).double() * SAMPLES
    cells = [(found[i, j], float(expected[i, j])) for i in range(60) for j in range(60)]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < 5), strict=True)]
    large += [tuple(rest)] if rest else []
    statistic, freedom = sum((seen - e) ** 2 / e for seen, e in large), len(large) - 1
    assert freedom > 10
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert NormalDist().cdf(-abs(normal)) > 0.001  # by Wilson and Hilferty's approximation
