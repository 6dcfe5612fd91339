"""Leaving a source out changes what that source adds and nothing else; cold means cold."""

from __future__ import annotations

import numpy as np
import pytest

from retrieve_spec.bench.methods import Bench, FreshDrafter, parse_method
from retrieve_spec.bench.replay import Replay, TraceRow
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.reference_model import load_model, reference_path

COPY = "".join(f"value_{i} = compute(value_{i - 1}, {i})\n" for i in range(1, 40))


def replay(drafter, tokenizer):
    prompt, text = (tokenizer(t)["input_ids"] for t in ("import this\n", COPY))
    row = TraceRow("", np.array(prompt, np.int32), [(np.array(text, np.int32), True)])
    run = Replay(drafter, 16)
    run.run([row])
    run.run([row])
    return run.result()


@pytest.fixture(scope="module")
def loaded():
    return load_model(device="cpu")


@pytest.fixture
def store(tmp_path):
    source = tmp_path / "text.py"
    source.write_text(COPY)
    build_datastore(tmp_path / "store", str(source), reference_path(), workers=1)
    return tmp_path / "store"


def test_a_source_that_is_left_out_gets_no_credit_and_is_missed(loaded, store):
    _, tokenizer = loaded
    opened = [open_datastore(store, tokenizer=tokenizer)]
    config = SpeculationConfig(session=True)
    whole = replay(FreshDrafter(config, opened).drafter, tokenizer)
    credited = [name for name in ("context", "session", "ngram", "exact") if whole["accepted_by_source"].get(name)]
    assert len(credited) >= 2
    for name in credited:
        less = replay(FreshDrafter(config, opened, [name]).drafter, tokenizer)
        assert name not in less["accepted_by_source"]
    without_context = FreshDrafter(config, opened, ["context"])
    replay(without_context.drafter, tokenizer)
    assert len(without_context.drafter.context) == 0
    no_text = ["session", "ngram", "exact", "context", "phrases", "alignment"]
    alone = replay(FreshDrafter(config, opened, no_text).drafter, tokenizer)
    assert alone["tokens_per_pass"] == 1.0


def test_cold_is_cold_also_beside_a_writable_store(loaded, store):
    model, tokenizer = loaded
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    method = parse_method("auto:16")  # a fixed budget: measured costs stay, and vary
    bench = Bench(model, tokenizer, [method], datastores=[open_datastore(store, tokenizer=tokenizer)])
    ids = tokenizer(COPY[:400], return_tensors="pt")["input_ids"]
    first = bench.generate(method, ids, max_new_tokens=24)
    bench.generate(method, ids, max_new_tokens=24)
    bench.forget(method)
    again = bench.generate(method, ids, max_new_tokens=24)
    assert [entry[:3] for entry in again.report.per_pass] == [entry[:3] for entry in first.report.per_pass]
    assert again.token_ids == first.token_ids
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before
