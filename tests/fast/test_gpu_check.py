"""The GPU check runs from end to end on a CPU with tiny models, and one failing section loses no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


def run(out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(out), *options]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(out.read_text(encoding="utf-8")) == result
    return result


def errors(figures: Any) -> list[Any]:
    if not isinstance(figures, dict):
        return []
    own = [figures["error"]] if isinstance(figures.get("error"), str) else []
    return own + [error for value in figures.values() for error in errors(value)]


@pytest.mark.slow
def test_a_dry_run_has_every_figure(tmp_path: Path) -> None:
    result = run(tmp_path / "out.json")
    assert result["problems"] == {}
    assert errors(result) == []
    assert result["kernels"]["device acceptance"]["different"] == 0
    for name, found in result["conformance"].items():
        for kind in ("own forward", "static", "graphs"):
            assert found[kind]["same"] or "bfloat16" in name
            assert found[kind]["same"] or "gap" in found[kind]
    figures = result["model tiny"]
    assert figures["static pass"]["why_not"] == "" and figures["graphs"] == "agree"
    assert set(figures["curve 64 static graphs"]) == {"0", "4", "64"}
    for name in ("decode generate", "decode prompt lookup", "decode ours (static)", "decode ours (static graphs)"):
        assert figures[name]["same"] and figures[name]["tokens_per_s"] > 0
    assert result["compiled tiny"]["decode static compiled cache"]["same"]
    assert {"one_token_over_floor", "wide_over_one_token", "outside_ms", "speedup"} <= set(result["bars"]["tiny"])


def test_a_section_that_fails_is_named(tmp_path: Path) -> None:
    """A section that cannot run leaves a line; the run ends well."""
    result = run(tmp_path / "out.json", "--only", "model nowhere", "--trace", "/nowhere")
    assert "KeyError" in result["problems"]["model nowhere"]
