"""The GPU check runs from end to end on a CPU with tiny models, and one failing section loses no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

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
        if name == "drafting kernels s":
            continue
        for kind in ("own forward", "static", "graphs", "batch", "batch graphs"):
            assert found[kind]["same"] or "bfloat16" in name
            assert found[kind]["same"] or "gap" in found[kind]
    figures = result["model tiny"]
    assert figures["recorded pass"]["why_not"] == "" and figures["graphs"] == "agree"
    assert set(figures["curve 64 static graphs"]) == {"0", "4", "64"}
    for name in ("decode generate", "decode prompt lookup", "decode ours (static)", "decode ours (static graphs)"):
        assert figures[name]["same"] and figures[name]["tokens_per_s"] > 0
    assert result["compiled tiny"]["decode static compiled cache"]["same"]
    assert {"one_token_over_floor", "wide_over_one_token", "outside_ms", "speedup"} <= set(result["bars"]["tiny"])


def test_a_section_that_fails_is_named(tmp_path: Path) -> None:
    """A section that cannot run leaves a line; the run ends well."""
    result = run(tmp_path / "out.json", "--only", "model nowhere", "--trace", "/nowhere")
    assert "KeyError" in result["problems"]["model nowhere"]


def test_no_section_begins_when_the_time_is_over(tmp_path: Path) -> None:
    result = run(tmp_path / "out.json", "--seconds", "12")
    assert set(result["problems"].values()) == {"no time left"}
    assert set(result["problems"]) == {"kernels", "conformance", "model tiny", "compiled tiny"}


def test_parts_behind_the_end_of_the_time_are_not_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure, an error in place of one, and nothing more when time is over: every part has a line."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    now = [0.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now[0])
    attempt = gpu_check.attempts(10.0)
    attempt("one", lambda: 1)
    attempt("two", lambda: 1 // 0)
    now[0] = 11.0
    attempt("three", lambda: pytest.fail("begun"))
    lines = [json.loads(line[len(gpu_check.MARK) :]) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == ["one", "two", "three"]
    assert lines[0][1] == 1
    assert "ZeroDivisionError" in lines[1][1]["error"] and "no time left" in lines[2][1]["error"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the section's process in /proc")
def test_an_interruption_stops_the_section_and_prints_what_there_is(tmp_path: Path) -> None:
    """The section's process, which has a session of its own, goes with it."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--only", "conformance", "--out", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    try:
        section = None
        for _ in range(1200):
            below = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text(encoding="utf-8").split()
            section = next((pid for pid in below if is_section(pid)), None)
            if section is not None:
                break
            time.sleep(0.1)
        assert section is not None
        child.terminate()
        printed, _ = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 130
    result = json.loads(printed.splitlines()[-1])
    assert result["problems"] == {"conformance": "interrupted"}
    assert json.loads(out.read_text(encoding="utf-8")) == result
    wait_for(lambda: not is_section(section))  # killed, but perhaps not gone yet
    assert not is_section(section)


def is_section(pid: str) -> bool:
    """Whether a process runs a section of the script."""
    try:
        return b"--section" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_section_that_hangs_is_stopped_with_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it found before is kept; a worker that holds its pipes does not hold up the sections behind it."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    worker = "import time; time.sleep(60)"
    script = f"import subprocess, sys, time; print({gpu_check.MARK!r} + '[1, 2]', flush=True)\n"
    script += f"subprocess.Popen([sys.executable, '-c', {worker!r}]); time.sleep(60)"
    started = gpu_check.subprocess.Popen
    monkeypatch.setattr(
        gpu_check.subprocess, "Popen", lambda command, **rest: started([sys.executable, "-c", script], **rest)
    )
    kept: list[Any] = []
    assert gpu_check.run_section("kernels", 6.0, lambda *figure: kept.append(figure)).startswith("stopped after 6 s")
    assert kept == [(1, 2)]
