"""Benchmark of busy machines: tokens per second while other programs compute on some of the cores.

    python scripts/bench_busy.py [--cores 1] [--new-tokens 240] [--runs 6]

One text after another is written with the number of threads that the times of passes choose, and with each number kept;
medians of the runs' tokens per second, and of the runs' ratios: with drafts to the better number, without to the
original `generate`. With 0 cores taken, the machine is idle.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import harness
import torch
from bench_batches import prompts, sampling, timed

import retrieve_spec as rs
from retrieve_spec.engine.threads import PassThreads
from retrieve_spec.reference_model import load_model


@contextlib.contextmanager
def others_compute(cores: int) -> Iterator[None]:
    """Keep so many cores busy with other processes."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


class Kept(PassThreads):
    """A number of threads that stays; `torch.set_num_threads` would fix MKL's for all methods behind it."""

    def __init__(self, like: PassThreads, number: int) -> None:
        super().__init__(like.most, like._set)
        self.chosen = number

    def observe(self, seconds: float, expected: float) -> None:
        """Learn nothing."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second with chosen and with kept numbers of threads, in turns, over texts that no turn had before."""
    model, tokenizer = load_model("reference")
    # Without phrases: every text is given by every method, and the later ones would know it.
    rs.accelerate(model, tokenizer, phrases="off")
    rows = prompts(tokenizer, options.runs + 1)
    engine, most = model.speculation.engine, torch.get_num_threads()
    choosing = engine.threads
    if choosing is None:
        raise SystemExit("threads cannot be chosen here: torch's OpenMP runtime was not found")
    methods: dict[str, tuple[str | None, int]] = {"plain": (None, 0)}
    for draft in ("auto", "off"):
        methods |= {f"{draft}, chosen": (draft, 0)} | {f"{draft}, {n}": (draft, n) for n in range(1, most + 1)}
    costs = {name: copy.deepcopy(engine.costs) for name in methods}  # what passes cost with so many threads
    speed: dict[str, list[float]] = {name: [] for name in methods}
    chosen = []
    with others_compute(options.cores):
        for run, row in enumerate(rows):
            for name in sorted(methods, key=lambda name: random.Random(f"{run}{name}").random()):
                draft, kept = methods[name]
                engine.threads, engine.costs = Kept(choosing, kept) if kept else choosing, costs[name]
                given = {"input_ids": row[None], **sampling(0.0, options.new_tokens)}
                if draft is None:
                    took, _ = timed(lambda given=given: type(model).generate(model, **given), run)
                else:
                    took, _ = timed(lambda given=given, draft=draft: model.generate(**given, draft=draft), run)
                if run:
                    speed[name].append(options.new_tokens / took[0])
                if name == "auto, chosen":
                    chosen.append(model.speculation.last.threads)
    better = [max(kept) for kept in zip(*(speed[f"auto, {n}"] for n in range(1, most + 1)), strict=True)]
    drafted = [a / b for a, b in zip(speed["auto, chosen"], better, strict=True)]
    plainly = [a / b for a, b in zip(speed["off, chosen"], speed["plain"], strict=True)]
    return {
        "tokens_per_s": {name: round(statistics.median(found), 1) for name, found in speed.items()},
        "auto_to_better_kept": round(statistics.median(drafted), 3),
        "off_to_plain": round(statistics.median(plainly), 3),
        "chosen": chosen,
    }


if __name__ == "__main__":
    harness.run(measure, __doc__, cores=1, new_tokens=240, runs=6)
