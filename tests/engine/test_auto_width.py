"""How many tokens `auto` drafts: by what passes cost on two kinds of CPU it is as fast as the best fixed number."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.engine.budget import Costs

MEASURED = json.loads(Path(__file__).with_name("pass_costs.json").read_text())["milliseconds"]
CURVES: dict[str, dict[str, float]] = {**MEASURED, "each row as much as the first": {"1": 1.0, "100": 100.0}}
"""By CPU and format, by rows, what a pass takes."""
FIXED = (0, 1, 2, 4, 8, 16)
TRIED = (0, 3, 15, 63)
"""Nodes of the passes that `accelerate` tries."""
NOISE = 0.05
"""Standard deviation of the logarithm of a pass's time."""


def text_of(seed: int, count: int, sure: float) -> NDArray[np.int32]:
    """Tokens of which each depends on the two before: one of four, the first with probability `sure`."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(0).integers(0, 150, (5, 150, 4))
    shares = np.array([sure, *(1.0 - sure) * np.array([0.5, 0.3, 0.2])])
    text = [1, 2]
    for place in rng.choice(4, count, p=shares):
        text.append(int(table[text[-2] % 5, text[-1], place]))
    return np.array(text, np.int32)


def tokens_per_second(curve: dict[str, float], sure: float, nodes: int | None) -> float:
    """Speed at which texts are written with a fixed number of nodes, or (None) as many as pay by what passes took.

    Passes take a thousand times as long as they did, so that how fast this machine drafts plays no part.
    """
    rng, costs = np.random.default_rng(1), Costs()
    rows, seconds = [int(count) for count in curve], list(curve.values())

    def took(count: int) -> float:
        return float(np.interp(count + 1, rows, seconds) * np.exp(rng.normal(0.0, NOISE)))

    costs.of(1).begin(128, {count: took(count) for count in TRIED})
    drafter = MixtureDrafter(SpeculationConfig(), recycling=False)
    total = spent = 0.0
    for seed in range(2):
        text = text_of(seed, 1200, sure)
        at = 700
        drafter.start(text[:at])
        while at < len(text) - 1:
            cost = None if nodes is not None else costs.seconds(1, at)
            tree = drafter.propose(Budget(MAX_NODES if nodes is None else nodes, len(text) - at - 1, cost))
            path = tree.path_along(text[at : len(text) - 1])
            emitted = text[at : at + len(path) + 1]
            drafter.observe(VerifiedPass(tree, path, emitted))
            pass_seconds = took(len(tree))
            costs.learn(1, len(tree), at, pass_seconds)
            at, total, spent = at + len(emitted), total + len(emitted), spent + pass_seconds
        drafter.finish()
    return total / spent


@pytest.mark.parametrize("sure", [0.95, 0.6])
@pytest.mark.parametrize("machine", CURVES)
def test_auto_is_within_three_percent_of_the_best_fixed_number(machine: str, sure: float) -> None:
    curve = CURVES[machine]
    best = max(tokens_per_second(curve, sure, nodes) for nodes in FIXED)
    assert tokens_per_second(curve, sure, None) >= 0.97 * best
