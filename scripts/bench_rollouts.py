"""Benchmark of many answers to the same prompts: rows that end one after the other, and epochs with a memory.

    python scripts/bench_rollouts.py [--prompts 8 1] [--samples 8] [--new-tokens 160] [--temperature 0.7 1] [--epochs 3]

Stragglers: every sample has a length of its own, most short and some long, so that the batch gets small; noted is when
each row ended, for the original `generate` and for drafts that siblings share. Epochs: the same prompts again, with
other seeds, and a rollout memory that keeps the answers; without it each epoch is the first. They are made for each of
the numbers of prompts, stragglers for the first. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import harness
import torch
from bench_batches import PAD, padded, prompts, sampling
from transformers import StoppingCriteria, StoppingCriteriaList

import retrieve_spec as rs
from retrieve_spec.reference_model import load_model

TAIL = 0.9
"""Share of the rows that have ended where the tail begins."""


def lengths(rows: int, most: int) -> list[int]:
    """New tokens of each row: half of them end within a third of the longest."""
    rng = random.Random(0)
    return [max(4, min(most, round(most * rng.paretovariate(1.5) / 5))) for _ in range(rows - 1)] + [most]


class RowsEnd(StoppingCriteria):
    """Ends every row at its own length, and notes when."""

    def __init__(self, prompt: int, ends: list[int]) -> None:
        self.prompt, self.ends = prompt, torch.tensor(ends)
        self.began, self.at = time.perf_counter(), [0.0] * len(ends)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """(rows,) bool."""
        done = self.ends <= input_ids.shape[1] - self.prompt
        now = time.perf_counter() - self.began
        self.at = [at or (now if over else 0.0) for at, over in zip(self.at, done.tolist(), strict=True)]
        return done


def stragglers(model: Any, rows: list[torch.Tensor], options: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """When rows end: `generate` of a batch, and requests of one call."""
    many = [row for row in rows for _ in range(options.samples)]
    ends = lengths(len(many), options.new_tokens)
    given = padded(many)
    torch.manual_seed(0)
    criterion = RowsEnd(given["input_ids"].shape[1], ends)
    words = sampling(temperature, options.new_tokens)
    type(model).generate(model, **given, **words, stopping_criteria=StoppingCriteriaList([criterion]))
    requests = [
        {"inputs": row.tolist(), "max_new_tokens": end, "min_new_tokens": end, "seed": i}
        for i, (row, end) in enumerate(zip(many, ends, strict=True))
    ]
    shared = {"do_sample": True, "temperature": temperature, "top_k": 0, "pad_token_id": PAD}
    began, at = time.perf_counter(), []
    for _ in rs.generate_many(model, requests, order="completed", **shared):
        at.append(time.perf_counter() - began)
    return {"temperature": temperature, "rows": len(many), "plain": _ended(criterion.at), "drafts": _ended(at)}


def _ended(at: list[float]) -> dict[str, Any]:
    """When all rows had ended, what the last of them took alone, and each row's end."""
    ranked = sorted(at)
    tail = ranked[-1] - ranked[int(TAIL * len(ranked)) - 1]
    return {
        "seconds": round(ranked[-1], 3),
        "tail_s": round(tail, 3),
        "ended_s": [round(second, 3) for second in ranked],
    }


def epochs(rows: list[torch.Tensor], options: argparse.Namespace, t: float) -> dict[str, Any]:
    """Seconds and tokens per pass of every epoch, in turn: plain, with siblings, and with a memory of those before."""
    many = padded([row for row in rows for _ in range(options.samples)])
    one = padded(rows)
    words = sampling(t, options.new_tokens)
    models = {"siblings": _accelerated(None), "memory": _accelerated(rs.RolloutMemory())}
    found: dict[str, Any] = {"temperature": t, "prompts": len(rows), "plain": [], "siblings": [], "memory": []}
    for model in models.values():
        model.generate(**padded(rows[:1]), **sampling(t, 8))
    for epoch in range(options.epochs):
        torch.manual_seed(epoch)
        began = time.perf_counter()
        type(model).generate(model, **many, **words)
        found["plain"].append({"seconds": round(time.perf_counter() - began, 3)})
        for name, model in models.items():
            torch.manual_seed(epoch)
            began = time.perf_counter()
            model.generate(**one, **words, num_return_sequences=options.samples)
            seconds = round(time.perf_counter() - began, 3)
            per_pass = round(model.speculation.last.tokens_per_pass, 3)
            found[name].append({"seconds": seconds, "tokens_per_pass": per_pass})
    plain = statistics.median(epoch["seconds"] for epoch in found["plain"])
    for name in models:
        for figures in found[name]:
            figures["ratio"] = round(plain / figures["seconds"], 3)
    return found


def _accelerated(memory: rs.RolloutMemory | None) -> Any:
    return rs.accelerate(*load_model("reference"), rollouts=memory)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Stragglers and epochs at every temperature."""
    model, tokenizer = load_model("reference")
    rows = prompts(tokenizer, options.prompts[0])
    results: dict[str, Any] = {"stragglers": [], "epochs": []}
    for temperature in options.temperature:
        rs.accelerate(model, tokenizer)
        model.generate(**padded(rows[:2]), **sampling(temperature, 16))
        results["stragglers"].append(stragglers(model, rows, options, temperature))
        results["epochs"] += [epochs(prompts(tokenizer, count), options, temperature) for count in options.prompts]
    return results | {name: getattr(options, name) for name in ("prompts", "samples", "new_tokens")}


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, prompts=[8, 1], samples=8, new_tokens=160, temperature=[0.7, 1.0], epochs=3)


if __name__ == "__main__":
    main()
