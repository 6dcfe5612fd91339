"""Statistics of a results folder, on records whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from retrieve_spec.bench import machine, stats
from retrieve_spec.bench.machine import machine_facts
from retrieve_spec.bench.results import Record


def record(run, prompt, method, tokens, seconds, *, task="all", passes=10, looping=False, **more):
    ids = [list(range(tokens))]
    return Record(
        run, prompt, task, method, new_tokens=tokens, token_ids=ids, seconds=seconds, first_token_s=seconds / 10,
        passes=passes, looping=looping, **more,
    )  # fmt: skip


HEADER = {"methods": ["plain", "auto"], "runs": 2}


@pytest.fixture
def records():
    made = []
    for run, noise in ((1, 1.0), (2, 2.0)):  # the machine is half as fast in run 2: ratios within a run do not see it
        made += [record(run, "a", "plain", 100, 1.0 * noise), record(run, "a", "auto", 100, 0.5 * noise)]
        made += [record(run, "b", "plain", 100, 1.0 * noise), record(run, "b", "auto", 100, 0.25 * noise)]
        made += [record(run, "c", "plain", 100, 1.0 * noise), record(run, "c", "auto", 100, 2.0 * noise, looping=True)]
    return made


def test_interval_holds_the_median_and_is_the_same_each_time():
    values = np.random.default_rng(1).normal(2.0, 0.1, 60)
    found = stats.interval(values)
    assert found == stats.interval(values)
    assert found["low"] < found["value"] < found["high"]
    assert found["value"] == pytest.approx(np.median(values))
    assert found["high"] - found["low"] < 0.2
    assert stats.interval([]) == {"value": 0.0, "low": 0.0, "high": 0.0, "prompts": 0}


def test_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = [stats.interval(rng.normal(0, 1, 30)) for _ in range(120)]
    covered = np.mean([d["low"] <= 0 <= d["high"] for d in draws])
    assert 0.87 <= covered <= 1.0


def test_ratios_are_taken_within_a_run(records):
    assert stats.ratios(records, "auto", "plain") == {"a": 2.0, "b": 4.0, "c": 0.5}


def test_summary_of_known_figures(records):
    summary = stats.summarise(HEADER, records)
    auto = summary["methods"]["auto"]
    assert summary["baseline"] == "plain"
    assert auto["speedup"]["value"] == 2.0
    assert auto["not_looping"]["speedup"]["value"] == 3.0
    assert auto["speedup_pooled"] == pytest.approx(3 / 2.75)
    assert auto["tokens_per_pass"] == 10.0
    assert auto["identical"] == auto["answers"] == 6
    assert [(e["prompt"], e["ratio"], e["looping"]) for e in summary["losing"]] == [("c", 0.5, True)]


def test_one_slow_run_does_not_move_the_pooled_speed():
    made = [record(run, name, "plain", 100, 1.0) for run in (1, 2, 3) for name in "ab"]
    made += [
        record(run, name, "auto", 100, 9.0 if (run, name) == (2, "a") else 0.5) for run in (1, 2, 3) for name in "ab"
    ]
    assert stats.summarise({"methods": ["plain", "auto"], "runs": 3}, made)["methods"]["auto"]["speedup_pooled"] == 2.0


def test_answers_slower_than_the_loop_without_drafts_are_listed():
    made = [record(1, "a", "plain", 100, 3.0), record(1, "a", "off", 100, 1.0), record(1, "a", "auto", 100, 2.0)]
    made += [record(1, "b", "plain", 100, 3.0), record(1, "b", "off", 100, 1.0), record(1, "b", "auto", 100, 1.02)]
    summary = stats.summarise({"methods": ["plain", "off", "auto"], "runs": 1}, made)
    assert not summary["losing"]
    assert [(e["prompt"], e["ratio"]) for e in summary["slower_than_off"]] == [("a", 0.5)]
    assert summary["methods"]["auto"]["over_off"]["value"] == pytest.approx((0.5 + 1 / 1.02) / 2)


def test_time_per_token_is_whole(records):
    for figures in stats.summarise(HEADER, records)["methods"].values():
        assert sum(figures["split_ms_per_token"].values()) > 0
    assert sum(stats.split(records[:1]).values()) == pytest.approx(10.0)


def test_mt_bench_categories_are_one_task():
    made = [record(1, str(i), "plain", 10, 1.0, task=t) for i, t in enumerate(["writing", "math", "qa"])]
    by_task = stats.summarise({"methods": ["plain"], "runs": 1}, made)["methods"]["plain"]["by_task"]
    assert set(by_task) == {"mt_bench", "qa"}


def test_figures_of_a_busy_machine_say_so():
    facts = {**machine_facts(), "commit": "abc"}
    busy, quiet = {"load": 2.0 * facts["cores"]}, {"load": 0.1 * facts["cores"]}
    assert "busy" in machine.summary({**facts, **busy})
    assert "busy" not in machine.summary({**facts, **quiet})
    assert "busy" not in machine.summary({name: value for name, value in facts.items() if name != "load"})
    assert "busy (other processes took" in machine.summary({**facts, **quiet, "others": 0.5 * facts["cores"]})
    after_another = machine.summary({**facts, **busy, "others": 0.0})
    assert "at the start" in after_another
    assert "busy" not in after_another


def test_figures_of_changed_files_say_so():
    facts = machine_facts()
    assert "not committed" in machine.summary({**facts, "commit": "abc+"})
    assert "not committed" not in machine.summary({**facts, "commit": "abc"})


@pytest.mark.parametrize(
    ("readings", "cores"), [([(0.0, 10.0), (2.0, 11.0)], 0.5), ([(0.0, 10.0), (2.0, 9.9)], 0.0), ([None, None], None)]
)
def test_work_of_other_processes_is_counted_in_cores(monkeypatch, readings, cores):
    monkeypatch.setattr(machine, "_other_seconds", lambda: readings.pop(0))
    assert machine.OtherWork().cores() == cores
