"""Benchmark of batches, and of requests that arrive at random, beside the original `generate`.

    python scripts/bench_batches.py [--rows 1 2 4 8 16 32 64] [--temperature 0 1] [--new-tokens 120] [--runs 4]
    python scripts/bench_batches.py --arrivals 32 --within 60

Batches: prompts of four kinds of text in turn, padded on the left, as one call. The original `generate`, drafting off
and drafts follow one another in every run, over prompts that no run had before (rows are fewer where these run out),
one run untimed; the ratios are the medians of the runs', by the clock, with those of processor time beside them.
Arrivals: every request is one call of `generate` from a thread of its own, made when the request arrives; against the
original `generate` one after another, and over batches of all who wait.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import harness
import numpy as np
import torch

import retrieve_spec as rs
from retrieve_spec.bench.workloads import builtin
from retrieve_spec.reference_model import load_model

TASKS = ("unseen", "edit", "structured", "prose")
CONTEXT = 256
"""Tokens of a prompt at most: its last ones."""
PAD = 0
"""Stands in masked places only."""


def prompts(tokenizer: Any, count: int) -> list[torch.Tensor]:
    """(length,) token ids of so many prompts, a kind of text after the other."""
    texts = [prompt.turns[0] for prompt in builtin(-(-count // len(TASKS)), TASKS)]
    by_kind = [texts[i :: len(texts) // len(TASKS)] for i in range(len(texts) // len(TASKS))]
    in_turn = [text for kind in by_kind for text in kind][:count]
    return [tokenizer(text, return_tensors="pt").input_ids[0, -CONTEXT:] for text in in_turn]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One batch of prompts, padded on the left."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def sampling(temperature: float, new_tokens: int) -> dict[str, Any]:
    """Options of `generate`; every text gets as many tokens, whatever it says."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": PAD}
    return options | (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )


def batch(model: Any, prompts_: list[torch.Tensor], temperature: float, options: argparse.Namespace) -> dict[str, Any]:
    """One batch by all methods, in every run of other prompts: what is remembered of the last run is no answer."""
    rows = len(prompts_) // (options.runs + 1)
    ratios: dict[str, list[tuple[float, float]]] = {"off": [], "auto": []}
    seconds, identical, last = [], True, {}
    for run in range(options.runs + 1):
        given = padded(prompts_[run * rows : (run + 1) * rows]) | sampling(temperature, options.new_tokens)
        plain, said = timed(lambda given=given: type(model).generate(model, **given), run)
        for name, extra in (("off", {"draft": "off"}), ("auto", {})):
            took, same = timed(lambda given=given, extra=extra: model.generate(**given, **extra), run)
            identical &= bool(torch.equal(said, same))
            last[name] = model.speculation.last
            if run:
                ratios[name].append((plain[0] / took[0], plain[1] / took[1]))
        seconds.append(plain[0])
    figures: dict[str, Any] = {"rows": rows, "temperature": temperature}
    figures["plain_s"] = round(statistics.median(seconds[1:]), 3)
    for name, found in ratios.items():
        clock, processor = (round(statistics.median(ratio), 3) for ratio in zip(*found, strict=True))
        passes = {"passes": last[name].passes, "nodes": last[name].nodes}
        figures[name] = {"ratio": clock, "processor_ratio": processor} | passes
    return figures | ({} if temperature else {"identical": identical})


def timed(call: Callable[[], Any], seed: int) -> tuple[tuple[float, float], Any]:
    """Seconds by the clock and of the processor, and what the call returns."""
    torch.manual_seed(seed)
    began, worked = time.perf_counter(), time.process_time()
    said = call()
    return (time.perf_counter() - began, time.process_time() - worked), said


def served(answer: Callable[[Sequence[int]], list[torch.Tensor]], at: list[float], most: int) -> dict[str, Any]:
    """Answer requests when they arrive, at most so many that wait at a time, 0: each from a thread of its own."""
    began, latency, said = time.perf_counter(), [0.0] * len(at), [torch.empty(0)] * len(at)

    def ask(together: Sequence[int]) -> None:
        time.sleep(max(0.0, began + at[together[0]] - time.perf_counter()))
        for i, row in zip(together, answer(together), strict=True):
            latency[i], said[i] = time.perf_counter() - began - at[i], row

    if most:
        done = 0
        while done < len(at):
            arrived = bisect(at, time.perf_counter() - began)
            together = range(done, min(max(arrived, done + 1), done + most))
            ask(together)
            done = together.stop
    else:
        with ThreadPoolExecutor(len(at)) as pool:
            list(pool.map(ask, [[i] for i in range(len(at))]))
    total = max(second + waited for second, waited in zip(at, latency, strict=True))
    p50, p95 = np.percentile(latency, (50, 95))
    return {"total_s": round(total, 2), "p50_s": round(float(p50), 2), "p95_s": round(float(p95), 2), "said": said}


def arrivals(model: Any, rows: list[torch.Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Requests that arrive at random, by all methods, at the same instants."""
    rng = random.Random(0)
    at = sorted(rng.uniform(0.0, options.within) for _ in rows)
    greedy = sampling(0.0, options.new_tokens)

    def by_original(together: Sequence[int]) -> list[torch.Tensor]:
        given = padded([rows[i] for i in together])
        out = type(model).generate(model, **given, **greedy)
        return [row[given["input_ids"].shape[1] :] for row in out]

    def by_us(alone: Sequence[int]) -> list[torch.Tensor]:
        row = rows[alone[0]]
        return [model.generate(row[None], **greedy)[0, len(row) :]]

    model.generate(**padded(rows[:8]), **greedy)  # what batches cost is known to a process that serves
    found = {
        "one after another": served(by_original, at, 1),
        "batches of all who wait": served(by_original, at, len(rows)),
        "auto": served(by_us, at, 0),
    }
    said = {name: figures.pop("said") for name, figures in found.items()}
    pairs = zip(said["one after another"], said["auto"], strict=True)
    identical = all(torch.equal(a, b) for a, b in pairs)
    return {"requests": len(rows), "within_s": options.within, **found, "identical": identical}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Batches of all sizes, or requests that arrive."""
    model, tokenizer = load_model("reference")
    results: dict[str, Any] = {"new_tokens": options.new_tokens}
    if options.arrivals:
        rs.accelerate(model, tokenizer)
        return results | {"arrivals": arrivals(model, prompts(tokenizer, options.arrivals), options)}
    results["batches"] = []
    for temperature in options.temperature:
        for rows in options.rows:
            rs.accelerate(model, tokenizer)
            asked = prompts(tokenizer, rows * (options.runs + 1))
            results["batches"].append(batch(model, asked, temperature, options))
            rs.restore(model)
    return results


def main() -> None:
    """Measure and print."""
    many = [1, 2, 4, 8, 16, 32, 64]
    harness.run(measure, __doc__, rows=many, temperature=[0.0, 1.0], new_tokens=120, runs=4, arrivals=0, within=60.0)


if __name__ == "__main__":
    main()
