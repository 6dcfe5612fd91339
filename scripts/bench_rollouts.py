"""Benchmark of many answers to the same prompts, in epochs with a rollout memory and without.

    python scripts/bench_rollouts.py [--prompts 8 1] [--samples 8] [--new-tokens 160] [--temperature 0.7 1] [--epochs 3]

The same prompts are answered in every epoch, with other seeds: by the original `generate`, with drafts that the samples
of a prompt share, and with a memory that keeps the answers too; without it each epoch is the first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
import torch
from bench_batches import padded, prompts, sampling

import retrieve_spec as rs
from retrieve_spec.reference_model import load_model


def epochs(rows: list[torch.Tensor], options: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """Seconds and tokens per pass of every epoch, in turn: plain, with siblings, and with a memory of those before."""
    many, one = padded([row for row in rows for _ in range(options.samples)]), padded(rows)
    words = sampling(temperature, options.new_tokens)
    models = {name: rs.accelerate(*load_model("reference"), rollouts=memory)
              for name, memory in (("siblings", None), ("memory", rs.RolloutMemory()))}  # fmt: skip
    found: dict[str, Any] = {
        "temperature": temperature,
        "prompts": len(rows),
        "plain": [],
        "siblings": [],
        "memory": [],
    }
    plain = models["siblings"]
    for model in models.values():
        model.generate(**padded(rows[:1]), **sampling(temperature, 8))
    for epoch in range(options.epochs):
        seconds = timed(lambda: type(plain).generate(plain, **many, **words), epoch)
        found["plain"].append({"seconds": seconds})
        for name, model in models.items():
            seconds = timed(
                lambda model=model: model.generate(**one, **words, num_return_sequences=options.samples), epoch
            )
            tokens = round(model.speculation.last.tokens_per_pass, 3)
            found[name].append({"seconds": seconds, "tokens_per_pass": tokens})
    median = statistics.median(epoch["seconds"] for epoch in found["plain"])
    for figures in (*found["siblings"], *found["memory"]):
        figures["ratio"] = round(median / figures["seconds"], 3)
    return found


def timed(call: Callable[[], Any], seed: int) -> float:
    """Seconds of a call."""
    torch.manual_seed(seed)
    began = time.perf_counter()
    call()
    return round(time.perf_counter() - began, 3)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Epochs of each number of prompts at every temperature."""
    _, tokenizer = load_model("reference")
    pairs = [(count, temperature) for temperature in options.temperature for count in options.prompts]
    given = {name: getattr(options, name) for name in ("prompts", "samples", "new_tokens")}
    return given | {"epochs": [epochs(prompts(tokenizer, count), options, t) for count, t in pairs]}


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, prompts=[8, 1], samples=8, new_tokens=160, temperature=[0.7, 1.0], epochs=3)


if __name__ == "__main__":
    main()
