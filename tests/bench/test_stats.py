"""Statistics of a results folder, on records whose figures are known."""

from __future__ import annotations

import pytest

from retrieve_spec.bench import machine
from retrieve_spec.bench import report as stats
from retrieve_spec.bench.machine import machine_facts
from retrieve_spec.bench.report import Record


def record(run, prompt, method, tokens, seconds, *, task="writing", passes=10, looping=False, **more):
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


def test_summary_of_known_figures(records):
    summary = stats.summarise(HEADER, records)
    auto = summary["methods"]["auto"]
    assert stats.ratios(records, "auto", "plain") == {"a": 2.0, "b": 4.0, "c": 0.5}
    assert sum(summary["methods"]["plain"]["split_ms_per_token"].values()) == pytest.approx(15.0)
    assert summary["baseline"] == "plain"
    assert auto["speedup"]["value"] == 2.0
    assert auto["not_looping"]["speedup"]["value"] == 3.0
    assert auto["speedup_pooled"] == pytest.approx(3 / 2.75)
    assert auto["tokens_per_pass"] == 10.0
    assert auto["identical"] == auto["answers"] == 6
    assert [(e["prompt"], e["ratio"], e["looping"]) for e in summary["losing"]] == [("c", 0.5, True)]
    assert list(auto["by_task"]) == ["mt_bench"]


def test_answers_slower_than_the_loop_without_drafts_are_listed():
    made = [record(1, "a", "plain", 100, 3.0), record(1, "a", "off", 100, 1.0), record(1, "a", "auto", 100, 2.0)]
    made += [record(1, "b", "plain", 100, 3.0), record(1, "b", "off", 100, 1.0), record(1, "b", "auto", 100, 1.02)]
    summary = stats.summarise({"methods": ["plain", "off", "auto"], "runs": 1}, made)
    assert not summary["losing"]
    assert [(e["prompt"], e["ratio"]) for e in summary["slower_than_off"]] == [("a", 0.5)]
    assert summary["methods"]["auto"]["over_off"]["value"] == pytest.approx((0.5 + 1 / 1.02) / 2)


def test_figures_of_a_busy_machine_and_of_changed_files_say_so():
    facts = {**machine_facts(), "commit": "abc", "load": 0.0}
    quiet = machine.summary({**facts, "load": 2.0 * facts["cores"], "others": 0.0})
    assert "busy" not in quiet and "not committed" not in quiet
    assert "busy" in machine.summary({**facts, "load": 2.0 * facts["cores"]})
    assert "busy (other processes took" in machine.summary({**facts, "others": 0.5 * facts["cores"]})
    assert "not committed" in machine.summary({**facts, "commit": "abc+"})
