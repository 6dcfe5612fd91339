"""Drafting is as good as the checked-in baseline says, and the guard notices when it is not."""

import copy
import json

import pytest
import regression_guard as guard


@pytest.fixture(scope="module")
def baseline():
    return json.loads(guard.BASELINE.read_text())


def test_replayed_answers_lose_nothing(baseline):
    now = guard.replayed()
    assert set(now) == {name for name in baseline if name.startswith("replay")}
    failures = guard.compare({**baseline, **now}, baseline)
    assert not failures, f"{failures}; if it is meant: python scripts/regression_guard.py"


@pytest.mark.slow
def test_answers_of_the_bundled_model_lose_nothing(baseline, reference_model, reference_tokenizer, monkeypatch):
    monkeypatch.setattr(guard, "load_model", lambda **_: (reference_model, reference_tokenizer))
    now = guard.live()
    assert len(now) >= sum(name.startswith("live") for name in baseline) // 2, "too few answers are what they were"
    failures = guard.compare({**baseline, **now}, baseline)
    assert not failures, f"{failures}; if it is meant: python scripts/regression_guard.py"


def test_a_loss_of_more_than_one_per_cent_fails_and_less_does_not(baseline):
    name = next(name for name in baseline if name.startswith("replay"))
    for passes, fails in ((1.005, False), (1.02, True)):
        worse = copy.deepcopy(baseline)
        worse[name]["passes"] = round(worse[name]["passes"] * passes)
        assert bool(guard.compare(worse, baseline)) is fails
