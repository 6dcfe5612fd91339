"""Benchmark of what drafting takes between real passes of the bundled model, and where.

    python scripts/bench_drafting.py [--nodes 60] [--tokens 600] [--store FOLDER]

Prompts are files of Python's standard library. Between two passes caches hold the model's weights and little else, so
everything is timed twice: live, and again in a replay of the same requests without a model, where caches are warm. The
time is that of the thread (other programs do not count) and has two parts, the compiled call of `kernels/step.py` and
the Python around it. A second replay learns from each pass before it drafts, in a call of its own. `profile_us` says
where the live time goes: work done with warm caches, and what is waited for because the model's pass has emptied them.
"""

from __future__ import annotations

import argparse
import inspect
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import retrieve_spec as rs
from retrieve_spec.drafting import Budget, DraftTree, MixtureDrafter, VerifiedPass
from retrieve_spec.kernels import step
from retrieve_spec.reference_model import load_model

PROMPT = 400
FILES = ("textwrap.py", "csv.py", "heapq.py", "fnmatch.py", "shlex.py", "bisect.py")
MAX_NODES = list(inspect.signature(step.propose.py_func).parameters).index("max_nodes")
clock = time.thread_time_ns


class Timed:
    """A drafter whose calls are timed and kept, so that they can be made again."""

    def __init__(self, drafter: MixtureDrafter) -> None:
        self._drafter, self.top_k, self.wants_hidden = drafter, drafter.top_k, drafter.wants_hidden
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.spent: dict[str, list[int]] = defaultdict(list)
        self.nodes: list[int] = []

    def start(self, *texts: Any) -> None:
        """Begin."""
        self._do("start", *texts)

    def observe_prompt(self, *shown: Any) -> None:
        """See the prompt's top tokens."""
        self._do("observe_prompt", *shown)

    def propose(self, budget: Budget) -> DraftTree:
        """Draft, and take down how long it took."""
        began = clock()
        tree: DraftTree = self._do("propose", budget)
        self.spent["propose"].append(clock() - began)
        self.nodes.append(len(tree))
        return tree

    def observe(self, verified: VerifiedPass) -> None:
        """Learn, and take down how long it took."""
        began = clock()
        self._do("observe", verified)
        if len(verified.tree):
            self.spent["observe"].append(clock() - began)

    def finish(self) -> None:
        """End."""
        self._do("finish")

    def _do(self, name: str, *arguments: Any) -> Any:
        self.calls.append((name, arguments))
        return getattr(self._drafter, name)(*arguments)


@contextmanager
def kernel_timed(spent: dict[str, list[int]]) -> Iterator[None]:
    """Take down how long compiled calls take, those that draft and those that only learn."""
    original = step.propose

    def timed(*arguments: Any) -> Any:
        began = clock()
        result = original(*arguments)
        spent["propose, compiled" if arguments[MAX_NODES] else "learn, compiled"].append(clock() - began)
        return result

    setattr(step, "propose", timed)  # noqa: B010 (a module's function is replaced)
    try:
        yield
    finally:
        setattr(step, "propose", original)  # noqa: B010


def live(drafter: MixtureDrafter, nodes: int, tokens: int) -> Timed:
    """Generate with the bundled model; the drafter's calls."""
    model, tokenizer = load_model("reference", dtype="float32", device="cpu")
    timed = Timed(drafter)
    rs.accelerate(model, drafter=timed, nodes=nodes)
    with kernel_timed(timed.spent):
        for name in FILES:
            text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8")
            ids = tokenizer(text[:20_000], return_tensors="pt").input_ids[:, :PROMPT]
            model.generate(ids, max_new_tokens=tokens // len(FILES), do_sample=False)
    return timed


def again(drafter: MixtureDrafter, calls: list[tuple[str, tuple[Any, ...]]], apart: bool = False) -> Timed:
    """The same calls one after another; `apart`, what was shown is learned before each draft."""
    timed = Timed(drafter)
    with kernel_timed(timed.spent):
        for name, arguments in calls:
            if apart and name == "propose":
                drafter._catch_up()
            getattr(timed, name)(*arguments)
    return timed


def microseconds(timed: Timed) -> dict[str, float]:
    """Medians by part; the clock's own time is taken off."""
    empty = float(np.median([-clock() + clock() for _ in range(1000)]))
    parts = {name: float(np.median(spent)) - empty for name, spent in timed.spent.items()}
    passes = min(len(timed.spent["propose"]), len(timed.spent["observe"]))
    both = np.add(timed.spent["propose"][:passes], timed.spent["observe"][:passes]) - 6 * empty
    parts["both, p50"], parts["both, p95"] = float(np.median(both)), float(np.quantile(both, 0.95))
    return {name: round(spent / 1e3, 1) for name, spent in parts.items()}


def profile(live: dict[str, float], warm: dict[str, float], apart: dict[str, float]) -> dict[str, float]:
    """What the live time of a pass goes to."""
    compiled = "propose, compiled"
    around, around_warm = (spent["propose"] + spent["observe"] - spent[compiled] for spent in (live, warm))
    parts = {
        "learning, compiled": apart["learn, compiled"],
        "drafting, compiled": apart[compiled],
        "emptied caches, compiled": live[compiled] - warm[compiled],
        "Python": around_warm,
        "emptied caches, Python": around - around_warm,
    }
    return {name: round(spent, 1) for name, spent in parts.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Live, again without a model, and again with learning apart."""
    torch.set_num_threads(1)
    stores = [rs.open_datastore(options.store)] if options.store else []

    def drafter() -> MixtureDrafter:
        made = MixtureDrafter(datastores=stores)
        made.prepare()
        return made

    first = live(drafter(), options.nodes, options.tokens)
    live_us, again_us = microseconds(first), microseconds(again(drafter(), first.calls))
    return {
        "passes": len(first.nodes),
        "nodes_per_pass": round(float(np.mean(first.nodes)), 1),
        "live_us": live_us,
        "again_us": again_us,
        "profile_us": profile(live_us, again_us, microseconds(again(drafter(), first.calls, apart=True))),
    }


if __name__ == "__main__":
    harness.run(measure, __doc__, nodes=60, tokens=600, store="")
