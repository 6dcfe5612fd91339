"""Statistics: medians with bootstrap intervals over prompts; ratios are taken within one run only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieve_spec.bench.methods import OFF, PLAIN, parse_method
from retrieve_spec.bench.prompts import subtask
from retrieve_spec.bench.results import Record

RESAMPLES = 2000
CONFIDENCE = 0.95
NOISE = 0.03
"""Share by which a single answer must be slower than our loop without drafts before it is listed."""


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median of values over prompts and a percentile bootstrap interval of it (Efron & Tibshirani, 1993).

    Returns
    -------
    `value`, `low`, `high` and `prompts`; the same draws for the same number of prompts.
    """
    data = np.asarray(values, np.float64)
    if not len(data):
        return {"value": 0.0, "low": 0.0, "high": 0.0, "prompts": 0}
    draws = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[draws], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {"value": float(np.median(data)), "low": float(low), "high": float(high), "prompts": len(data)}


def baseline(methods: Sequence[str]) -> str:
    """The method whose speed is 1: plain, else our loop without drafts, else the first."""
    return next((name for name in (PLAIN, OFF) if name in methods), methods[0])


def ratios(records: Sequence[Record], method: str, base: str) -> dict[str, float]:
    """Tokens per second over the baseline's for each prompt, the median over runs of ratios within a run."""
    speed = {(r.run, r.prompt, r.method): r.tokens_per_second for r in records}
    found: dict[str, list[float]] = defaultdict(list)
    for (run, prompt, name), value in speed.items():
        other = speed.get((run, prompt, base), 0.0)
        if name == method and other > 0:
            found[prompt].append(value / other)
    return {prompt: float(np.median(values)) for prompt, values in found.items()}


def summarise(header: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """All figures of a results folder.

    Returns
    -------
    `baseline`, `methods` (by name), `losing` (prompts slower than the baseline, worst first), `slower_than_off`
    (prompts that one of ours answers slower than our loop without drafts), and the header.
    """
    methods = [name for name in header["methods"] if any(r.method == name for r in records)]
    base, ours = baseline(header["methods"]), [name for name in methods if parse_method(name).ours]
    figures = {name: method_figures(records, name, base, bool(header.get("temperature"))) for name in methods}
    if OFF in methods:
        for name in methods:
            figures[name]["over_off"] = interval(list(ratios(records, name, OFF).values()))
    return {
        "header": header,
        "baseline": base,
        "prompts": len({record.prompt for record in records}),
        "runs_done": len({record.run for record in records}),
        "methods": figures,
        "losing": losing(records, methods, base),
        "slower_than_off": [entry for entry in losing(records, ours, OFF) if entry["ratio"] < 1 - NOISE],
    }


def method_figures(records: Sequence[Record], method: str, base: str, sampled: bool = False) -> dict[str, Any]:
    """Figures of one method, over all prompts, per task, and over answers that do not loop.

    `identical` counts answers that equal the reference method's; None for transformers' methods when sampled.
    """
    mine = [record for record in records if record.method == method]
    by_task: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_task[subtask(record.task)].append(record)
    looping = {record.prompt for record in records if record.looping}
    diverged = [record for record in mine if record.divergence is not None]
    accepted = sum((Counter(record.accepted_by_source) for record in mine), Counter[str]())
    return {
        **speeds(records, method, base),
        "not_looping": speeds([record for record in records if record.prompt not in looping], method, base),
        "ms_per_token": interval([record.ms_per_token for record in mine]),
        "first_token_ms": interval([record.first_token_s * 1e3 for record in mine]),
        "split_ms_per_token": split(mine),
        "accepted_by_source": dict(accepted.most_common()),
        "modes": sorted({f"{record.mode}: {record.reason}" if record.reason else record.mode for record in mine}),
        "by_task": {task: speeds(group, method, base) for task, group in sorted(by_task.items())},
        "answers": len(mine),
        "identical": None if sampled and not parse_method(method).ours else len(mine) - len(diverged),
        "divergences": [{"prompt": r.prompt, "run": r.run, **(r.divergence or {})} for r in diverged],
    }


def speeds(records: Sequence[Record], method: str, base: str) -> dict[str, Any]:
    """Speed and acceptance of one method over some records.

    `speedup` is the median over prompts; `speedup_pooled` all tokens by all seconds (of several runs of a prompt its
    median), over the same of the baseline.
    """
    mine = [record for record in records if record.method == method]
    passes, tokens = sum(record.passes for record in mine), sum(record.new_tokens for record in mine)
    nodes = [record.nodes for record in mine if record.nodes is not None]
    theirs = pooled([record for record in records if record.method == base])
    return {
        "speedup": interval(list(ratios(records, method, base).values())),
        "speedup_pooled": pooled(mine) / theirs if theirs else 0.0,
        "tokens_per_second": interval([record.tokens_per_second for record in mine]),
        "tokens_per_pass": tokens / max(passes, 1),
        "nodes_per_pass": sum(nodes) / max(passes, 1) if nodes else None,
        "new_tokens": tokens,
        "passes": passes,
    }


def pooled(records: Sequence[Record]) -> float:
    """Tokens per second over all prompts; of several runs of a prompt the median one, which a hiccup does not move."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        runs[record.prompt].append(record)
    tokens = sum(float(np.median([r.new_tokens for r in same])) for same in runs.values())
    seconds = sum(float(np.median([r.seconds for r in same])) for same in runs.values())
    return tokens / seconds if seconds else 0.0


def split(records: Sequence[Record]) -> dict[str, float]:
    """Milliseconds per new token by part; what the parts leave of the wall time is `other`."""
    parts: Counter[str] = Counter()
    for record in records:
        wall, first = record.seconds * 1e3, record.first_token_s * 1e3
        known = record.split_ms or {"prefill": first, "verify": wall - first}
        parts.update(known | {"other": max(wall - sum(known.values()), 0.0)})
    tokens = sum(record.new_tokens for record in records)
    return {name: ms / tokens for name, ms in parts.items()} if tokens else {}


def losing(records: Sequence[Record], methods: Sequence[str], base: str) -> list[dict[str, Any]]:
    """Prompts that a method answers slower than the baseline, worst first."""
    tasks = {record.prompt: record.task for record in records}
    looping = {record.prompt for record in records if record.looping}
    found = [
        {"prompt": prompt, "task": tasks[prompt], "method": method, "ratio": ratio, "looping": prompt in looping}
        for method in methods
        if method != base
        for prompt, ratio in ratios(records, method, base).items()
        if ratio < 1
    ]
    return sorted(found, key=lambda entry: (entry["ratio"], entry["prompt"], entry["method"]))
