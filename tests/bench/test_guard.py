"""Drafting is as good as the checked-in baseline says, and the guard notices when it is not."""

from __future__ import annotations

import copy
import json

import pytest
import regression_guard as guard


@pytest.fixture(scope="module")
def baseline():
    return json.loads(guard.BASELINE.read_text())


def test_replayed_answers_lose_nothing(baseline):
    now = guard.replayed()
    assert set(now) == set(_replays(baseline))
    failures = guard.compare({**baseline, **now}, baseline)
    assert not failures, f"{failures}; if it is meant: python scripts/regression_guard.py --accept"


def test_kernels_do_no_more_work(baseline):
    now = guard.operations()
    failures = guard.more_work(now[guard.OPERATIONS], baseline[guard.OPERATIONS])
    assert not failures, f"{failures}; if it is meant: python scripts/regression_guard.py --accept"
    assert all(now[guard.OPERATIONS].values())


def test_more_work_per_token_fails_and_as_much_does_not(baseline):
    before = baseline[guard.OPERATIONS]
    assert not guard.more_work({name: count * 2 for name, count in before.items()}, before)
    (failure,) = guard.more_work({**before, "levels read": round(before["levels read"] * 1.2)}, before)
    assert "levels read per token" in failure


@pytest.mark.slow
def test_answers_of_the_bundled_model_lose_nothing(baseline):
    now = guard.live()
    assert len(now) >= len(_live(baseline)) // 2, "too few answers are what they were"
    failures = guard.compare({**baseline, **now}, baseline)
    assert not failures, f"{failures}; if it is meant: python scripts/regression_guard.py --accept"


def test_a_loss_of_more_than_one_per_cent_fails_and_less_does_not(baseline):
    name = next(iter(_replays(baseline)))
    for passes, fails in ((1.005, False), (1.02, True)):
        worse = copy.deepcopy(baseline)
        worse[name]["passes"] = round(worse[name]["passes"] * passes)
        assert bool(guard.compare(worse, baseline)) is fails


def _live(counts):
    return {name: value for name, value in counts.items() if name.startswith("live")}


def _replays(counts):
    return {name: value for name, value in counts.items() if name.startswith("replay")}
