"""Drafting is as good as the checked-in baseline says, and the guard notices when it is not."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "regression_guard.py"


@pytest.fixture(scope="module")
def guard():
    spec = importlib.util.spec_from_file_location("regression_guard", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def baseline(guard):
    return json.loads(guard.BASELINE.read_text())


def test_replayed_answers_lose_nothing(guard, baseline):
    now = guard.replayed()
    replays = {name: counts for name, counts in baseline.items() if name.startswith("replay")}
    failures = guard.compare({**baseline, **now}, replays | _live(baseline))
    assert not failures, f"{failures}; if it is meant: python scripts/regression_guard.py --accept"


@pytest.mark.slow
def test_answers_of_the_bundled_model_lose_nothing(guard, baseline):
    now = guard.live()
    assert len(now) >= len(_live(baseline)) // 2, "too few answers are what they were"
    failures = guard.compare({**baseline, **now}, _live(baseline) | _replays(baseline))
    assert not failures, f"{failures}; if it is meant: python scripts/regression_guard.py --accept"


def test_a_loss_of_more_than_one_per_cent_fails_and_less_does_not(guard, baseline):
    name = next(iter(_replays(baseline)))
    for passes, fails in ((1.005, False), (1.02, True)):
        worse = copy.deepcopy(baseline)
        worse[name]["passes"] = round(worse[name]["passes"] * passes)
        assert bool(guard.compare(worse, baseline)) is fails


def test_a_workload_that_was_not_measured_fails(guard, baseline):
    name = next(iter(_replays(baseline)))
    assert guard.compare({k: v for k, v in baseline.items() if k != name}, baseline)


def test_answers_rounded_to_another_text_are_left_out_on_both_sides(guard, baseline):
    now = copy.deepcopy(baseline)
    now.pop(next(iter(_live(baseline))))
    assert not guard.compare(now, baseline)


def _live(counts):
    return {name: value for name, value in counts.items() if name.startswith("live")}


def _replays(counts):
    return {name: value for name, value in counts.items() if name.startswith("replay")}
