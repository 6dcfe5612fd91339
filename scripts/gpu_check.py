"""GPU check: the verifying pass on one GPU, without downloads; prints a table, and one JSON object last.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # runs from a checkout without being installed
MODULES = {"kernels": "gpu_kernels", "conformance": "gpu_conformance", "model": "gpu_models", "compiled": "gpu_models"}
SHARES = {"kernels": 70, "conformance": 120, "model 8b": 150, "compiled 8b": 70, "model 1b": 70, "compiled 1b": 40}
"""Shares of the time, by section; one that ends early leaves the rest to those behind it."""
ENOUGH = 15.0
"""Seconds below which a section is not begun."""
MARK = "@@ "
BARS = {"one_token_over_floor": 1.25, "wide_over_one_token": 1.3, "outside_ms": 0.3}


def run_section(name: str, limit: float, keep: Callable[[str, Any], None]) -> str:
    """Run a section in a process of its own, keep its figures as they come, and say what went wrong."""
    command = [sys.executable, __file__, *sys.argv[1:], "--section", name, "--seconds", str(0.9 * limit)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, start_new_session=True, **pipes)
    errors: list[str] = []

    def read(stream: Any) -> None:
        for line in stream:
            if line.startswith(MARK):
                keep(*json.loads(line[len(MARK) :]))
            else:
                print(line, end="", flush=True)

    readers = [
        threading.Thread(target=read, args=(child.stdout,), daemon=True),
        threading.Thread(target=lambda: errors.extend(child.stderr or ()), daemon=True),
    ]
    for reader in readers:
        reader.start()
    code: int | None = None
    try:
        code = child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):  # compilers' workers go with it: they hold its pipes
            os.killpg(child.pid, signal.SIGKILL)
        for reader in readers:
            reader.join(5)
    if code is None:
        return f"stopped after {limit:.0f} s: {last_lines(errors)}"
    return "" if code == 0 else f"exit {code}: {last_lines(errors)}"


def last_lines(errors: list[str]) -> str:
    """The end of what a process wrote to its error stream."""
    return " | ".join("".join(errors).strip().splitlines()[-4:])[-600:]


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


def facts() -> dict[str, Any]:
    """Where this runs; what cannot be found out is worth no figure."""
    try:
        from retrieve_spec.bench.machine import machine_facts

        return machine_facts()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def order(options: argparse.Namespace) -> list[str]:
    """Sections in order of importance."""
    models = [f"{kind} {size}" for size in options.sizes for kind in ("model", "compiled")]
    return options.only or ["kernels", "conformance", *models]


def summary(result: dict[str, Any]) -> list[str]:
    """Lines of the table, and `result["bars"]` filled in."""
    lines: list[str] = []
    bandwidth = result.get("kernels", {}).get("read_bytes_per_s")
    bars = result.setdefault("bars", {})
    for size in ("8b", "1b", "tiny"):
        figures = result.get(f"model {size}", {})
        weight_bytes = figures.get("weight_bytes")
        if not isinstance(bandwidth, (int, float)) or not isinstance(weight_bytes, (int, float)):
            continue
        floor = weight_bytes / bandwidth * 1e3
        lines.append(f"{size}: {weight_bytes / 1e9:.2f} GB of weights, floor {floor:.3f} ms")
        lines.append(f"{'L':>6} {'pass':>22} {'n':>4} {'ms':>9} {'floor/ms':>9}")
        curves = {key: value for key, value in figures.items() if key.startswith("curve ") and "error" not in value}
        for key, times in curves.items():
            _, context, kind = key.split(" ", 2)
            for nodes, ms in times.items():
                lines.append(f"{context:>6} {kind:>22} {nodes:>4} {ms:>9.3f} {floor / ms:>9.2f}")
        bars[size] = measured_bars(figures, curves, floor)
        for kind, answers in figures.items():
            if kind.startswith("decode ") and isinstance(answers, dict) and "tokens_per_s" in answers:
                lines.append(f"  trace-driven, {kind[7:]}: {answers}")
        compiled = result.get(f"compiled {size}", {})
        lines += [
            f"  trace-driven, {kind[7:]}: {value}" for kind, value in compiled.items() if kind.startswith("decode")
        ]
        lines.append(f"  bars: {bars[size]}")
    return lines


def measured_bars(figures: dict[str, Any], curves: dict[str, Any], floor: float) -> dict[str, Any]:
    """The stated bars next to what was measured, at the longest context, with the fastest kind of pass."""
    bars: dict[str, Any] = {}
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
    """Run the sections in order of importance and print what they found."""
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
    result: dict[str, Any] = {"device": options.device, "dry_run": options.dry_run, "machine": facts()}
    result |= {"problems": {}, "seconds": {}}

    def save() -> None:
        if options.out is not None:
            options.out.write_text(json.dumps(result), encoding="utf-8")

    names = order(options)
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
            print("\n".join(summary(result)))
        except Exception as error:  # the figures are worth more than their table
            result["problems"]["summary"] = f"{type(error).__name__}: {error}"
        save()
        print(json.dumps(result))


if __name__ == "__main__":
    main()
