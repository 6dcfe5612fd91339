"""Losing cases of this library over all measurements in docs/data, for docs/measurements.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from benchmark_tables import DENSE, LEFT_OUT, RUNS, peer_tables
from published import markdown_table, measured, missing

BUNDLED, RECORDED = "tables_bundled.md", "tables_recorded.md"


def slower() -> str:
    """Answers that are slower than plain `generate`, or than the loop without drafts, by run and method."""
    rows: list[list[str]] = []
    answers = 0
    for runs in RUNS.values():
        for name, label in runs.items():
            run = measured(name)
            if run is not None:
                answers += sum(_prompts(run, method) for method in _mine(run))
                rows += _slower_rows(run, label)
    if not answers:
        return missing("all")
    head = ["bundled model", "method", "slower than plain", "3 % slower than drafting off", "worst over plain"]
    counted = sum(int(row[2].split()[0]) for row in rows)
    text = f"{counted} of {answers:,} answers are slower than plain `generate`; those runs that have any:"
    return "\n".join([text, "", *markdown_table(head, rows), ""])


def _mine(run: dict[str, Any]) -> list[str]:
    from retrieve_spec.bench.methods import parse_method

    return [name for name in run["methods"] if name != run["baseline"] and parse_method(name).ours]


def _prompts(run: dict[str, Any], method: str) -> int:
    number: int = run["methods"][method]["speedup"]["prompts"]
    return number


def _slower_rows(run: dict[str, Any], label: str) -> Iterator[list[str]]:
    plain = Counter(entry["method"] for entry in run["losing"])
    off = Counter(entry["method"] for entry in run.get("slower_than_off", []))
    for method in _mine(run):
        if plain[method] or off[method]:
            of = _prompts(run, method)
            worst = min((e["ratio"] for e in run["losing"] if e["method"] == method), default=None)
            cells = [f"{plain[method]} of {of}", f"{off[method]} of {of}", "" if worst is None else f"{worst:.2f}"]
            yield [label, f"`{method}`", *cells]


def elsewhere() -> str:
    """What else was measured and lost, a sentence each."""
    found = [line for sentence in (_batches, _peers, _sources, _rollouts, _times) for line in sentence()]
    return "\n".join(f"- {line}" for line in found) + "\n" if found else missing("all")


def _batches() -> Iterator[str]:
    made = measured("batches") or {"batches": []}
    for temperature in sorted({entry["temperature"] for entry in made["batches"]}):
        lost = [
            e for e in made["batches"] if e["temperature"] == temperature and e["auto"]["ratio"] < e["off"]["ratio"]
        ]
        if lost:
            cases = ", ".join(f"{e['rows']} ({e['auto']['ratio']:.2f}, off {e['off']['ratio']:.2f})" for e in lost)
            label = f"T = {temperature:g}" if temperature else "greedy"
            yield f"**Batches**, {label}: drafting off is faster with these rows: {cases} ([all]({BUNDLED}#batches))."


def _peers() -> Iterator[str]:
    made = measured("compare")
    if made is None:
        return
    results = {stem: file["drafters"] for stem, file in made["files"].items()}
    cases = []
    for name, files in peer_tables().as_many_nodes(results):
        most = max(rival / mine - 1 for _, rival, mine in files)
        cases.append(f"{name.removeprefix('ours: ')} on {len(files)} (by up to {most:.1%})")
    if cases:
        yield (
            f"**Small trees**: with as few drafted tokens, these get more of them right than `auto` on some of "
            f"{len(results)} recorded files: {', '.join(cases)} ([which]({RECORDED}#peers-on-recorded-answers))."
        )


def _sources() -> Iterator[str]:
    for name, label in (LEFT_OUT | DENSE).items():
        run = measured(name)
        if run is None:
            continue
        whole = run["methods"]["auto"]["speedup_pooled"]
        gains = {
            " and ".join(method.split("~")[1:]): figures["speedup_pooled"] / whole - 1
            for method, figures in run["methods"].items()
            if method.startswith("auto~") and figures["speedup_pooled"] > whole
        }
        if gains:
            cases = ", ".join(f"{source} {gain:+.1%}" for source, gain in gains.items())
            where = (
                "drafting.md#neighbours-of-the-hidden-state" if name in DENSE else f"{BUNDLED}#what-each-source-adds"
            )
            yield f"**Sources**, {label}: `auto` is faster without {cases} ([all]({where}))."


def _rollouts() -> Iterator[str]:
    made = measured("rollouts") or {"epochs": []}
    cases = []
    for found in made["epochs"]:
        pairs = zip(found["siblings"], found["memory"], strict=True)
        lost = [
            str(number) for number, (siblings, memory) in enumerate(pairs, 1) if memory["ratio"] < siblings["ratio"]
        ]
        if lost:
            cases.append(f"T = {found['temperature']:g}, {found['prompts']} at once: epoch {' and '.join(lost)}")
    if cases:
        yield (
            f"**Rollout memory**: with it, the same prompts are answered slower than without it at {'; '.join(cases)} "
            "([all](rollouts.md#what-it-is-worth-in-time))."
        )


def _times() -> Iterator[str]:
    made = measured("compare-times")
    if made is None:
        return
    rows = [file["drafters"] for file in made["files"].values()]
    names = {"ours: auto": "auto", "suffix-decoding tree, wide": "SuffixDecoding", "vllm ngram (2-5)": "vLLM's n-grams"}
    there = {shown: [row[name]["pass_us"]["p50"] for row in rows] for name, shown in names.items() if name in rows[0]}
    cases = ", ".join(f"{shown} {sum(times) / len(times):.0f} µs" for shown, times in there.items())
    yield f"**Time to draft** one pass: {cases} ([all]({RECORDED}#peers-on-recorded-answers))."


TABLES: dict[str, Callable[[], str]] = {"losing-slower": slower, "losing-elsewhere": elsewhere}
