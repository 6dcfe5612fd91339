"""Results of `bench run`: the results folder, its statistics, and reports.

::

    OUT/run.json        description of the run: command, machine, model, methods, options, prompts
    OUT/results.jsonl   one line per (run, prompt, method), written after all methods have answered the prompt
    OUT/summary.json    medians with bootstrap intervals over prompts; ratios are only taken within a run
    OUT/report.md       the summary as tables
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from retrieve_spec.bench.machine import summary as machine_summary
from retrieve_spec.bench.methods import OFF, PLAIN, parse_method
from retrieve_spec.bench.workloads import subtask
from retrieve_spec.errors import TraceError

RUN_FILE, RESULTS_FILE = "run.json", "results.jsonl"
PARTS = ("prefill", "draft", "verify", "commit", "learn")
"""Parts of a generation's time."""
FORMAT = 3
RESAMPLES, CONFIDENCE = 2000, 0.95
NOISE = 0.03
"""Answers that are slower than without drafts by more than this share are listed."""
LOSING_SHOWN = 15
_MARKUP = re.compile(r"[\\`*<&\[|~]")


@dataclass(slots=True)
class Record:
    """A method's answers to all turns of one prompt.

    Attributes
    ----------
    run, prompt, task, method
        What was run; runs are counted from 1.
    new_tokens, token_ids, texts
        Number of generated tokens, and per turn, their ids and text.
    passes, nodes
        Forward passes, including those of prompts; verified draft tokens (None: not reported).
    seconds, first_token_s
        Wall time of all turns, including prompts; summed time to the first token of each turn.
    split_ms
        Milliseconds of prefill, draft, verify, commit, learn.
    accepted_by_source, mode, reason
        As in `GenerationReport`.
    looping
        Whether the last answer ends in a loop of repeated text.
    divergence
        First difference from the reference method's answers, if any: `{"turn", "position", "gap"}`, where gap is the
        difference of the two tokens' logits.
    """

    run: int
    prompt: str
    task: str
    method: str
    new_tokens: int = 0
    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    passes: int = 0
    nodes: int | None = None
    seconds: float = 0.0
    first_token_s: float = 0.0
    split_ms: dict[str, float] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    mode: str = ""
    reason: str = ""
    looping: bool = False
    divergence: dict[str, Any] | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens by wall time, including prompts."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token after the first of each turn, excluding prompts."""
        later = self.new_tokens - len(self.token_ids)
        return (self.seconds - self.first_token_s) / later * 1e3 if later > 0 else 0.0


class ResultsFolder:
    """A folder to which results are added one by one, so that interrupted runs can be reported.

    Parameters
    ----------
    path
        Created if it does not exist.
    header
        Description of the run.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.header = {"format": FORMAT, **header}
        path.mkdir(parents=True, exist_ok=True)
        self.note()

    def add(self, records: list[Record]) -> None:
        """Write the answers of all methods to one prompt."""
        with open(self.path / RESULTS_FILE, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(record)) + "\n" for record in records))

    def note(self, **facts: Any) -> None:
        """Add facts to the description of the run."""
        self.header |= facts
        (self.path / RUN_FILE).write_text(json.dumps(self.header, indent=1) + "\n", encoding="utf-8")


def read_results(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read a folder's description of the run and results.

    Raises
    ------
    TraceError
        The folder holds no results, or results of another version.
    """
    try:
        header = dict(json.loads((folder / RUN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise TraceError("results of `bench run`", f"none in {folder}", "Give its --out folder.") from error
    if header.get("format") != FORMAT:
        got = f"format {header.get('format')} in {folder}"
        raise TraceError(f"results of format {FORMAT}", got, "Use the version that wrote them.")
    file = folder / RESULTS_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    if not lines:
        raise TraceError("at least one answered prompt", f"none in {folder}", "Let `bench run` finish a prompt.")
    return header, [Record(**json.loads(line)) for line in lines]


def write_report(folder: Path) -> dict[str, Any]:
    """Write the report's files and return the summary; errors are those of `read_results`."""
    summary = summarise(*read_results(folder))
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(summary), encoding="utf-8")
    return summary


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the median over prompts and its percentile bootstrap interval (Efron & Tibshirani, 1993).

    Returns
    -------
    `value`, `low`, `high` and `prompts`; draws depend on the number of prompts only.
    """
    data = np.asarray(values, np.float64)
    if not len(data):
        return {"value": 0.0, "low": 0.0, "high": 0.0, "prompts": 0}
    draws = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[draws], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {"value": float(np.median(data)), "low": float(low), "high": float(high), "prompts": len(data)}


def ratios(records: Sequence[Record], method: str, base: str) -> dict[str, float]:
    """Return the speed over the baseline's for each prompt: the median over runs of the ratio within a run."""
    speed = {(r.run, r.prompt): r.tokens_per_second for r in records if r.method == base}
    found: dict[str, list[float]] = defaultdict(list)
    for r in records:
        if r.method == method and (other := speed.get((r.run, r.prompt), 0.0)) > 0:
            found[r.prompt].append(r.tokens_per_second / other)
    return {prompt: float(np.median(values)) for prompt, values in found.items()}


def summarise(header: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return all figures of a results folder.

    Returns
    -------
    `baseline` (the method whose speed is 1: plain, else `off`, else the first), `methods` (by name), `losing` (prompts
    slower than the baseline, worst first), `slower_than_off` (prompts for which drafts make this library slower), and
    the description of the run.
    """
    methods = [name for name in header["methods"] if any(r.method == name for r in records)]
    base = next((name for name in (PLAIN, OFF) if name in header["methods"]), header["methods"][0])
    figures = {name: method_figures(records, name, base, bool(header.get("temperature"))) for name in methods}
    if OFF in methods:
        for name in methods:
            figures[name]["over_off"] = interval(list(ratios(records, name, OFF).values()))
    ours = [name for name in methods if parse_method(name).ours]
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
    """Return the figures of one method for all prompts, per task, and for answers that do not loop.

    `identical` counts answers equal to the reference method's; None for sampled answers of transformers' methods.
    """
    mine = [record for record in records if record.method == method]
    tasks = sorted({subtask(record.task) for record in records})
    looping = {record.prompt for record in records if record.looping}
    diverged = [{"prompt": r.prompt, "run": r.run, **r.divergence} for r in mine if r.divergence is not None]
    accepted = sum((Counter(record.accepted_by_source) for record in mine), Counter[str]())
    return {
        **speeds(records, method, base),
        "not_looping": speeds([record for record in records if record.prompt not in looping], method, base),
        "ms_per_token": interval([record.ms_per_token for record in mine]),
        "first_token_ms": interval([record.first_token_s * 1e3 for record in mine]),
        "split_ms_per_token": split(mine),
        "accepted_by_source": dict(accepted.most_common()),
        "modes": sorted({f"{record.mode}: {record.reason}" if record.reason else record.mode for record in mine}),
        "by_task": {task: speeds([r for r in records if subtask(r.task) == task], method, base) for task in tasks},
        "answers": len(mine),
        "identical": None if sampled and not parse_method(method).ours else len(mine) - len(diverged),
        "divergences": diverged,
    }


def speeds(records: Sequence[Record], method: str, base: str) -> dict[str, Any]:
    """Return speed and acceptance of one method for some records.

    `speedup` is the median over prompts; `speedup_pooled` is the ratio of `pooled` speeds.
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
    """Return tokens per second of all prompts together, from the median run of each prompt."""
    runs: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        runs[record.prompt].append((record.new_tokens, record.seconds))
    tokens, seconds = sum((np.median(same, axis=0) for same in runs.values()), np.zeros(2))
    return float(tokens / seconds) if seconds else 0.0


def split(records: Sequence[Record]) -> dict[str, float]:
    """Return milliseconds per new token by part; `other` is the rest of the wall time."""
    parts: Counter[str] = Counter()
    for record in records:
        wall, first = record.seconds * 1e3, record.first_token_s * 1e3
        known = record.split_ms or {"prefill": first, "verify": wall - first}
        parts.update(known | {"other": max(wall - sum(known.values()), 0.0)})
    tokens = sum(record.new_tokens for record in records)
    return {name: ms / tokens for name, ms in parts.items()} if tokens else {}


def losing(records: Sequence[Record], methods: Sequence[str], base: str) -> list[dict[str, Any]]:
    """Return prompts that a method answers slower than the baseline, worst first."""
    tasks = {record.prompt: record.task for record in records}
    looping = {record.prompt for record in records if record.looping}
    found = [
        {"prompt": prompt, "task": tasks[prompt], "method": method, "ratio": ratio, "looping": prompt in looping}
        for method in methods
        for prompt, ratio in ratios(records, method, base).items()
        if method != base and ratio < 1
    ]
    return sorted(found, key=lambda entry: (entry["ratio"], entry["prompt"], entry["method"]))


def markdown(summary: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    header = summary["header"]
    fence = "``" if "`" in header["command"] else "`"
    how = f"T = {header['temperature']}" if header["temperature"] else "greedy"
    title = f"{header['model']}: {', '.join(summary['methods'])} ({how}, {header['max_new_tokens']} new tokens)"
    lines = [f"# {escaped(title)}", "", escaped(facts(summary)), "", f"{fence}{header['command']}{fence}", ""]
    for section in sections(summary):
        lines += [f"## {section['title']}", "", escaped(section["text"]), ""]
        if section["rows"]:
            rule = "|---" * len(section["head"]) + "|"
            lines += [_row(section["head"]), rule, *map(_row, section["rows"]), ""]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"


def escaped(text: str) -> str:
    """Return text as one line escaped for Markdown: prompts, tasks and folders may have any name."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _MARKUP.sub(r"\\\g<0>", line)


def facts(summary: dict[str, Any]) -> str:
    """Return machine, versions, prompts and stores in one line."""
    header = summary["header"]
    done = f"{summary['prompts']} prompts, {summary['runs_done']} of {header['runs']} runs"
    stores = ", ".join(f"{path} ({size / 1e6:.0f} MB)" for path, size in header["stores"].items())
    what = f"{header['prompts']}; {done}; {header['dtype']} on {header['device']}; state {header['state']}"
    return f"{machine_summary(header['machine'])}; {what}" + (f"; stores {stores}" if stores else "")


def sections(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of a report as `title`, `text`, `head` and `rows`, losing cases first."""
    made = [*_losing(summary), _overview(summary), _tasks(summary), _costs(summary)]
    return made + [part for part in (_divergences(summary), _sources(summary)) if part["rows"]]


def _losing(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Table of prompts on which this library's methods are slower than the baseline, or than without drafts."""
    base, off = summary["baseline"], summary["slower_than_off"]
    mine = [entry for entry in summary["losing"] if parse_method(entry["method"]).ours]
    count = {name: f["speedup"]["prompts"] for name, f in summary["methods"].items() if parse_method(name).ours}
    answers = sum(number for name, number in count.items() if name != base)
    text = f"{len(mine)} of {answers} answers of this library's methods (medians over runs) are slower than {base}."
    tables = [("Where it loses", text, mine)]
    if OFF in count and base != OFF:
        text = (
            f"{len(off)} of {sum(count.values()) - count[OFF]} are more than {NOISE * 100:.0f} % slower than this "
            "library's own loop without drafts, the harder baseline: there drafting cost more than it gained."
        )
        tables.append(("Where drafting does not pay", text, off))
    return [
        {
            "title": title,
            "text": text + (f" The worst {LOSING_SHOWN}:" if len(entries) > LOSING_SHOWN else ""),
            "head": ["prompt", "task", "method", "speed"],
            "rows": [
                [e["prompt"], e["task"] + (" (loops)" if e["looping"] else ""), e["method"], f"{e['ratio']:.2f}"]
                for e in entries[:LOSING_SHOWN]
            ],
        }
        for title, text, entries in tables
    ]


def _overview(summary: dict[str, Any]) -> dict[str, Any]:
    with_off = all("over_off" in f for f in summary["methods"].values())
    head = ["method", "speed-up (95 %)", *(["over off (95 %)"] if with_off else [])]
    head += ["no loops", "pooled", "tokens/s", "tokens/pass", "nodes/pass", "identical"]
    rows = [
        [
            name,
            *(ratio(f[figure]) for figure in ("speedup", "over_off")[: 1 + with_off]),
            f"{f['not_looping']['speedup']['value']:.2f}",
            f"{f['speedup_pooled']:.2f}",
            f"{f['tokens_per_second']['value']:.0f}",
            f"{f['tokens_per_pass']:.2f}",
            "" if f["nodes_per_pass"] is None else f"{f['nodes_per_pass']:.1f}",
            "" if f["identical"] is None else f"{f['identical']}/{f['answers']}",
        ]
        for name, f in summary["methods"].items()
    ]
    text = (
        f"Speed is tokens per second over {summary['baseline']}'s within one run, prompts included: the median over "
        "prompts with a bootstrap interval, over answers that do not end in a loop, and all tokens by all seconds. "
        "Over off is the same over this library's loop without drafts. Tokens per second are this machine's, for "
        "orientation only. Identical are answers that equal the reference's token by token; sampled ones of "
        "transformers' loop draw other noise and agree in distribution only."
    )
    return {"title": "Methods", "text": text, "head": head, "rows": rows}


def ratio(value: dict[str, float]) -> str:
    """Format a ratio with its interval."""
    return f"{value['value']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def _tasks(summary: dict[str, Any]) -> dict[str, Any]:
    others = {name: f["by_task"] for name, f in summary["methods"].items() if name != summary["baseline"]}
    rows = [
        [task, str(f["speedup"]["prompts"])]
        + [f"{by[task]['speedup']['value']:.2f} ({by[task]['tokens_per_pass']:.2f})" for by in others.values()]
        for task, f in summary["methods"][summary["baseline"]]["by_task"].items()
    ]
    text = "Speed-up, and tokens per pass in brackets."
    return {"title": "Tasks", "text": text, "head": ["task", "prompts", *others], "rows": rows}


def _costs(summary: dict[str, Any]) -> dict[str, Any]:
    parts = (*PARTS, "other")
    rows = [
        [name, f"{f['first_token_ms']['value']:.1f}", f"{f['ms_per_token']['value']:.2f}"]
        + [f"{f['split_ms_per_token'][part]:.3f}" if part in f["split_ms_per_token"] else "" for part in parts]
        for name, f in summary["methods"].items()
    ]
    text = (
        "Milliseconds: until the first token, per token after it (medians over prompts), then where the time of a new "
        "token goes (all by all; of transformers' methods only the prompt is known)."
    )
    head = ["method", "first token", "per token", *parts]
    return {"title": "Where the time goes", "text": text, "head": head, "rows": rows}


def _divergences(summary: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [d["prompt"], name, str(d["run"]), str(d["turn"] + 1), str(d["position"]), f"{d['gap']:.4f}"]
        for name, figures in summary["methods"].items()
        for d in figures["divergences"]
    ]
    text = (
        "Answers that differ from the reference method's, with the gap of the two tokens' logits there. A gap near the "
        "rounding error of the number format is a tie that fell the other way; a large one is an error."
    )
    head = ["prompt", "method", "run", "turn", "token", "gap"]
    return {"title": "Divergences", "text": text, "head": head, "rows": rows}


def _sources(summary: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [name, source, str(count), f"{count / max(figures['new_tokens'], 1):.1%}"]
        for name, figures in summary["methods"].items()
        for source, count in figures["accepted_by_source"].items()
    ]
    head = ["method", "source", "accepted", "of new tokens"]
    text = "Drafted tokens that were accepted, by where they came from."
    return {"title": "Accepted tokens by source", "text": text, "head": head, "rows": rows}
