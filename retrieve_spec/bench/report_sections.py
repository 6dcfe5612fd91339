"""Sections of a run's report: titles, what the figures mean, tables of text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from retrieve_spec.bench.machine import summary as machine_summary
from retrieve_spec.bench.methods import OFF, parse_method
from retrieve_spec.bench.prompts import SPEC_BENCH
from retrieve_spec.bench.results import PARTS
from retrieve_spec.bench.stats import CLASSES, LENGTHS, NOISE

LOSING_SHOWN = 15
NODES = (0, 1, 2, 4, 8, 16, 32, 64)


def title(summary: dict[str, Any]) -> str:
    """Model, methods and settings."""
    header = summary["header"]
    how = f"T = {header['temperature']}" if header["temperature"] else "greedy"
    return f"{header['model']}: {', '.join(summary['methods'])} ({how}, {header['max_new_tokens']} new tokens)"


def facts(summary: dict[str, Any]) -> str:
    """Machine, versions, prompts and stores in one line."""
    header = summary["header"]
    done = f"{summary['prompts']} prompts, {summary['runs_done']} of {header['runs']} runs"
    stores = ", ".join(f"{path} ({size / 1e6:.0f} MB)" for path, size in header["stores"].items())
    what = f"{header['prompts']}; {done}; {header['dtype']} on {header['device']}; state {header['state']}"
    return f"{machine_summary(header['machine'])}; {what}" + (f"; stores {stores}" if stores else "")


def sections(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables of a report; where it loses comes first."""
    made = [*_losing(summary), _overview(summary), _tasks(summary), _costs(summary)]
    if SPEC_BENCH in summary["header"]["prompts"]:
        made.append(_spec_bench(summary))
    if any(figures["divergences"] for figures in summary["methods"].values()):
        made.append(_divergences(summary))
    if any(figures["accepted_by_source"] for figures in summary["methods"].values()):
        made.append(_sources(summary))
    return made + [section for section in (_lengths(summary), _classes(summary), _curves(summary)) if section["rows"]]


def _overview(summary: dict[str, Any]) -> dict[str, Any]:
    with_off = all("over_off" in f for f in summary["methods"].values())
    head = ["method", "speed-up (95 %)", *(["over off (95 %)"] if with_off else [])]
    head += ["no loops", "pooled", "tokens/s", "tokens/pass", "nodes/pass", "identical"]
    rows = []
    for name, f in summary["methods"].items():
        speedup, nodes = f["speedup"], f["nodes_per_pass"]
        rows.append(
            [
                name,
                ratio(speedup),
                *([ratio(f["over_off"])] if with_off else []),
                f"{f['not_looping']['speedup']['value']:.2f}",
                f"{f['speedup_pooled']:.2f}",
                f"{f['tokens_per_second']['value']:.0f}",
                f"{f['tokens_per_pass']:.2f}",
                "" if nodes is None else f"{nodes:.1f}",
                "" if f["identical"] is None else f"{f['identical']}/{f['answers']}",
            ]
        )
    text = (
        f"Speed is tokens per second over {summary['baseline']}'s within one run, prompts included: the median over "
        "prompts with a bootstrap interval, over answers that do not end in a loop, and all tokens by all seconds. "
        "Over off is the same over this library's loop without drafts. Tokens per second are this machine's, for "
        "orientation only. Identical are answers that equal the reference's token by token; sampled ones of "
        "transformers' loop draw other noise and agree in distribution only."
    )
    return {"title": "Methods", "text": text, "head": head, "rows": rows}


def ratio(value: dict[str, float]) -> str:
    """A ratio and its interval."""
    return f"{value['value']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def _losing(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts on which this library's methods are slower than the baseline, and than its loop without drafts."""
    base = summary["baseline"]
    mine = [entry for entry in summary["losing"] if parse_method(entry["method"]).ours]
    count = {name: f["speedup"]["prompts"] for name, f in summary["methods"].items() if parse_method(name).ours}
    answers = sum(number for name, number in count.items() if name != base)
    text = f"{len(mine)} of {answers} answers of this library's methods (medians over runs) are slower than {base}."
    made = [_losing_table("Where it loses", text, mine)]
    off = summary.get("slower_than_off", [])
    if OFF in summary["methods"] and base != OFF:
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
    return {"title": title, "text": text, "head": ["prompt", "task", "method", "speed"], "rows": rows}


def _tasks(summary: dict[str, Any]) -> dict[str, Any]:
    methods = [name for name in summary["methods"] if name != summary["baseline"]]
    tasks = next(iter(summary["methods"].values()))["by_task"]
    rows = []
    for task in tasks:
        row = [task, str(tasks[task]["speedup"]["prompts"])]
        for name in methods:
            f = summary["methods"][name]["by_task"][task]
            row.append(f"{f['speedup']['value']:.2f} ({f['tokens_per_pass']:.2f})")
        rows.append(row)
    text = "Speed-up, and tokens per pass in brackets."
    return {"title": "Tasks", "text": text, "head": ["task", "prompts", *methods], "rows": rows}


def _costs(summary: dict[str, Any]) -> dict[str, Any]:
    parts = (*PARTS, "other")
    rows = []
    for name, f in summary["methods"].items():
        split = f["split_ms_per_token"]
        peak = f["peak_memory_bytes"]
        rows.append(
            [
                name,
                f"{f['first_token_ms']['value']:.1f}",
                f"{f['ms_per_token']['value']:.2f}",
                *(f"{split[part]:.3f}" if part in split else "" for part in parts),
                " + ".join(f"{size / 1e6:,.0f}" for size in peak.values()),
            ]
        )
    text = (
        "Milliseconds: until the first token, per token after it (medians over prompts), then where the time of a new "
        "token goes (all by all; of transformers' methods only the prompt is known). Memory is the peak of the process "
        "in MB (and of the GPU), which holds the model and every method's state."
    )
    head = ["method", "first token", "per token", *parts, "memory"]
    return {"title": "Where the time goes", "text": text, "head": head, "rows": rows}


def _spec_bench(summary: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [
            name,
            f"{f['speedup_spec_bench']:.3f}",
            f"{f['speedup_means']:.3f}",
            f"{f['speedup_pooled']:.3f}",
            f"{f['tokens_per_pass']:.3f}",
        ]
        for name, f in summary["methods"].items()
    ]
    text = (
        "Spec-Bench divides mean speeds and counts the baseline's tokens by tokenising its text again, less one for "
        "each turn; beside it the same with ids counted on both sides, and all tokens by all seconds."
    )
    head = ["method", "its definition", "ids counted", "pooled", "mean accepted tokens"]
    return {"title": "Spec-Bench's speed-up", "text": text, "head": head, "rows": rows}


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
    return {
        "title": "Divergences",
        "text": text,
        "head": ["prompt", "method", "run", "turn", "token", "gap"],
        "rows": rows,
    }


def _sources(summary: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for name, figures in summary["methods"].items():
        for source, count in figures["accepted_by_source"].items():
            rows.append([name, source, str(count), f"{count / max(figures['new_tokens'], 1):.1%}"])
    head = ["method", "source", "accepted", "of new tokens"]
    return {"title": "Accepted tokens by source", "text": "", "head": head, "rows": rows}


def _lengths(summary: dict[str, Any]) -> dict[str, Any]:
    rows = [
        [name, *(f"{share:.0%}" for share in figures["accepted_lengths"])]
        for name, figures in summary["methods"].items()
        if "accepted_lengths" in figures
    ]
    ends = [str(b - 1) if b - 1 == a else f"{a}-{b - 1}" for a, b in pairwise(LENGTHS)]
    head = ["method", *ends, f"{LENGTHS[-1]}+"]
    return {"title": "Passes by accepted tokens", "text": "", "head": head, "rows": rows}


def _classes(summary: dict[str, Any]) -> dict[str, Any]:
    """Of `auto` and its kin only: published rules promise nothing that could be right."""
    rows = [
        [name, *(f"{expected:.2f} / {accepted:.2f}" for expected, accepted in figures["expected_and_accepted"])]
        for name, figures in summary["methods"].items()
        if "expected_and_accepted" in figures and name.startswith("auto")
    ]
    text = (
        "Accepted tokens of a pass, expected / found, in classes of as many passes each by what was expected. "
        "Drafts are chosen by expectation."
    )
    head = ["method", *(str(number + 1) for number in range(CLASSES))]
    return {"title": "Is the expectation right?", "text": text, "head": head, "rows": rows}


def _curves(summary: dict[str, Any]) -> dict[str, Any]:
    curves = summary["header"].get("cost_curves", {})
    rows = [
        [name, *(f"{curve[nodes] * 1e3:.2f}" if nodes < len(curve) else "" for nodes in NODES)]
        for name, curve in curves.items()
        if curve and name in summary["methods"]
    ]
    text = "Milliseconds of a pass by number of draft nodes, all included, as measured; budgets are chosen by it."
    return {"title": "What a pass costs", "text": text, "head": ["method", *map(str, NODES)], "rows": rows}
