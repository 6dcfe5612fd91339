"""Blocks of README.md and docs/ made from docs/data: one template each in scripts/blocks, and what templates ask for.

Blocks of several runs of `bench run` share the templates `runs.md` and `sources.md`.
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from harness import ROOT
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from retrieve_spec.bench.machine import summary
from retrieve_spec.bench.methods import parse_method
from retrieve_spec.bench.report import ratio, sections
from retrieve_spec.cli_common import counted

sys.path.insert(1, str(ROOT / "tools" / "compare"))
import table as peers

DATA, TEMPLATES = ROOT / "docs" / "data", ROOT / "scripts" / "blocks"
TEMPERATURES = {"t0": "greedy", "t0.7": "T = 0.7, top-p 0.95", "t1.0": "T = 1.0"}
RUNS = {
    "reference": {f"reference-{name}": label for name, label in TEMPERATURES.items()}
    | {"reference-tasks": "every kind of text, greedy"},
    "stores": {
        f"stores-{name}": f"with stores of other code, and without (`auto~ngram~exact`), {label}"
        for name, label in TEMPERATURES.items()
    },
    "presets": {
        "presets-cold": "every preset, greedy, nothing kept between prompts",
        "presets-shared": "every preset, greedy, everything kept between prompts",
    },
    "slower": {
        "slower-words-t1.0": "random words, T = 1.0",
        "slower-unseen-t1.0": "unseen files, T = 1.0",
        "slower-unseen-t1.5": "unseen files, T = 1.5",
    },
    "workloads": {"workloads": "four kinds of text, greedy"},
    "workloads-t0.7": {"workloads-t0.7": "four kinds of text, T = 0.7, top-p 0.95"},
}
"""Data files of each block of runs, with their titles."""
LEFT_OUT = {
    "sources": {
        "sources-live-t0": "unseen files, greedy, everything kept between prompts",
        "sources-live-t0.7": "unseen files, T = 0.7, top-p 0.95, everything kept between prompts",
        "sources-edit": "edits with a prediction, greedy",
    },
    "dense-drafting": {"dense-drafting": "four kinds of text, greedy, a store with a key for every token"},
}
"""The same of blocks that leave out one source after the other."""
OPEN_MODELS = {
    "code_classeval_incremental_deepseekcoder_greedy": ("completing a class", "DeepSeek-Coder 6.7 B"),
    "code_fim_evocodebench_greedy": ("filling in a function", "three models, 7 B to 33 B"),
    "codeedit_nofuneval_deepseekcoder33b_greedy": ("rewriting a file", "DeepSeek-Coder 33 B"),
    "math_tora_gsm8k_greedy": ("mathematics", "ToRA 34 B and 70 B"),
    "reasoning_skyt1_aime24_11ckpts_greedy": ("long reasoning", "Sky-T1 32 B"),
    "specbench_vicuna7b_greedy": ("Spec-Bench", "Vicuna 7 B"),
    "specbench_business_vicuna7b_greedy": ("business questions", "Vicuna 7 B"),
}
"""Recorded files whose answers are all by open models of 7 B to 70 B parameters: the work, the models."""
NAMES = {
    "MAPPINGS": [
        ("causal", "Causal language models"),
        ("image", "Image and text to text"),
        ("seq2seq", "Sequence to sequence"),
    ],
    "MODES": ("tree", "chain", "plain", "delegated"),
    "SHOWN": ("Where it loses", "Where drafting does not pay", "Methods", "Tasks", "Divergences"),
    "TIMED": [
        ("ours: auto", "auto"),
        ("suffix-decoding tree, wide", "SuffixDecoding"),
        ("vllm ngram (2-5)", "vLLM's n-grams"),
    ],
}
"""What templates call things."""
PROPOSERS = {"none": ("no drafts", 0), "ngram": ("n-grams", 8), "suffix": ("suffix decoding", 16), "ours": ("ours", 16)}
"""Methods inside vLLM: name, and tokens drafted at most where a method does not say it, as `ours:32` does."""


def measured(name: str) -> dict[str, Any]:
    """A data file that `scripts/reproduce` wrote."""
    return dict(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")))


def origin(made: dict[str, Any]) -> str:
    """Where figures come from: machine, versions, commit and date, then the command."""
    return f"{summary(made['machine'])}\n\n`{made['command']}`"


def two(value: float) -> str:
    """A number with two digits after the first one that counts: 1,234; 12.3; 0.12."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def mean(rows: Iterable[dict[str, Any]], path: str) -> float:
    """Mean of a figure over rows; `path` is its keys with dots between."""
    first, _, rest = path.partition(".")
    return statistics.mean(row[first][rest] if rest else row[first] for row in rows)


def expectation(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """By how much expected and realised tokens per pass differ."""
    apart = [abs(row["expected_tokens_per_pass"] / row["tokens_per_pass"] - 1) for row in rows]
    return {"median": statistics.median(apart), "most": max(apart)}


def slower() -> tuple[list[dict[str, Any]], int]:
    """Methods of this library with answers slower than plain's or than those with drafting off, and all answers."""
    rows, answers = [], 0
    for name, label in (run for runs in RUNS.values() for run in runs.items()):
        run = measured(name)
        lost_to_off = Counter(entry["method"] for entry in run["slower_than_off"])
        for method, figures in run["methods"].items():
            if method == run["baseline"] or not parse_method(method).ours:
                continue
            answers += (of := figures["speedup"]["prompts"])
            ratios = [entry["ratio"] for entry in run["losing"] if entry["method"] == method]
            if ratios or lost_to_off[method]:
                row = {"run": label, "method": method, "of": of, "lost_to_off": lost_to_off[method]}
                rows.append(row | {"lost": len(ratios), "worst": min(ratios, default=None)})
    return rows, answers


def proposer(method: str) -> str:
    """A method inside vLLM."""
    name, _, tokens = method.partition(":")
    shown, usual = PROPOSERS[name.replace("store", "ours")]
    drafted = f" ({tokens or usual})" if usual else ""
    return f"{shown}{', store' if name == 'store' else ''}{drafted}"


ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
ENVIRONMENT.filters |= {
    "as": lambda value, spec: format(value, spec),
    "two": two,
    "millions": lambda value: f"{two(value / 1e6)} M",
    "interval": ratio,
    "times": lambda took: f"{two(took['p50'])} / {two(took['p95'])}",
    "label": lambda temperature: f"T = {temperature:g}" if temperature else "greedy",
    "stem": lambda file: file.removesuffix(".jsonl"),
    "wrap": lambda text: textwrap.fill(text, 118) + "\n",
    "without": lambda method: " and ".join(method.split("~")[1:]),
    "count_of": lambda rows, key, *modes: sum(row[key] in modes for row in rows),
    "mean": mean,
    "method": proposer,
}
ENVIRONMENT.globals |= NAMES | {
    "RUNS": RUNS, "LEFT_OUT": LEFT_OUT, "OPEN_MODELS": OPEN_MODELS, "TEMPERATURES": TEMPERATURES, "peers": peers,
    "measured": lambda name: measured(name), "facts": summary, "origin": origin, "sections": sections,
    "counted": counted, "expectation": expectation, "slower": slower, "zip": partial(zip, strict=True),
    "rule": lambda columns: "|---" * columns + "|",
    "words": lambda names, at: list(dict.fromkeys(name.split()[at] for name in names)),
}  # fmt: skip


def block(name: str) -> str:
    """Text of a block."""
    template = "runs" if name in RUNS else "sources" if name in LEFT_OUT else name
    return ENVIRONMENT.get_template(f"{template}.md").render(block=name).strip() + "\n"


_names = {path.stem for path in TEMPLATES.glob("*.md")} - {"runs", "sources"} | set(RUNS) | set(LEFT_OUT)
BLOCKS: dict[str, Callable[[], str]] = {name: partial(block, name) for name in sorted(_names)}
"""What can stand between the marks of a page."""
