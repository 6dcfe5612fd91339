"""GPU check: the verifying pass on one GPU, without downloads; prints figures as they come, and one JSON object last.

    python scripts/gpu_check.py [--sizes 8b 1b] [--context 512 4096] [--trace FILE] [--out FILE] [--seconds 460]

Every section runs in a process of its own with its share of the time, so that a crash, a hang or a poisoned CUDA
context costs that section's remaining figures and nothing else; figures are kept as they come. A section begins nothing
when its share is over, and what it leaves goes to those behind it. When it is interrupted, it prints what it has.

kernels
    Read bandwidth; every attention backend against plain torch, and its time; the tokens chosen on the device against
    the host's; a recorded pass with and without CUDA graphs against the model.
conformance
    Tiny random models in float32 and bfloat16, drafted against plain `generate`, alone and in a batch; every difference
    is listed with the gap between the two most probable tokens.
model SIZE
    T(n, L) of a random-weight Llama-shaped model in bfloat16: a plain one-token pass, the recorded pass without and
    with CUDA graphs, next to the floor (weight bytes / measured read bandwidth). Then plain `generate`, prompt lookup
    and ours over recorded answers. The target is *trace-driven*: random weights do all the work of a real pass, then
    the recorded token is made the most probable one.
compiled SIZE
    `generate` with a static compiled cache over the same answers.

`--trace` takes JSON lines with `prompt` and `output`, as token ids or as text; by default the library's own source is
the text. `--dry-run` runs all of it with tiny models on a CPU; its figures then mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness  # noqa: F401 (this checkout ahead of an installed package)

from retrieve_spec.bench.machine import machine_facts

MODULES = {"kernels": "gpu_kernels", "conformance": "gpu_conformance", "model": "gpu_models", "compiled": "gpu_models"}
SHARES = {"kernels": 70, "conformance": 120, "model 8b": 150, "compiled 8b": 70, "model 1b": 70, "compiled 1b": 40}
"""Shares of the time, by section; one that ends early leaves the rest to those behind it."""
ENOUGH = 15.0
"""Seconds below which a section is not begun."""
MARK = "@@figure@@ "
BARS = {"one_token_over_floor": 1.25, "wide_over_one_token": 1.3, "outside_ms": 0.3}


def run_section(name: str, limit: float, keep: Callable[[str, Any], None]) -> str:
    """Run a section in a process of its own, keep its figures as they come, and say what went wrong."""
    command = [sys.executable, __file__, *sys.argv[1:], "--section", name, "--seconds", str(0.9 * limit)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, start_new_session=True, **pipes)
    said = deque[str](maxlen=4)

    def read() -> None:
        for line in child.stdout:
            said_before, mark, figure = line.partition(MARK)  # a progress bar leaves its line open
            if mark:
                keep(*json.loads(figure))
            elif said_before.strip():
                said.append(said_before.strip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code: int | None = None
    try:
        code = child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):  # compilers' workers go with it: they hold its pipe
            os.killpg(child.pid, signal.SIGKILL)
        reader.join(5)
    if code == 0:
        return ""
    return (f"stopped after {limit:.0f} s: " if code is None else f"exit {code}: ") + " | ".join(said)[-600:]


def emit(name: str, value: Any) -> None:
    """Hand a figure to the parent."""
    print(MARK + json.dumps([name, value]), flush=True)


def attempts(seconds: float) -> Callable[[str, Callable[[], Any]], Any]:
    """What runs a section's parts: each gives a figure, or the error in its place, until the time is over."""
    end = time.monotonic() + seconds

    def attempt(name: str, run: Callable[[], Any]) -> Any:
        try:
            if time.monotonic() > end:
                raise TimeoutError("no time left")
            value = run()
        except Exception as error:
            traceback.print_exc()
            value = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        emit(name, value)
        return value

    return attempt


def section(name: str, options: argparse.Namespace) -> None:
    """What the child process does."""
    attempt = attempts(options.seconds)
    import torch
    from gpu_setting import Setting

    setting = Setting(options)
    kind, _, size = name.partition(" ")
    run = getattr(importlib.import_module(MODULES[kind]), kind)
    with torch.no_grad():
        run(setting, attempt, *([size] if size else []))


def all_bars(result: dict[str, Any]) -> dict[str, Any]:
    """The stated bars by size of model, next to what was measured."""
    bandwidth = result.get("kernels", {}).get("read_bytes_per_s")
    bars = {}
    for name, figures in result.items():
        weight_bytes = figures.get("weight_bytes") if name.startswith("model ") else None
        if isinstance(bandwidth, float) and isinstance(weight_bytes, int):
            curves = {key: value for key, value in figures.items() if key.startswith("curve ") and "error" not in value}
            bars[name.removeprefix("model ")] = measured_bars(figures, curves, weight_bytes / bandwidth * 1e3)
    return bars


def measured_bars(figures: dict[str, Any], curves: dict[str, Any], floor: float) -> dict[str, Any]:
    """Those of one size at the longest context, with the fastest kind of pass; `floor` is the time to read weights."""
    bars: dict[str, Any] = {"floor_ms": round(floor, 3)}
    kinds = [key for key in curves if "static" in key]
    if kinds:
        longest = max(int(key.split()[1]) for key in kinds)
        best = min((key for key in kinds if int(key.split()[1]) == longest), key=lambda key: curves[key].get("0", 1e9))
        times = curves[best]
        bars["pass"] = best
        if "0" in times:
            bars["one_token_over_floor"] = round(times["0"] / floor, 3)
            if "64" in times:
                bars["wide_over_one_token"] = round(times["64"] / times["0"], 3)
    plain = figures.get("decode generate", {})
    for kind, ours in figures.items():
        if not kind.startswith("decode ours") or "tokens_per_s" not in ours:
            continue
        bars.setdefault("outside_ms", {})[kind[7:]] = ours["outside_ms"]
        if "tokens_per_s" in plain and kinds and "0" in curves[bars["pass"]]:
            step = curves[bars["pass"]]["0"] + ours["outside_ms"]
            asked = ours["tokens_per_pass"] * 0.85 * (1e3 / plain["tokens_per_s"]) / step
            bars.setdefault("speedup", {})[kind[7:]] = {
                "measured": round(ours["tokens_per_s"] / plain["tokens_per_s"], 2),
                "asked": round(asked, 2),
            }
    return {**bars, "at_most": BARS}


def main() -> None:
    """Run the sections in order of importance, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="+", default=["8b", "1b"], choices=["8b", "1b", "tiny"])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--nodes", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16, 32, 64, 128, 255])
    parser.add_argument("--trace", help="JSON lines of recorded answers")
    parser.add_argument("--out", type=Path, help="also write the JSON object here, after every figure")
    parser.add_argument("--seconds", type=float, help="time for everything; 460 on a GPU")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--only", nargs="+", help="sections to run")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run:
        options.device, options.sizes, options.context, options.nodes = "cpu", ["tiny"], [64], [0, 4, 64]
    options.seconds = options.seconds or (3600.0 if options.dry_run else 460.0)
    if options.section:
        section(options.section, options)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # sections are stopped and figures printed then, too
    began = time.monotonic()
    result: dict[str, Any] = {"device": options.device, "dry_run": options.dry_run, "machine": machine_facts()}
    result |= {"problems": {}, "seconds": {}}

    def save() -> None:
        if options.out is not None:
            options.out.write_text(json.dumps(result), encoding="utf-8")

    models = [f"{kind} {size}" for size in options.sizes for kind in ("model", "compiled")]
    names = options.only or ["kernels", "conformance", *models]
    try:
        for i, name in enumerate(names):
            left = options.seconds - (time.monotonic() - began)
            shares = [SHARES.get(other, 60) for other in names[i:]]
            limit = left * shares[0] / sum(shares)
            if limit < ENOUGH:
                result["problems"][name] = "no time left"
                continue
            figures = result[name] = {}

            def keep(key: str, value: Any, name: str = name, figures: dict[str, Any] = figures) -> None:
                figures[key] = value
                print(f"[{name}] {key}: {value}", flush=True)
                save()

            started = time.monotonic()
            if problem := run_section(name, limit, keep):
                result["problems"][name] = problem
                print(f"[{name}] {problem}", flush=True)
            result["seconds"][name] = round(time.monotonic() - started, 1)
    except KeyboardInterrupt:
        result["problems"][name] = "interrupted"
        sys.exit(130)
    finally:
        try:
            result["bars"] = all_bars(result)
        except Exception as error:  # the figures are worth more
            result["problems"]["bars"] = f"{type(error).__name__}: {error}"
        save()
        print(json.dumps(result))


if __name__ == "__main__":
    main()
