"""The cost model: interpolation, monotony, robustness, and which passes change it."""

from __future__ import annotations

import numpy as np
import pytest

from retrieve_spec.config import MAX_NODES
from retrieve_spec.engine.cost import CostModel, Costs


def linear(nodes: int, context: int) -> float:
    return 0.004 + 0.0002 * nodes + 1e-6 * context


def fed(contexts: tuple[int, ...] = (500,), widths: tuple[int, ...] = (0, 4, 16, 64), times: int = 40) -> CostModel:
    cost = CostModel()
    for _ in range(times):
        for context in contexts:
            for width in widths:
                cost.observe(width, context, linear(width, context))
    return cost


def test_before_anything_is_measured_wider_passes_cost_more() -> None:
    cost = CostModel()
    curve = cost.seconds(100, MAX_NODES)
    assert not cost.measured
    assert (np.diff(curve) > 0).all()
    assert curve[64] == pytest.approx(2 * curve[0])
    cost.observe(0, 100, 0.01)
    assert cost.measured
    assert cost.seconds(100, MAX_NODES)[64] == pytest.approx(0.02, rel=0.01)


def test_curve_goes_through_what_was_measured_and_on() -> None:
    curve = fed(widths=(0, 1, 2, 4, 8, 16, 32, 64)).seconds(500, MAX_NODES)
    assert curve.shape == (MAX_NODES + 1,)
    assert curve.dtype == np.float32
    truth = np.array([linear(n, 500) for n in range(MAX_NODES + 1)])
    np.testing.assert_allclose(curve[:65], truth[:65], rtol=0.02)
    np.testing.assert_allclose(curve, truth, rtol=0.3)


@pytest.mark.parametrize("width", [3, 11, 50, 256])
def test_widths_between_knots_teach_their_neighbours(width: int) -> None:
    cost = fed()
    for _ in range(60):
        cost.observe(width, 500, 2 * linear(width, 500))
    for _ in range(3):
        curve = cost.seconds(500, MAX_NODES)
    assert curve[width] == pytest.approx(2 * linear(width, 500), rel=0.15)
    assert (np.diff(curve) >= 0).all()


def test_unseen_contexts_borrow_and_seen_ones_differ() -> None:
    cost = fed((500, 60_000))
    assert cost.seconds(60_000, 8)[0] == pytest.approx(linear(0, 60_000), rel=0.05)
    assert cost.seconds(500, 8)[0] == pytest.approx(linear(0, 500), rel=0.05)
    assert cost.seconds(10**6, 8)[0] == pytest.approx(linear(0, 60_000), rel=0.05)
    few = fed((500,))
    for _ in range(10):
        few.observe(0, 60_000, 10 * linear(0, 500))
    ratio = few.seconds(60_000, 64) / few.seconds(500, 64)
    assert (np.abs(ratio / 10 - 1) < 0.1).all(), "the shape is borrowed, scaled to what was measured"


def test_time_outside_the_forward_is_added() -> None:
    cost = CostModel()
    for _ in range(40):
        cost.observe(0, 500, 0.004, overhead_s=0.001)
        cost.observe(16, 500, 0.008, overhead_s=0.001)
    np.testing.assert_allclose(cost.seconds(500, 16)[[0, 16]], [0.005, 0.009], rtol=0.02)


def test_curves_never_fall_even_if_samples_do() -> None:
    cost = CostModel()
    for nodes, seconds in ((0, 0.01), (4, 0.02), (16, 0.012), (64, 0.03)) * 40:
        cost.observe(nodes, 100, seconds)
    assert (np.diff(cost.seconds(100, MAX_NODES)) >= 0).all()


@pytest.mark.parametrize("slow", [3.0, 10.0])
def test_widths_measured_on_a_busy_machine_are_tried_again(slow: float) -> None:
    """A policy that takes what pays best by the curve recovers from a probe beside other load."""
    cost = CostModel()
    for _ in range(20):
        for width in (0, 4, 0, 16, 0, 64):
            cost.observe(width, 500, linear(width, 500) * (slow if width else 1.0))
    gain = 1 + 2 * (1 - 0.8 ** np.arange(65))  # tokens per pass by nodes: drafting pays
    chosen = []
    for _ in range(3000):
        chosen.append(int(np.argmax(gain / cost.seconds(500, 64))))
        cost.observe(chosen[-1], 500, linear(chosen[-1], 500))
    best = int(np.argmax(gain / np.array([linear(n, 500) for n in range(65)])))
    assert abs(np.mean(chosen[-500:]) - best) < 4
    assert chosen[0] < best / 2, "it began with a wrong curve"


def test_more_rows_cost_what_more_nodes_do() -> None:
    """Passes over 32 texts, of which only those over one were measured: drafts are as dear there as they will be."""
    alone = CostModel()
    for nodes in (0, 4, 16, 64, 128) * 40:
        alone.observe(nodes, 64, 10.0 + nodes / 5)
    seconds = CostModel(alone, more=31).seconds(64, MAX_NODES)
    np.testing.assert_allclose(seconds, 10.0 + (31 + np.arange(MAX_NODES + 1)) / 5, rtol=0.1)


def test_after_a_change_one_pass_says_what_all_take() -> None:
    costs = Costs()
    for _ in range(60):
        for nodes, seconds in ((0, 1.0), (64, 4.0)):
            costs.alone.observe(nodes, 100, seconds)
            costs.alone.seconds(100, 64)
    costs.doubt()
    costs.alone.observe(0, 100, 3.0)
    assert costs.alone.seconds(100, 64)[[0, 64]] == pytest.approx([3.0, 12.0], rel=0.1)
