"""The GPU check runs from end to end on a CPU with tiny models, and a part that fails loses no other."""

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


@pytest.mark.slow
def test_a_dry_run_has_every_figure(tmp_path: Path) -> None:
    found = run(tmp_path / "out.json", "--model", str(SCRIPT.parents[1] / "retrieve_spec" / "reference"))
    assert not [name for name, value in found.items() if isinstance(value, dict) and "error" in value]
    assert all(found["family llama"][kind]["same"] for kind in ("alone", "batch"))
    assert found["chat accelerate"]["pass_kind"] == "recorded" and found["chat float32"]["same"]
    assert all(answer["same"] for answer in found["chat parted from plain"])
    assert found["tiny recorded answers"]["same"] and set(found["tiny pass at 64"]) == {"0", "3"}


def test_a_part_that_fails_is_named(tmp_path: Path) -> None:
    found = run(tmp_path / "out.json", "--only", "families", "--seconds", "1")
    assert "no time left" in found["family llama"]["error"]


def test_tokens_chosen_are_those_of_the_host(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = run(tmp_path / "out.json", "--only", "choice")
    rules = [found[f"choice {rows} x 3000"][name] for rows in (1, 3) for name in ("T", "top-k", "top-p", "min-p")]
    assert [told["same"] + told["left"] for told in rules] == [1] * 4 + [3] * 4
