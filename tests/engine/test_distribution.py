"""Sampled text follows the target's processed distribution."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sampling.acceptance import RowText, Sampler, walk
from retrieve_spec.sampling.samplers import make_sampler

VOCAB = 8
_TABLE = np.random.default_rng(5).standard_normal((VOCAB + 1, VOCAB)).astype(np.float32) * 1.5
# root ─┬─ 0 ─┬─ 1
#       │     └─ 2
#       ├─ 3 ─── 4
#       └─ 5
TREE = DraftTree.from_paths([[0, 1], [0, 2], [3, 4], [5]])


def chi_square(counts: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]) -> tuple[float, float]:
    """Pearson's statistic over cells of five expected draws or more, the rest pooled; and its 99.9 % quantile."""
    total = sum(counts.values())
    big = {cell: p * total for cell, p in expected.items() if p * total >= 5}
    seen_big = sum(counts[cell] for cell in big)
    statistic = sum((counts[cell] - mean) ** 2 / mean for cell, mean in big.items())
    rest = total - sum(big.values())
    statistic += (total - seen_big - rest) ** 2 / max(rest, 1.0)
    degrees = len(big)
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3  # Wilson and Hilferty, 1931
    return statistic, quantile


def _favour_the_next(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + (torch.arange(VOCAB) == (input_ids[0, -1] + 1) % VOCAB)


RULES: dict[str, list[Any]] = {
    "none": [],
    "top-k": [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(3)],
    "min-p": [hf.TemperatureLogitsWarper(1.3), hf.MinPLogitsWarper(0.1)],
    "top-k, top-p and min-p": [hf.TopKLogitsWarper(6), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.05)],
    "least length": [hf.MinLengthLogitsProcessor(2, 5)],
    "penalty": [hf.RepetitionPenaltyLogitsProcessor(1.8)],
    "penalty and top-p": [hf.RepetitionPenaltyLogitsProcessor(0.6), hf.TopPLogitsWarper(0.8)],
    "typical": [hf.TypicalLogitsWarper(0.7)],
    "epsilon and eta": [hf.EpsilonLogitsWarper(0.05), hf.EtaLogitsWarper(0.1)],
    "of one's own": [_favour_the_next, hf.LogitNormalization()],
    "no token twice": [hf.NoRepeatNGramLogitsProcessor(1), hf.TopKLogitsWarper(4)],
}


def after(processors: LogitsProcessorList, text: list[int], row: int) -> Any:
    """Distribution of the next token by transformers' own processors; `row` is the token before it."""
    scores = processors(torch.tensor([[1, *text]]), torch.from_numpy(_TABLE[row : row + 1].copy()))
    return torch.softmax(scores[0].double(), dim=-1).numpy()


def exact_pairs(processors: LogitsProcessorList) -> dict[tuple[int, int], float]:
    """Probability of the first two tokens after a prompt of one token."""
    first = after(processors, [], VOCAB)
    some = [a for a in range(VOCAB) if first[a]]
    return {(a, b): float(first[a] * p) for a in some for b, p in enumerate(after(processors, [a], a))}


def draw_pair(sampler: Sampler) -> tuple[int, int]:
    """Two tokens, verified over the tree and, where the walk left it early, over a pass without drafts."""
    text = RowText(torch.tensor([[1]]))
    tree, rows = TREE, [VOCAB, *TREE.token_ids.tolist()]
    while text.length < 3:
        logits = sampler.read(torch.from_numpy(_TABLE[rows]), 0, tree, text, 1)
        walk(tree, logits, 0, sampler, text, lambda *_: False)
        tree, rows = DraftTree(), [int(text.last_ids[0])]
    return int(text.ids[1]), int(text.ids[2])


@pytest.mark.parametrize("rules", RULES)
def test_every_set_of_rules_gives_the_distribution_of_transformers(rules: str) -> None:
    processors = LogitsProcessorList(RULES[rules])
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(2000):
        counts[draw_pair(make_sampler(processors, seed))] += 1
    expected = exact_pairs(processors)
    found, allowed = chi_square(counts, expected)
    assert found < allowed
    assert all(expected.get(pair, 0.0) > 0.0 for pair in counts), "no token that the rules rule out"
