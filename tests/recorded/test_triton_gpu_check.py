"""The GPU check runs from end to end on a CPU with tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from triton_process import Interpret

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


@pytest.mark.slow
def test_a_dry_run_has_every_figure(interpret: Interpret, tmp_path: Path) -> None:
    out, model = tmp_path / "out.json", SCRIPT.parents[1] / "retrieve_spec" / "reference"
    command = [str(SCRIPT), "--dry-run", "--out", str(out), "--model", str(model)]
    printed = interpret(f"import runpy, sys; sys.argv = {command}; runpy.run_path(sys.argv[0], run_name='__main__')")
    found = json.loads(printed.splitlines()[-1])
    assert json.loads(out.read_text(encoding="utf-8")) == found
    assert not [name for name, value in found.items() if isinstance(value, dict) and "error" in value]
    assert all(found["family llama"][kind]["same"] for kind in ("alone", "batch"))
    assert found["chat accelerate"]["pass_kind"] == "recorded" and found["chat float32"]["same"]
    assert all(answer["same"] for answer in found["chat parted from plain"])
    assert found["tiny recorded answers"]["same"] and set(found["tiny pass at 64"]) == {"0", "3"}
    for weights in ("int4", "int8", "fp8", "nf4"):
        assert max(found[f"products of {weights}"][rows]["off"] for rows in ("1", "17")) < 2e-3
        assert found[f"chat in {weights}"]["accelerate"]["pass_kind"] == "recorded"
    assert found["tiny int4 recorded answers"]["same"] and set(found["tiny int4 pass at 64"]) == {"0", "3"}
    choices = [found[f"choice {rows} x 3000"][rule] for rows in (1, 3) for rule in ("T", "top-k", "top-p", "min-p")]
    assert [told["same"] + told["left"] for told in choices] == [1] * 4 + [3] * 4
