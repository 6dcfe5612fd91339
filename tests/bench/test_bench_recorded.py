"""Recorded answers are given by models of random weights token by token, whatever drafts them."""

import argparse
import json
import time

import bench_recorded as script
import pytest

from retrieve_spec.reference_model import reference_path


def options(tmp_path, rows, answers):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = str(reference_path() / "tokenizer.json")
    return argparse.Namespace(
        trace=trace, tokenizer=tokenizer, answers=answers, new_tokens=40, context=200, weights="float32"
    )


def row(task, i):
    return {"task": task, "prompt": f"def f{i}(a, b):", "output": f"\n    return a + b + {i}\n" * 12}


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_every_method_gives_the_recorded_answers(tmp_path, monkeypatch, weights):
    monkeypatch.setitem(script.SHAPES, "tiny", (64, 128, 2, 4, 2, 8192))
    given = options(tmp_path, [row("math", 1), row("qa", 2)], 2)
    given.weights = weights
    answers = script.chosen(given)
    made = script.give("tiny", answers, given, time.perf_counter)
    assert set(made["methods"]) == set(script.METHODS)
    for name, figures in made["methods"].items():
        assert figures["same"] == 2, name
    assert made["methods"]["off"]["tokens_per_pass"] == 1.0
    assert made["methods"]["auto"]["tokens_per_pass"] > 1.5  # the answers repeat themselves
    assert made["methods"]["plain"]["speedup_pooled"] == made["methods"]["plain"]["after_prompt_pooled"] == 1.0
