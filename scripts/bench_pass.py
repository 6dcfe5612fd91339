"""Benchmark of a verifying pass over n drafted nodes beside a one-token pass of plain `generate`.

    python scripts/bench_pass.py [--model reference] [--dtype float32] [--context 256 1024] [--nodes 0 1 2 4 8 16 32 64]

    python scripts/bench_pass.py --memory 8192 32768 100000

All kinds of passes take turns within each repeat, so that a busy machine slows all of them alike; figures are medians
in milliseconds and ratios to the plain pass of the same repeat. With `--memory`, processes of their own continue a
cache of so many tokens in a model of random weights, with plain `generate` and with drafts of 64 nodes; figures are the
most memory each held beyond what it held before there was a cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from gpu_setting import draft, plain_pass, prompt_of, started, tree_pass
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import retrieve_spec as rs
from retrieve_spec.bench import machine
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.recorded.recording import try_recording
from retrieve_spec.reference_model import load_model
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import input_device, read_interface
from retrieve_spec.verify.probe import probe
from retrieve_spec.verify.verifier import Verifier


def passes(
    model: Any,
    make: Callable[[], Verifier],
    ordinary: Callable[[], Verifier],
    context: int,
    widths: list[int],
    repeats: int,
) -> dict[str, list[float]]:
    """Milliseconds by kind of pass: "plain", "static n" and "ordinary n"."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    prompt, room = prompt_of(context, input_device(model), min(vocab, 8000)), repeats + 5
    kinds: dict[str, Callable[[], torch.Tensor]] = {"plain": plain_pass(model, prompt)}
    for width in widths:  # every kind has a cache of its own, which grows by one row per pass as in decoding
        kinds[f"static {width}"] = tree_pass(started(make(), model, prompt, room), draft(width))
        kinds[f"ordinary {width}"] = tree_pass(started(ordinary(), model, prompt, room), draft(width))
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(repeats + 4):
        for name, run in kinds.items():
            began = time.perf_counter()
            float(run()[0, 0])  # waits for the device
            if repeat >= 4:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def memory(kind: str, context: int) -> int:
    """Most bytes that a few tokens behind a cache of `context` tokens took, cache included."""
    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=context + 1000, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    if kind == "ours":
        rs.accelerate(model, recorded_pass="always")
        options |= {"prediction": torch.randint(1, 2000, (400,)), "nodes": 64}

    def run(length: int) -> None:
        ids, cache = torch.randint(1, 2000, (1, length + 1)), DynamicCache(config=config)
        for layer in range(8):
            cache.update(*(torch.randn(1, 4, length, 64) for _ in range(2)), layer)
        machine.reset_peak_memory()
        model.generate(ids, past_key_values=cache, **options)

    run(700)  # what is loaded and compiled once is in the way of no text
    gc.collect()
    before = machine.resident_bytes()
    run(context)
    if kind == "ours" and model.speculation.last.pass_kind != "recorded":
        raise SystemExit(f"no recorded pass: {model.speculation.last.pass_reason}")
    return machine.peak_memory_bytes()["resident"] - before


def compare_memory(context: int) -> dict[str, Any]:
    """Peaks of plain `generate` and ours, each in a fresh process."""
    peaks = {}
    for kind in ("plain", "ours"):
        words = [sys.executable, __file__, "--memory", str(context), "--memory-of", kind]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks[kind] = json.loads(done.stdout.splitlines()[-1])["bytes"]
    return {"context": context, **peaks, "ratio": round(peaks["ours"] / peaks["plain"], 3)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Passes of all kinds and widths, or peaks of memory."""
    if options.memory_of:
        return {"bytes": memory(options.memory_of, options.memory[0])}
    if options.memory != [0]:
        return {"memory": [compare_memory(context) for context in options.memory]}
    model, _ = load_model(options.model, dtype=options.dtype)
    finding = probe(model, read_interface(model))
    began = time.perf_counter()
    make, why = try_recording(model, finding, SpeculationConfig(recorded_pass="always"))
    recording_s = time.perf_counter() - began
    if make is None:
        raise SystemExit(f"no recorded pass: {why}")
    results = []
    with torch.no_grad():
        for context in options.context:
            kinds = (make, lambda: HFVerifier(model, finding.interface))
            times = passes(model, *kinds, context, options.nodes, options.repeats)
            for name, values in times.items():
                ratio = statistics.median(a / b for a, b in zip(values, times["plain"], strict=True))
                ms = statistics.median(values)
                results.append({"context": context, "pass": name, "ms": round(ms, 3), "ratio": round(ratio, 3)})
    given = {name: getattr(options, name) for name in ("model", "dtype", "repeats")}
    return {**given, "recording_s": round(recording_s, 2), "passes": results}


def main() -> None:
    """Measure and print."""
    widths = {"context": [256, 1024], "nodes": [0, 1, 2, 4, 8, 16, 32, 64]}
    more = {"repeats": 60, "memory": [0], "memory_of": ""}
    harness.run(measure, __doc__, model="reference", dtype="float32", **widths, **more)


if __name__ == "__main__":
    main()
