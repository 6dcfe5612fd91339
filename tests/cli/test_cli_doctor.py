"""The doctor measures a real model, and says what would be faster."""

from __future__ import annotations

import json

from retrieve_spec import cli
from retrieve_spec.cli_doctor import advice

GOOD = {
    "machine": {"load": 0.1, "cores": 8},
    "missing_extras": [],
    "kernels": {"folder": "/kept", "kept": True},
    "model": {"device": "cpu", "dtype": "float32", "mode": "tree", "reason": "", "pass_kind": "recorded"},
}


def test_a_model_is_measured_with_and_without_drafts(capsys):
    assert cli.run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    model = facts["model"]
    assert model["mode"] == "tree" and model["pass_kind"] == "recorded" and model["pass_reason"] == ""
    assert model["speedup"] > 0 and model["identical"] is True
    assert set(model["texts"]) == {"unseen", "seen", "edit", "structured", "prose"}, "it says of which texts"
    assert facts["kernels"]["kept"] and facts["machine"]["packages"]["torch"]


def test_a_machine_is_described_without_a_model(capsys):
    assert cli.run(["doctor", "--model", "none"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"machine", "packages", "kernels"} <= words and "model" not in words


def test_advice_follows_from_what_was_found():
    assert [sentence for sentence in advice(GOOD) if "build STORE" not in sentence] == []
    bad = {
        "machine": {"load": 9.0, "cores": 2, "gpu": "a GPU"},
        "missing_extras": ["serve"],
        "kernels": {"folder": "/read-only", "kept": False},
        "model": {"device": "cpu", "dtype": "bfloat16", "mode": "chain", "reason": "it says so", "pass_kind": "own"},
        "product_us": {"float32": 100, "bfloat16": 500, "int8": 50, "int4": 400},
    }
    said = " ".join(advice(bad))
    for words in (
        "500 µs in bfloat16 here (int8 50)",
        "slower than those of float32",
        "NUMBA_CACHE_DIR",
        "load 9.0",
        "[serve]",
        "--device cuda",
        "bfloat16",
        "chain mode: it says so",
    ):
        assert words in said, words
    own = GOOD | {"model": GOOD["model"] | {"pass_kind": "model's own", "pass_reason": "it is small"}}
    assert "it is small" in " ".join(advice(own))
