"""Benchmark of what drafting takes between real passes of the bundled model.

    python scripts/bench_drafting.py [--nodes 60] [--tokens 600] [--store FOLDER]

Prompts are files of Python's standard library. Between two passes caches hold the model's weights and little else, so
everything is timed twice: live, and again in a replay of the same requests without a model, where caches are warm. The
time is that of the thread, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import retrieve_spec as rs
from retrieve_spec.drafting import MixtureDrafter
from retrieve_spec.reference_model import load_model

PROMPT = 400
FILES = ("textwrap.py", "csv.py", "heapq.py", "fnmatch.py", "shlex.py", "bisect.py")
clock = time.thread_time_ns


class Timed:
    """A drafter whose calls are timed and recorded, so that they can be made again."""

    def __init__(self, drafter: MixtureDrafter) -> None:
        self._drafter, self.top_k, self.wants_hidden = drafter, drafter.top_k, drafter.wants_hidden
        self.calls: list[tuple[str, tuple[Any, ...], int]] = []
        self.nodes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return partial(self.call, name)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the drafter; note the nanoseconds."""
        began = clock()
        result = getattr(self._drafter, name)(*arguments)
        self.calls.append((name, arguments, clock() - began))
        if name == "propose":
            self.nodes.append(len(result))
        return result

    def microseconds(self) -> dict[str, float]:
        """Medians of drafting and of learning from a pass; median and 95 % of both together."""
        empty = float(np.median([-clock() + clock() for _ in range(1000)]))
        propose, observe = (
            np.array([spent - empty for name, _, spent in self.calls if name == wanted]) / 1e3
            for wanted in ("propose", "observe")
        )
        passes = min(len(propose), len(observe))
        both = propose[:passes] + observe[:passes]
        found = {"propose": np.median(propose), "observe": np.median(observe)}
        found |= {"both, p50": np.median(both), "both, p95": np.quantile(both, 0.95)}
        return {name: round(float(spent), 1) for name, spent in found.items()}


def live(drafter: MixtureDrafter, nodes: int, tokens: int) -> Timed:
    """Generate with the bundled model; the drafter's calls."""
    model, tokenizer = load_model("reference", dtype="float32", device="cpu")
    timed = Timed(drafter)
    rs.accelerate(model, drafter=timed, nodes=nodes)
    for name in FILES:
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8")
        ids = tokenizer(text[:20_000], return_tensors="pt").input_ids[:, :PROMPT]
        model.generate(ids, max_new_tokens=tokens // len(FILES), do_sample=False)
    return timed


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Live, and again without a model."""
    torch.set_num_threads(1)
    stores = [rs.open_datastore(options.store)] if options.store else []

    def drafter() -> MixtureDrafter:
        made = MixtureDrafter(datastores=stores)
        made.prepare()
        return made

    first, again = live(drafter(), options.nodes, options.tokens), Timed(drafter())
    for name, arguments, _ in first.calls:
        again.call(name, *arguments)
    nodes = round(float(np.mean(first.nodes)), 1)
    times = {"live_us": first.microseconds(), "again_us": again.microseconds()}
    return {"passes": len(first.nodes), "nodes_per_pass": nodes, **times}


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, nodes=60, tokens=600, store="")


if __name__ == "__main__":
    main()
