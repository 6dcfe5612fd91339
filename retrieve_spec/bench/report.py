"""Report of a results folder: `summary.json` and the tables of `report.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from retrieve_spec.bench.machine import summary as machine_summary
from retrieve_spec.bench.methods import OFF, parse_method
from retrieve_spec.bench.results import PARTS, read_header, read_records
from retrieve_spec.bench.stats import NOISE, summarise
from retrieve_spec.errors import TraceError

LOSING_SHOWN = 15
NODES = (0, 1, 2, 4, 8, 16, 32, 64)
"""Draft nodes for which the cost of a pass is shown."""
_MARKUP = re.compile(r"[\\`*<&\[|~]")


def write_report(folder: Path) -> dict[str, Any]:
    """Write all files of the report; return the summary.

    Raises
    ------
    TraceError
        The folder holds no results.
    """
    header, records = read_header(folder), read_records(folder)
    if not records:
        raise TraceError("at least one answered prompt", f"none in {folder}", "Let `bench run` finish a prompt.")
    summary = summarise(header, records)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(summary), encoding="utf-8")
    return summary


def markdown(summary: dict[str, Any]) -> str:
    """The report for a terminal or a repository."""
    header = summary["header"]
    fence = "``" if "`" in header["command"] else "`"
    how = f"T = {header['temperature']}" if header["temperature"] else "greedy"
    title = f"{header['model']}: {', '.join(summary['methods'])} ({how}, {header['max_new_tokens']} new tokens)"
    lines = [f"# {escaped(title)}", "", escaped(facts(summary)), "", f"{fence}{header['command']}{fence}", ""]
    for section in sections(summary):
        lines += [f"## {section['title']}", ""]
        if section["text"]:
            lines += [escaped(section["text"]), ""]
        if section["rows"]:
            rule = "|---" * len(section["head"]) + "|"
            lines += [_row(section["head"]), rule, *map(_row, section["rows"]), ""]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"


def escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is: prompts, tasks and folders may have any name."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _MARKUP.sub(r"\\\g<0>", line)


def facts(summary: dict[str, Any]) -> str:
    """Machine, versions, prompts and stores in one line."""
    header = summary["header"]
    done = f"{summary['prompts']} prompts, {summary['runs_done']} of {header['runs']} runs"
    stores = ", ".join(f"{path} ({size / 1e6:.0f} MB)" for path, size in header["stores"].items())
    what = f"{header['prompts']}; {done}; {header['dtype']} on {header['device']}; state {header['state']}"
    return f"{machine_summary(header['machine'])}; {what}" + (f"; stores {stores}" if stores else "")


def sections(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables of a report as `title`, `text`, `head` and `rows`; where it loses comes first."""
    made = [*_losing(summary), _overview(summary), _tasks(summary), _costs(summary)]
    return made + [part for part in (_divergences(summary), _sources(summary), _curves(summary)) if part["rows"]]


def _section(title: str, text: str, head: Sequence[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"title": title, "text": text, "head": list(head), "rows": rows}


def _losing(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts on which this library's methods are slower than the baseline, and than its loop without drafts."""
    base = summary["baseline"]
    mine = [entry for entry in summary["losing"] if parse_method(entry["method"]).ours]
    count = {name: f["speedup"]["prompts"] for name, f in summary["methods"].items() if parse_method(name).ours}
    answers = sum(number for name, number in count.items() if name != base)
    text = f"{len(mine)} of {answers} answers of this library's methods (medians over runs) are slower than {base}."
    made = [_losing_table("Where it loses", text, mine)]
    if OFF in count and base != OFF:
        off = summary["slower_than_off"]
        text = (
            f"{len(off)} of {sum(count.values()) - count[OFF]} are more than {NOISE * 100:.0f} % slower than this "
            "library's own loop without drafts, the harder baseline: there drafting cost more than it gained."
        )
        made.append(_losing_table("Where drafting does not pay", text, off))
    return made


def _losing_table(title: str, text: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    if len(entries) > LOSING_SHOWN:
        text += f" The worst {LOSING_SHOWN}:"
    rows = [
        [e["prompt"], e["task"] + (" (loops)" if e["looping"] else ""), e["method"], f"{e['ratio']:.2f}"]
        for e in entries[:LOSING_SHOWN]
    ]
    return _section(title, text, ["prompt", "task", "method", "speed"], rows)


def _overview(summary: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for name, f in summary["methods"].items():
        nodes, same = f["nodes_per_pass"], f["identical"]
        rows.append([name, ratio(f["speedup"])] + ([ratio(f["over_off"])] if "over_off" in f else []))
        rows[-1] += [f"{f['not_looping']['speedup']['value']:.2f}", f"{f['speedup_pooled']:.2f}"]
        rows[-1] += [f"{f['tokens_per_second']['value']:.0f}", f"{f['tokens_per_pass']:.2f}"]
        rows[-1] += ["" if nodes is None else f"{nodes:.1f}", "" if same is None else f"{same}/{f['answers']}"]
    with_off = all("over_off" in f for f in summary["methods"].values())
    head = ["method", "speed-up (95 %)", *(["over off (95 %)"] if with_off else [])]
    head += ["no loops", "pooled", "tokens/s", "tokens/pass", "nodes/pass", "identical"]
    text = (
        f"Speed is tokens per second over {summary['baseline']}'s within one run, prompts included: the median over "
        "prompts with a bootstrap interval, over answers that do not end in a loop, and all tokens by all seconds. "
        "Over off is the same over this library's loop without drafts. Tokens per second are this machine's, for "
        "orientation only. Identical are answers that equal the reference's token by token; sampled ones of "
        "transformers' loop draw other noise and agree in distribution only."
    )
    return _section("Methods", text, head, rows)


def ratio(value: dict[str, float]) -> str:
    """A ratio and its interval."""
    return f"{value['value']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def _tasks(summary: dict[str, Any]) -> dict[str, Any]:
    others = {name: f["by_task"] for name, f in summary["methods"].items() if name != summary["baseline"]}
    rows = [
        [task, str(f["speedup"]["prompts"])]
        + [f"{by[task]['speedup']['value']:.2f} ({by[task]['tokens_per_pass']:.2f})" for by in others.values()]
        for task, f in summary["methods"][summary["baseline"]]["by_task"].items()
    ]
    return _section("Tasks", "Speed-up, and tokens per pass in brackets.", ["task", "prompts", *others], rows)


def _costs(summary: dict[str, Any]) -> dict[str, Any]:
    parts = (*PARTS, "other")
    rows = []
    for name, f in summary["methods"].items():
        spent = [f"{f['split_ms_per_token'][part]:.3f}" if part in f["split_ms_per_token"] else "" for part in parts]
        rows.append([name, f"{f['first_token_ms']['value']:.1f}", f"{f['ms_per_token']['value']:.2f}", *spent])
    text = (
        "Milliseconds: until the first token, per token after it (medians over prompts), then where the time of a new "
        "token goes (all by all; of transformers' methods only the prompt is known)."
    )
    return _section("Where the time goes", text, ["method", "first token", "per token", *parts], rows)


def _divergences(summary: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [d["prompt"], name, str(d["run"]), str(d["turn"] + 1), str(d["position"]), f"{d['gap']:.4f}"]
        for name, figures in summary["methods"].items()
        for d in figures["divergences"]
    ]
    text = (
        "Answers that differ from the reference method's, with the gap of the two highest logits there. A gap near the "
        "rounding error of the number format is a tie that fell the other way; a large one is an error."
    )
    return _section("Divergences", text, ["prompt", "method", "run", "turn", "token", "gap"], rows)


def _sources(summary: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [name, source, str(count), f"{count / max(figures['new_tokens'], 1):.1%}"]
        for name, figures in summary["methods"].items()
        for source, count in figures["accepted_by_source"].items()
    ]
    return _section("Accepted tokens by source", "", ["method", "source", "accepted", "of new tokens"], rows)


def _curves(summary: dict[str, Any]) -> dict[str, Any]:
    curves = summary["header"].get("cost_curves", {})
    rows = [
        [name, *(f"{curve[nodes] * 1e3:.2f}" if nodes < len(curve) else "" for nodes in NODES)]
        for name, curve in curves.items()
        if curve and name in summary["methods"]
    ]
    text = "Milliseconds of a pass by number of draft nodes, all included, as measured; budgets are chosen by it."
    return _section("What a pass costs", text, ["method", *map(str, NODES)], rows)
