"""Statistics: medians with bootstrap intervals over prompts; ratios are taken within one run only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.bench.methods import OFF, PLAIN, parse_method
from retrieve_spec.bench.prompts import subtask
from retrieve_spec.bench.results import Record

RESAMPLES = 2000
CONFIDENCE = 0.95
NOISE = 0.03
"""Share by which a single answer must be slower than our loop without drafts before it is listed."""
LENGTHS = (0, 1, 2, 3, 5, 9, 17, 33)
"""First accepted length of each class of passes."""
CLASSES = 6
"""Classes of passes by what was expected of them, of equal size."""


def interval(values: Sequence[float], statistic: Callable[..., Any] = np.median) -> dict[str, float]:
    """Median of values over prompts and a percentile bootstrap interval of it (Efron & Tibshirani, 1993).

    Returns
    -------
    `value`, `low`, `high` and `prompts`; the same draws for the same number of prompts.
    """
    data: NDArray[np.float64] = np.asarray(values, np.float64)
    if not len(data):
        return {"value": 0.0, "low": 0.0, "high": 0.0, "prompts": 0}
    draws = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    low, high = np.quantile(statistic(data[draws], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {"value": float(statistic(data)), "low": float(low), "high": float(high), "prompts": len(data)}


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
    base = baseline(header["methods"])
    return {
        "header": header,
        "baseline": base,
        "prompts": len({record.prompt for record in records}),
        "runs_done": len({record.run for record in records}),
        "methods": {
            name: method_figures(records, name, base)
            | _identity(records, name, bool(header.get("temperature")))
            | acceptance(passes_of(records, name))
            | ({"over_off": interval(list(ratios(records, name, OFF).values()))} if OFF in methods else {})
            for name in methods
        },
        "losing": losing(records, methods, base),
        "slower_than_off": [
            entry
            for entry in losing(records, [name for name in methods if parse_method(name).ours], OFF)
            if entry["ratio"] < 1 - NOISE
        ],
    }


def method_figures(records: Sequence[Record], method: str, base: str) -> dict[str, Any]:
    """Figures of one method, over all prompts, per task, and over answers that do not loop."""
    mine = [record for record in records if record.method == method]
    by_task: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_task[subtask(record.task)].append(record)
    looping = {record.prompt for record in records if record.looping}
    straight = [record for record in records if record.prompt not in looping]
    return {
        **speeds(records, method, base),
        "not_looping": speeds(straight, method, base),
        "ms_per_token": interval([record.ms_per_token for record in mine]),
        "first_token_ms": interval([record.first_token_s * 1e3 for record in mine]),
        "split_ms_per_token": split(mine),
        "accepted_by_source": _summed(mine),
        "modes": sorted({f"{record.mode}: {record.reason}" if record.reason else record.mode for record in mine}),
        "peak_memory_bytes": {
            name: max(record.memory.get(name, 0) for record in mine) for name in (mine[0].memory if mine else {})
        },
        "by_task": {task: speeds(group, method, base) for task, group in sorted(by_task.items())},
    }


def _identity(records: Sequence[Record], method: str, sampled: bool) -> dict[str, Any]:
    """Answers that equal the reference method's; None for transformers' methods when sampled (other noise)."""
    mine = [record for record in records if record.method == method]
    diverged = [record for record in mine if record.divergence is not None]
    comparable = not sampled or parse_method(method).ours
    return {
        "identical": len(mine) - len(diverged) if comparable else None,
        "answers": len(mine),
        "divergences": [{"prompt": r.prompt, "run": r.run, **(r.divergence or {})} for r in diverged],
    }


def speeds(records: Sequence[Record], method: str, base: str) -> dict[str, Any]:
    """Speed and acceptance of one method over some records.

    `speedup` is the median over prompts; `speedup_pooled` all tokens by all seconds (of several runs of a prompt its
    median), over the same of the baseline;
    `speedup_means` the ratio of mean speeds, ids counted on both sides; `speedup_spec_bench` the same as Spec-Bench
    defines it, where the baseline's tokens are its texts tokenised again, less one for each turn. Of several runs the
    last two are the mean, as in its `get_mean_speedup`.
    """
    mine = [record for record in records if record.method == method]
    theirs = [record for record in records if record.method == base]
    passes = sum(record.passes for record in mine)
    tokens = sum(record.new_tokens for record in mine)
    known = [record.nodes for record in mine if record.nodes is not None]
    return {
        "speedup": interval(list(ratios(records, method, base).values())),
        "speedup_pooled": _quotient(_pooled(mine), _pooled(theirs)),
        "speedup_means": _of_means(mine, theirs, lambda r: r.tokens_per_second),
        "speedup_spec_bench": _of_means(mine, theirs, lambda r: r.retokenized / r.seconds),
        "tokens_per_second": interval([record.tokens_per_second for record in mine]),
        "tokens_per_pass": _quotient(tokens, passes),
        "nodes_per_pass": _quotient(sum(known), passes) if known else None,
        "new_tokens": tokens,
        "passes": passes,
    }


def split(records: Sequence[Record]) -> dict[str, float]:
    """Milliseconds per new token by part; what the parts leave of the wall time is `other`."""
    tokens = sum(record.new_tokens for record in records)
    if not tokens:
        return {}
    parts: dict[str, float] = defaultdict(float)
    for record in records:
        wall = record.seconds * 1e3
        known = record.split_ms or {"prefill": record.first_token_s * 1e3, "verify": wall - record.first_token_s * 1e3}
        for name, ms in known.items():
            parts[name] += ms
        parts["other"] += max(wall - sum(known.values()), 0.0)
    return {name: ms / tokens for name, ms in parts.items()}


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


def passes_of(records: Sequence[Record], method: str) -> NDArray[np.float64]:
    """(n, 4) nodes, accepted, expected, verify ms of every pass of a method."""
    rows = [entry for record in records if record.method == method for entry in record.per_pass]
    return np.asarray(rows, np.float64).reshape(-1, 4)


def acceptance(passes: NDArray[np.float64]) -> dict[str, Any]:
    """Shares of a drafting method's passes by accepted length; by class, expected and accepted tokens."""
    drafted = passes[passes[:, 0] > 0]
    if len(drafted) < CLASSES:
        return {}
    counts = np.bincount(np.searchsorted(LENGTHS, passes[:, 1], "right") - 1, minlength=len(LENGTHS))
    classes = np.array_split(drafted[np.argsort(drafted[:, 2], kind="stable")], CLASSES)
    return {
        "accepted_lengths": (counts / counts.sum()).tolist(),
        "expected_and_accepted": [rows[:, [2, 1]].mean(0).tolist() for rows in classes],
    }


def _summed(records: Sequence[Record]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for record in records:
        for source, count in record.accepted_by_source.items():
            total[source] += count
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _pooled(records: Sequence[Record]) -> float:
    """Tokens per second over all prompts; of several runs of a prompt the median one, which a hiccup does not move."""
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        runs[record.prompt].append(record)
    tokens = sum(np.median([r.new_tokens for r in same]) for same in runs.values())
    return _quotient(float(tokens), float(sum(np.median([r.seconds for r in same]) for same in runs.values())))


def _of_means(mine: Sequence[Record], theirs: Sequence[Record], their_speed: Callable[[Record], float]) -> float:
    """Ratio of the mean speeds of two methods, the mean over runs."""
    ratios_of_runs = []
    for run in sorted({record.run for record in mine}):
        fast = _mean([record.tokens_per_second for record in mine if record.run == run])
        ratios_of_runs.append(_quotient(fast, _mean([their_speed(r) for r in theirs if r.run == run])))
    return _mean(ratios_of_runs)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _quotient(a: float, b: float) -> float:
    return float(a / b) if b else 0.0
