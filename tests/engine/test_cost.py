"""The cost model: a curve through what was measured, which follows a change of the model."""

import numpy as np
import pytest

from retrieve_spec.config import MAX_NODES
from retrieve_spec.engine.budget import CostModel, Costs


@pytest.mark.parametrize("more", [0.0, 0.001, 0.02, 0.5])
def test_the_first_two_widths_say_what_wider_ones_cost(more: float) -> None:
    """Where weights lie on a disk a node costs nothing; what is not tried again is not forgotten."""
    cost = CostModel()
    cost.begin(128, {0: 5.0, 15: 5.0 + 15 * more})
    for _ in range(1500):
        curve = cost.seconds(300, MAX_NODES)
        np.testing.assert_allclose(curve, 5.0 + np.arange(MAX_NODES + 1) * more, rtol=0.3)
        cost.observe(30, 300, 5.0 + 30 * more)


def test_after_a_change_one_pass_says_what_all_take() -> None:
    costs = Costs()
    for _ in range(60):
        for nodes, seconds in ((0, 1.0), (64, 4.0)):
            costs.of(1).observe(nodes, 100, seconds)
            costs.of(1).seconds(100, 64)
    costs.doubt()
    costs.of(1).observe(0, 100, 3.0)
    assert costs.of(1).seconds(100, 64)[[0, 64]] == pytest.approx([3.0, 12.0], rel=0.1)
