"""Benchmark of drafting with dense retrieval; the last line is one JSON object.

    python scripts/bench_dense_drafting.py [--store FOLDER] [--max-vectors N] [--build-only] [--nodes 24] [--prompts 8]

The bundled model continues files of packages that are not in the store, with the same node budget for every method:
`rest`, `dresd`, `auto` without and with the dense index, each also against the loop without drafts. Methods take turns
prompt by prompt in one process; drafters begin with empty tables and learn as they go. The store (standard library and
installed packages, none of the prompts' packages) is built when the folder does not hold one; an interrupted build goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import numpy as np
import torch

import retrieve_spec as rs
from retrieve_spec.bench.workloads import Prompt, builtin, holdout
from retrieve_spec.config import AUTO, DenseConfig, SpeculationConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.errors import StoreIncompleteError, StoreNotFoundError
from retrieve_spec.kernels.suffix_array import SEPARATOR
from retrieve_spec.paths import cache_dir
from retrieve_spec.reference_model import load_model

PACKAGES = ("rich", "fsspec", "pygments", "setuptools", "pip", "hypothesis", "mypy", "matplotlib", "sympy", "fontTools")
"""Installed packages that fill the store beside the standard library; those held out of the model are never used."""
LEAST_TOKENS = 3_000_000
METHODS = {"off": None, "rest": {}, "dresd": {}, "auto without dense": {"dense": "off"}, "auto": {}}


def sources() -> list[Source | str]:
    """The standard library and packages, without tests and without what prompts are made of."""
    tests = ("**/test/**", "**/tests/**", "**/site-packages/**", "**/idlelib/**", "**/lib2to3/**")
    found: list[Source | str] = [Source(sysconfig.get_path("stdlib"), "PSF-2.0", ("**/*.py",), tests)]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations and name not in holdout():
            folder = spec.submodule_search_locations[0]
            found.append(Source(folder, include=("**/*.py",), exclude=tests, prefix=f"{name}/"))
    return found


def store_of(folder: Path, max_vectors: int, tokens: int) -> tuple[Datastore, float]:
    """The store, built if need be, and the seconds that took."""
    began = time.perf_counter()
    try:
        return open_datastore(folder), 0.0
    except StoreNotFoundError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        config = StoreConfig(dense=DenseConfig("reference", max_vectors=max_vectors))
        build_datastore(folder, sources(), "reference", config=config, max_tokens=tokens, progress=True)
    except StoreIncompleteError:
        build_datastore(folder, resume=True, progress=True)
    return open_datastore(folder), time.perf_counter() - began


class Timed:
    """Stands for a function and adds up how often it was called and how long it took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return self.function(*args)
        finally:
            self.seconds.append(time.perf_counter() - began)


class Contender:
    """One method: a model of its own, accelerated with a drafter whose tables are kept in memory."""

    def __init__(self, name: str, store: Datastore, nodes: int | str) -> None:
        self.name, self.nodes = name, nodes
        self.model, self.tokenizer = load_model("reference")
        self.queries = Timed(lambda: None)
        self.reports: dict[str, list[Any]] = {}
        if name == "off":
            rs.accelerate(self.model, self.tokenizer, draft="off")
            return
        config = SpeculationConfig(draft=AUTO if name.startswith(AUTO) else name, **(METHODS[name] or {}))
        drafter = build_drafter(config, datastores=[store])
        indexes = getattr(drafter, "indexes", None) or getattr(getattr(drafter, "dense", None), "indexes", None)
        if indexes is not None:
            self.queries = indexes.search = Timed(indexes.search)
        rs.accelerate(self.model, self.tokenizer, drafter=drafter, config=config)

    def run(self, prompt: Prompt, tokens: int) -> list[int]:
        """Continue a prompt."""
        ids = self.tokenizer(prompt.turns[0], return_tensors="pt", add_special_tokens=False)["input_ids"]
        asked = len(self.queries.seconds)
        options = {} if self.name == "off" else {"nodes": self.nodes}
        out = self.model.generate(ids, do_sample=False, max_new_tokens=tokens, prediction=prompt.prediction, **options)
        report = self.model.speculation.last
        self.reports.setdefault(prompt.task, []).append((report, len(self.queries.seconds) - asked))
        new: list[int] = out[0, ids.shape[1] :].tolist()
        return new

    def figures(self, task: str | None) -> dict[str, float]:
        """What the table says about one task, or about all."""
        pairs = [pair for name, found in self.reports.items() if task in (None, name) for pair in found]
        reports = [report for report, _ in pairs]
        passes = sum(report.passes - 1 for report in reports)  # the first is the prompt's
        emitted = sum(report.new_tokens - 1 for report in reports)
        queries = sum(asked for _, asked in pairs)
        seconds = sum(report.seconds - report.prefill_ms / 1e3 for report in reports)
        return {
            "tokens_per_pass": round(emitted / passes, 4),
            "accepted": sum(sum(report.accepted_by_source.values()) for report in reports),
            "accepted_dense": sum(report.accepted_by_source.get("dense", 0) for report in reports),
            "nodes_per_pass": round(sum(report.nodes for report in reports) / passes, 2),
            "queries_per_pass": round(queries / passes, 4),
            "draft_us_per_pass": round(sum(report.draft_ms for report in reports) / passes * 1e3, 1),
            "tokens_per_second": round(emitted / seconds, 2),
        }


def neighbours_against_text(store: Datastore, contender: Contender, prompts: list[Prompt]) -> dict[str, float]:
    """How well neighbours alone predict the files as people wrote them: a replay without any drafting.

    At every token the hidden state before it is looked up as `dresd` does; reported is how often some neighbour goes on
    with the token, and how many of the tokens behind it the best of ten kept neighbours has, against the tokens that
    the longest exact match of 2 … 16 tokens has (at its first ten places).
    """
    from retrieve_spec.drafting.published.corpus import Corpus
    from retrieve_spec.sources.dense import DenseIndexes

    model, indexes, corpus = contender.model, DenseIndexes([store]), Corpus([store])
    agree, dense, exact, places = 0, 0, 0, 0
    for prompt in prompts:
        ids = contender.tokenizer(prompt.turns[0], return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            states = model.model(input_ids=ids).last_hidden_state[0].float().numpy()
        text = ids[0].numpy().astype(np.int32)
        for at in range(32, len(text) - 12, 8):
            wanted = text[at + 1 : at + 11]
            near = indexes.search(states[at - 1], 50)
            runs = [indexes.continuation(*place, 11) for place in zip(near.segment, near.position, strict=True)]
            kept = [run[1:] for run in runs if len(run) and run[0] == text[at]][:10]
            found, length = corpus.longest(text[: at + 1], 16)
            copies = []
            for i, lo, hi in found if length >= 2 else []:
                s = corpus.segments[i]
                for start in s.suffix_array[lo : min(hi, lo + 10)].tolist():
                    run = s.tokens[start + length : start + length + 10]
                    copies.append(s.to_global[run[: (run == SEPARATOR).argmax() if (run == SEPARATOR).any() else 10]])
            agree += bool(kept)
            dense += max((_common(run, wanted) for run in kept), default=0)
            exact += max((_common(run, wanted) for run in copies[:10]), default=0)
            places += 1
    return {
        "places": places,
        "some_neighbour_agrees": round(agree / places, 4),
        "dense_tokens_per_place": round(dense / places, 4),
        "exact_tokens_per_place": round(exact / places, 4),
    }


def _common(run: Any, wanted: Any) -> int:
    n = min(len(run), len(wanted))
    same = np.asarray(run[:n]) == wanted[:n]
    return n if same.all() else int(same.argmin())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=cache_dir() / "bench-dense")
    parser.add_argument("--max-vectors", type=int, default=0, help="keys of the dense index at most; 0 for every token")
    parser.add_argument("--store-tokens", type=int, default=LEAST_TOKENS + 200_000)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--nodes", default="24", help="budget per pass, or auto")
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--tasks", default="unseen,edit,structured,prose")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    store, built = store_of(args.store, args.max_vectors, args.store_tokens)
    if args.build_only:
        return
    nodes = args.nodes if args.nodes == AUTO else int(args.nodes)
    prompts = builtin(args.prompts, tuple(args.tasks.split(",")))
    contenders = [Contender(name, store, nodes) for name in METHODS]
    for contender in contenders:  # kernels, allocations
        contender.run(prompts[0], 16)
        contender.reports.clear()
    for turn, prompt in enumerate(prompts):
        order = contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
        answers = {contender.name: contender.run(prompt, args.tokens) for contender in order}
        different = [name for name, answer in answers.items() if answer != answers["off"]]
        if different:
            sys.exit(f"{', '.join(different)} changed the output of {prompt.name}")
    report(store, built, contenders, prompts, args)


def report(store: Datastore, built: float, contenders: list[Contender], prompts: list[Prompt], args: Any) -> None:
    """Print the JSON object."""
    tasks = [None, *dict.fromkeys(prompt.task for prompt in prompts)]
    figures = {task or "all": {c.name: c.figures(task) for c in contenders} for task in tasks}
    by_name = {c.name: c for c in contenders}
    pairs: list[float] = []
    for task in by_name["auto"].reports:
        runs = zip(by_name["auto"].reports[task], by_name["auto without dense"].reports[task], strict=True)
        pairs += [(b.seconds - b.prefill_ms / 1e3) / (a.seconds - a.prefill_ms / 1e3) for (a, _), (b, _) in runs]
    query = {c.name: _quantiles(c.queries.seconds) for c in contenders if c.queries.seconds}
    unseen = [prompt for prompt in prompts if prompt.task == "unseen"]
    result = {
        "figures": figures,
        "auto_speed_with_over_without_dense": {"median": round(statistics.median(pairs), 4), "pairs": len(pairs)},
        "query_us": query,
        "replay": neighbours_against_text(store, by_name["auto"], unseen),
        "store": {
            "tokens": store.manifest.tokens,
            "vectors": sum(index.count for _, index in store.dense),
        },
    }
    print(json.dumps(result))


def _quantiles(seconds: list[float]) -> dict[str, float]:
    us = np.array(seconds) * 1e6
    return {"count": len(us), "p50": round(float(np.median(us)), 1), "p95": round(float(np.quantile(us, 0.95)), 1)}


if __name__ == "__main__":
    main()
