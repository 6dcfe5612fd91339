"""Tables of README.md and docs/ from the speed-ups and replays in docs/data."""

from __future__ import annotations

import importlib
import statistics
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

from pictures import OPEN_MODELS, TEMPERATURES
from published import ROOT, block, facts, markdown_table, measured, missing, ratio

REFERENCE_RUNS = {f"reference-{name}": label for name, label in TEMPERATURES.items()}
RUNS = {
    "reference": REFERENCE_RUNS | {"reference-tasks": "every kind of text, greedy"},
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
"""Data files of each generated part, with their titles."""
LEFT_OUT = {
    "sources-live-t0": "unseen files, greedy, everything kept between prompts",
    "sources-live-t0.7": "unseen files, T = 0.7, top-p 0.95, everything kept between prompts",
    "sources-edit": "edits with a prediction, greedy",
}
DENSE = {"dense-drafting": "four kinds of text, greedy, a store with a key for every token"}
SHOWN = ("Where it loses", "Where drafting does not pay", "Methods", "Tasks", "Divergences")


TABLES: dict[str, Callable[[], str]] = {}
"""What can stand between the marks of a page."""


def speedup() -> str:
    """The README's figures of the bundled model; nothing until they are measured."""
    runs = {label: found for name, label in REFERENCE_RUNS.items() if (found := measured(name))}
    if not runs:
        return ""
    head = [
        "tokens/s over plain `generate`",
        "prompt lookup of transformers",
        "this library",
        "answers that do not loop",
    ]
    rows = []
    for label, run in runs.items():
        auto, lookup = run["methods"]["auto"], run["methods"]["prompt-lookup"]
        cells = [ratio(lookup["speedup"]), ratio(auto["speedup"]), ratio(auto["not_looping"]["speedup"])]
        rows.append([label, *cells])
    first = next(iter(runs.values()))
    text = (
        f"Medians over {first['prompts']} unseen Python files with 95 % intervals, the bundled model of 12.6 M "
        f"parameters in float32; {facts(first['header']['machine'])}. Small models repeat themselves and their passes "
        "are cheap, so do not expect the same of a large one."
    )
    return "\n".join([*_recording(), *markdown_table(head, rows), "", text, "", *_larger_models()])


@block(TABLES, "compare", part="peers", name="replayed-models", alone=False)
def replayed_models(made: dict[str, Any]) -> list[str]:
    """The README's picture of larger models' answers, with where it loses."""
    results = {stem: file["drafters"] for stem, file in made["files"].items()}
    lost = dict(peer_tables().as_many_nodes(results)).get("suffix-decoding tree, wide", [])
    most = max((1 - mine / rival for _, rival, mine in lost), default=0)
    text = (
        f"Recorded answers of these models, replayed through each project's drafting code: those {len(OPEN_MODELS)} of "
        f"{len(results)} recorded files that hold nothing but answers of open models of this size; commit "
        f"{made['machine']['commit']}, {made['machine']['date']}. Longer drafts get more tokens right, and make a pass "
        f"cost more. Where this library drafts as few tokens as SuffixDecoding, it gets up to {most:.0%} fewer tokens "
        f"per pass on {len(lost)} of the {len(results)} files: "
        "[all files, drafters and the command](docs/tables_recorded.md#peers-on-recorded-answers)."
    )
    return ["![Tokens per pass of 7 B to 70 B models](docs/peers.svg)", "", text]


def _recording() -> list[str]:
    """The recording of a terminal, once there is one."""
    made = measured("terminal")
    if made is None:
        return []
    return [f"![A real run: {made['file']}, plain and with drafts](docs/terminal.svg)", ""]


def _larger_models() -> list[str]:
    """What larger models make of answers that do not loop, in a sentence."""
    made = measured("larger")
    if made is None:
        return []
    parts = [
        f"{ratio(figures['methods']['auto']['speedup'])} times as fast with {figures['parameters'] / 1e9:.2f} B "
        f"parameters (prompt lookup {figures['methods']['prompt-lookup']['speedup']['value']:.2f})"
        for figures in made["sizes"].values()
    ]
    text = (
        "Models with random weights, made to say the answers that Vicuna-7B gave to Spec-Bench's questions, are "
        f"{' and '.join(parts)}; medians over {made['answers']} answers on the same kind of machine "
        "([how](docs/tables_recorded.md#larger-models))."
    )
    return [text, ""]


def runs_of(part: str) -> str:
    """Every measured run of a part, as its report's tables, where it loses first; the page has one legend for all."""
    from retrieve_spec.bench.report_sections import sections

    lines = []
    for name, label in RUNS[part].items():
        run = measured(name)
        if run is None:
            continue
        header = run["header"]
        lines += [f"### Bundled model, {label}", "", facts(header["machine"]), "", f"`{header['command']}`", ""]
        found = {section["title"]: section for section in sections(run)}
        for title in SHOWN:
            section = found.get(title)
            if section is None or (title == "Tasks" and len(section["rows"]) < 2):
                continue
            lines += [f"**{title}.**" if title == "Methods" else f"**{title}.** {section['text']}", ""]
            if section["rows"]:
                lines += [*markdown_table(section["head"], section["rows"]), ""]
    return "\n".join(lines) or missing(part)


@block(TABLES, "sources-replay")
def replayed_sources(made: dict[str, Any]) -> list[str]:
    """What each source adds on recorded answers."""
    rows = []
    for name, figures in made["rows"].items():
        nodes, _, left_out = name.partition(" ")
        whole = made["rows"][nodes]["tokens_per_pass"]
        rate = figures["tokens_per_pass"]
        loss = f"{rate / whole - 1:+.1%}" if left_out else ""
        accepted = ", ".join(f"{source} {count:,}" for source, count in figures["accepted_by_source"].items())
        what = " and ".join(left_out.split()) or "nothing"
        rows.append([nodes, what, f"{rate:.3f}", loss, f"{figures['nodes_per_pass']:.1f}", accepted])
    head = ["nodes", "left out", "tokens/pass", "", "nodes/pass", "accepted by source"]
    return [f"The store: answers of `{made['store']}`.", "", *markdown_table(head, rows)]


@block(TABLES, "knowledge")
def knowledge(made: dict[str, Any]) -> list[str]:
    """Tokens per pass of `auto` on recorded files, by nodes and by what it knows beside the text."""
    budgets = list(dict.fromkeys(name.split()[0] for name in made["rows"]))
    files = list(dict.fromkeys(name.split()[2] for name in made["rows"]))
    columns = [(nodes, known) for nodes in budgets for known in made["options"]]
    rows = []
    for file in files:
        found = [made["rows"][f"{nodes} {known} {file}"] for nodes, known in columns]
        rows.append([file.removesuffix(".jsonl"), *(f"{figures['tokens_per_pass']:.3f}" for figures in found)])
    apart = sorted(abs(f["expected_tokens_per_pass"] / f["tokens_per_pass"] - 1) for f in made["rows"].values())
    told = ", ".join(f"{known} `{options}`" for known, options in made["options"].items())
    text = (
        f"All rows of each file. Options: {told}. Expected and realised tokens per pass differ by "
        f"{statistics.median(apart):.1%} (median) and at most {apart[-1]:.1%}."
    )
    head = ["file", *(f"{nodes} nodes, {known}" for nodes, known in columns)]
    return [*textwrap.wrap(text, 118), "", *markdown_table(head, rows)]


@block(TABLES, "siblings")
def siblings(made: dict[str, Any]) -> list[str]:
    """Tokens per pass of recorded samples, by how many are decoded together."""
    rows = [
        [
            file.removesuffix(".jsonl"),
            count,
            f"{figures['groups']:,}",
            f"{figures['share']['tokens']:,}",
            *(f"{figures[name]['tokens_per_pass']:.3f}" for name in ("off", "share")),
            f"{figures['gain']:+.1%}",
        ]
        for file, found in made["rows"].items()
        for count, figures in found["siblings"].items()
    ]
    head = ["file", "siblings", "questions", "tokens", "tokens/pass alone", "sharing", ""]
    return [f"{made['nodes']} nodes per pass at most.", "", *markdown_table(head, rows)]


@block(TABLES, "epochs")
def epochs(made: dict[str, Any]) -> list[str]:
    """Tokens per pass of recorded samples replayed as epochs, by epoch."""
    ((file, found),) = made["rows"].items()
    found = found["epochs"]
    rows = [
        [str(number), *(f"{figures['tokens_per_pass']:.3f}" for figures in pair), f"{_gain(*pair):+.1%}"]
        for number, pair in enumerate(zip(found["siblings"], found["memory"], strict=True), 1)
    ]
    text = (
        f"{file.removesuffix('.jsonl')}: {found['groups']} questions, {found['samples']} answers to each in an epoch; "
        f"{made['nodes']} nodes per pass at most."
    )
    return [*textwrap.wrap(text, 118), "", *markdown_table(["epoch", "siblings alone", "and memory", ""], rows)]


def _gain(alone: dict[str, Any], memory: dict[str, Any]) -> float:
    gain: float = memory["tokens_per_pass"] / alone["tokens_per_pass"] - 1.0
    return gain


def left_out(runs: dict[str, str], part: str) -> str:
    """What each source adds to `auto` on the bundled model, and what presets get from the same stores."""
    lines = []
    for name, title in runs.items():
        run = measured(name)
        if run is None:
            continue
        header, whole = run["header"], run["methods"]["auto"]
        lines += [f"**Bundled model, {title}** ({run['prompts']} prompts)", "", facts(header["machine"]), ""]
        lines += [f"`{header['command']}`", ""]
        rows = []
        for method, figures in run["methods"].items():
            kind, *without = method.split("~")
            if method != run["baseline"]:
                passes, speed = (figures[what] / whole[what] - 1 for what in ("tokens_per_pass", "speedup_pooled"))
                what = f"`{kind}`" + (f" without {' and '.join(without)}" if without else "")
                rows.append([what, f"{figures['tokens_per_pass']:.2f}", f"{passes:+.1%}" if without else ""])
                rows[-1] += [f"{figures['nodes_per_pass']:.1f}", ratio(figures["speedup"])]
                rows[-1] += [f"{speed:+.1%}" if without else ""]
        head = ["draft", "tokens/pass", "change", "nodes/pass", f"speed over {run['baseline']} (95 %)"]
        lines += [*markdown_table([*head, "change, pooled"], rows), ""]
    return "\n".join(lines) or missing(part)


@block(TABLES, "compare", part="peers", alone=False)
def compare(made: dict[str, Any]) -> list[str]:
    """The comparison with peers on recorded answers; times from the part that measures only them, where it was run."""
    table = peer_tables()
    return [*table.acceptance(made), "", *table.times(measured("compare-times") or made)]


def peer_tables() -> Any:
    """`tools/compare/table.py`, which is no package."""
    tools = str(ROOT / "tools" / "compare")
    sys.path.insert(0, tools)
    try:
        return importlib.import_module("table")
    finally:
        sys.path.remove(tools)


@block(TABLES, "compare", part="peers", name="expectation", alone=False)
def expectation(made: dict[str, Any]) -> list[str]:
    """How far the tokens that `auto` expected of its drafts and those it got agree, over all replays."""
    full = ("ours: auto", "ours: auto, answers kept", "ours: auto, other answers given")
    apart = sorted(
        abs(figures["expected_tokens_per_pass"] / figures["tokens_per_pass"] - 1)
        for file in made["files"].values()
        for name, figures in file["drafters"].items()
        if name in full
    )
    text = (
        f"Over {len(made['files'])} recorded files, with nothing kept, answers kept and other answers given, expected "
        f"and realised tokens per pass differ by {statistics.median(apart):.1%} (median) and at most {apart[-1]:.1%} "
        "([the replays](tables_recorded.md#peers-on-recorded-answers) say where and how)."
    )
    return textwrap.wrap(text, 118)


TABLES |= {name: partial(runs_of, name) for name in RUNS} | {
    "speedup": speedup,
    "sources": partial(left_out, LEFT_OUT, "sources"),
    "dense-drafting": partial(left_out, DENSE, "dense-drafting"),
}
