"""Figures show every method, few or many, and say what they are."""

from __future__ import annotations

import pytest

from retrieve_spec.bench import figures, stats
from retrieve_spec.bench.results import Record

PASSES = [(4, i % 5, 0.1 * i, 2.0) for i in range(40)]


def results(methods):
    """One record for each method and task, with passes for all but plain."""
    records = [
        Record(
            1, f"p {task}", task, method, new_tokens=20, token_ids=[list(range(20))], seconds=1.0 + i, passes=10,
            nodes=None if method == "plain" else 40, first_token_s=0.1, retokenized=19,
            per_pass=[] if method == "plain" else PASSES,
        )
        for task in ("edit", "prose")
        for i, method in enumerate(methods)
    ]  # fmt: skip
    header = {"methods": methods, "runs": 1, "cost_curves": {"auto": [0.001 * (n + 1) for n in range(9)]}}
    return stats.summarise(header, records), records


FEW = ["plain", "off", "auto"]
MANY = [*FEW, "suffix", "sam", "anpd", "rest", "stand", "auto~context"]


def labels(axis):
    return {text.get_text() for text in axis.get_ticklabels()}


@pytest.mark.parametrize("methods", [FEW, MANY])
def test_every_figure_is_made(methods):
    made = figures.all_figures(*results(methods))
    assert set(made) == {"speedup", "tokens_per_pass", "accepted_lengths", "cost", "time", "calibration"}
    assert all(data.startswith(b"\x89PNG") for data in made.values())
    assert made == figures.all_figures(*results(methods))  # and the same each time


@pytest.mark.parametrize("methods", [FEW, MANY])
def test_methods_are_named_at_their_bars(methods):
    panels = figures.speedup(*results(methods)).axes
    assert [axes.get_title() for axes in panels] == ["edit", "prose", "all"]
    assert labels(panels[0].yaxis) == set(methods) - {"plain"}
    assert all(axes.get_legend() is None for axes in panels)
    (lengths,) = figures.accepted_lengths(*results(methods)).axes
    assert labels(lengths.yaxis) == set(methods) - {"plain"}


def test_of_many_methods_only_auto_is_held_to_its_expectation():
    (axes,) = figures.calibration(*results(MANY)).axes
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"auto", "auto~context", "as expected"}


def test_the_highest_point_is_inside_the_figure():
    (axes,) = figures.tokens_per_pass(*results(FEW)).axes
    highest = max(y for line in axes.get_lines() for y in line.get_ydata())
    assert axes.get_ylim()[1] > highest
