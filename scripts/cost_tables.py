"""Tables of costs (passes, stores, dense indexes, typing) from docs/data."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from published import block, markdown_table, millions, ratio, two

from retrieve_spec.cli_common import counted

TABLES: dict[str, Callable[[], str]] = {}
"""What can stand between the marks of a page."""


@block(TABLES, "passes")
def passes(made: dict[str, Any]) -> list[str]:
    """What a pass costs beside plain's, one line for each kind and context."""
    ratios = {(entry["pass"], entry["context"]): entry["ratio"] for entry in made["passes"]}
    plain = {entry["context"]: entry["ms"] for entry in made["passes"] if entry["pass"] == "plain"}
    widths = sorted({int(kind.split()[1]) for kind, _ in ratios if kind != "plain"})
    rows = []
    for context, milliseconds in plain.items():
        for kind in ("static", "ordinary"):
            own = "" if kind == "static" else ", the model's own forward"
            cells = [f"{ratios[f'{kind} {width}', context]:.2f}" for width in widths]
            rows.append([f"{context:,} tokens{own}", f"{milliseconds:.1f} ms", *cells])
    head = ["context", "plain's pass", *(f"{width} nodes" for width in widths)]
    return markdown_table(head, rows)


@block(TABLES, "batches")
def batches(made: dict[str, Any]) -> list[str]:
    """Speed over the original `generate`, one line for each number of rows."""
    entries = {(entry["temperature"], entry["rows"]): entry for entry in made["batches"]}
    temperatures = sorted({temperature for temperature, _ in entries})
    head = ["rows"]
    for temperature in temperatures:
        label = f"T = {temperature:g}" if temperature else "greedy"
        head += [label, f"{label}, drafts off"]
    rows = []
    for number in sorted({number for _, number in entries}):
        found = [entries[temperature, number] for temperature in temperatures]
        rows.append([str(number), *(f"{entry[name]['ratio']:.2f}" for entry in found for name in ("auto", "off"))])
    same = all(entry.get("identical", True) for entry in made["batches"])
    said = f"{made['new_tokens']} new tokens of each row; greedy text is {'' if same else 'not '}that of `generate`."
    return [*markdown_table(head, rows), "", said]


@block(TABLES, "rollouts")
def rollouts(made: dict[str, Any]) -> list[str]:
    """Speed over the original `generate` in each epoch, and what the last tenth of the rows take alone."""
    rows = [
        [
            f"T = {found['temperature']:g}",
            str(found["prompts"]),
            str(number),
            f"{plain['seconds']:.1f} s",
            *_epoch(siblings),
            *_epoch(memory),
        ]
        for found in made["epochs"]
        for number, (plain, siblings, memory) in enumerate(
            zip(found["plain"], found["siblings"], found["memory"], strict=True), 1
        )
    ]
    head = ["", "prompts", "epoch", "`generate`", "siblings", "tokens/pass", "and memory", "tokens/pass"]
    lines = [*markdown_table(head, rows), ""]
    ends = [
        [f"T = {found['temperature']:g}", str(found["rows"]), *_ends(found["plain"]), *_ends(found["drafts"])]
        for found in made["stragglers"]
    ]
    head = ["", "rows", "`generate`, all", "the last tenth", "drafts, all", "the last tenth"]
    return [*lines, *markdown_table(head, ends)]


def _epoch(figures: dict[str, float]) -> list[str]:
    return [f"{figures['ratio']:.2f}", f"{figures['tokens_per_pass']:.2f}"]


def _ends(figures: dict[str, float]) -> list[str]:
    return [f"{figures['seconds']:.1f} s", f"{figures['tail_s']:.1f} s"]


@block(TABLES, "arrivals")
def arrivals(made: dict[str, Any]) -> list[str]:
    """Seconds until all are answered, and that one waits, for each way to serve them."""
    found = {name: figures for name, figures in made["arrivals"].items() if isinstance(figures, dict)}
    names = {name: f"original `generate`, {name}" for name in found} | {"auto": "this library, a thread for each"}
    rows = [
        [names[name], *(f"{figures[key]:.1f} s" for key in ("total_s", "p50_s", "p95_s"))]
        for name, figures in found.items()
    ]
    head = [f"{made['arrivals']['requests']} requests", "all answered", "latency, median", "p95"]
    return markdown_table(head, rows)


@block(TABLES, "datastores")
def datastores(made: dict[str, Any]) -> list[str]:
    """Size, opening and walking of one large store."""
    corpus, store, step = made["corpus"], made["store"], made["step"]
    rows = [
        ["tokens, real ones among them", f"{millions(corpus['tokens'])}, {millions(corpus['real_tokens'])}"],
        ["exact index", f"{store['exact_bytes_per_token']:.2f} bytes per token"],
        ["n-gram table", f"{store['ngram_share_of_exact']:.2f} of the exact index"],
        ["open", f"{two(made['open']['first_ms'])} ms the first time, {two(made['open']['median_ms'])} ms after"],
        ["cursor step with next-token counts", f"{two(step['p50_us'])} µs median, {two(step['p99_us'])} µs p99"],
        ["steps that fall off the match", f"{step['steps_that_fell_off']:.0%}"],
        ["mean match", f"{step['mean_match']:.1f} tokens"],
    ]
    return markdown_table(["", ""], rows)


@block(TABLES, "datastores-changes")
def datastore_changes(made: dict[str, Any]) -> list[str]:
    """Builds by more and more workers, and changes of what they built."""
    build = made["build"]
    runs = build["workers"]
    first = next(iter(runs.values()))
    rows = [
        ["whole build", *(f"{millions(run['tokens_per_second'])} tokens/s" for run in runs.values())],
        ["beside one", *(f"{first['seconds'] / run['seconds']:.2f} times" for run in runs.values())],
        ["processor time", *(f"{two(run['cpu_seconds'])} s" for run in runs.values())],
        ["reading, filtering, encoding", *(f"{two(run['stages']['reading'])} s" for run in runs.values())],
        ["indexing", *(f"{two(run['stages']['indexing'])} s" for run in runs.values())],
        ["memory of all processes", *(f"{two(run['memory_gb'])} GB" for run in runs.values())],
    ]
    documents, segments = counted(build["documents"], "document"), counted(build["segments"], "segment")
    size = f"{millions(build['tokens'])} tokens of {documents}, in {segments}; "
    same = "the same bytes each time:" if build["same"] else "not the same bytes each time:"
    sync, merge = made["sync"], made.get("merge")
    changes = [
        ["suffix sorting, one core", f"{millions(made['sorting']['tokens_per_second'])} tokens/s"],
        ["`remove` of one document", f"{two(made['remove']['seconds'])} s"],
        *([["`merge` of its halves", f"{two(merge['seconds'])} s"]] if merge else []),
        [f"`sync` after a change of one of {sync['files']:,} files", f"{two(sync['seconds'])} s"],
    ]
    head = ["workers", *runs]
    return [size + same, "", *markdown_table(head, rows), "", *markdown_table(["", ""], changes)]


@block(TABLES, "datastores-segments")
def datastore_segments(made: dict[str, Any]) -> list[str]:
    """Steps of the longest-match cursors of more and more segments."""
    many = made["many_segments"]
    rows = []
    for number, step in many["step"].items():
        each = f"{step['p50_us'] / int(number):.2f} µs"
        rows.append([number, f"{two(step['p50_us'])} / {two(step['p90_us'])} µs", each])
    plan = many["planning"]
    size = f"{many['segments']} segments, {millions(many['tokens'])} tokens, {many['bytes'] / 1e9:.1f} GB in all. "
    size += f"Its manifest is read in {two(many['manifest_ms'])} ms, and the store opened in "
    size += f"{two(many['open']['median_ms'])} ms; the process that plans `compact` takes {two(plan['memory_gb'])} GB."
    return [size, "", *markdown_table(["segments", "step, median / p90", "per segment"], rows)]


PEERS = {
    "suffix_array": "suffix array",
    "static_automaton": "static automaton",
    "suffix_decoding": "SuffixDecoding",
    "plain_automaton": "Python automaton",
}


@block(TABLES, "datastores-peers")
def datastore_peers(made: dict[str, Any]) -> list[str]:
    """What others make of the same text."""
    rows, skipped = [], []
    for name, figures in made["peers"].items():
        if "skipped" in figures:
            skipped.append(f"{PEERS[name]}: skipped ({figures['skipped']})")
            continue
        rate, step = millions(figures["tokens_per_second"]), f"{figures['p50_us']:.1f} / {figures['p99_us']:.1f} µs"
        rows.append([PEERS[name], f"{two(figures['bytes_per_token'])}", f"{rate} tokens/s", step])
    head = ["", "bytes per token", "built", "step, median / p99"]
    return [*markdown_table(head, rows), "", *skipped]


@block(TABLES, "dense")
def dense(made: dict[str, Any]) -> list[str]:
    """Kinds of dense indexes."""
    rows = []
    for figures in made["indexes"]:
        codes = f", {figures['key_bytes']} of them codes" if figures["key_bytes"] else ""
        times = f"{figures['query_ms']['p50']:.2f} / {figures['query_ms']['p99']:.2f} ms"
        row = [figures["index"], f"{figures['recall_at_10']:.3f}", times, f"{figures['bytes_per_vector']:.0f}{codes}"]
        rows.append([*row, f"{figures['build_s']:.0f} s"])
    head = ["index", "recall@10", "query on one core, median / p99", "bytes per key", "built"]
    text = (
        f"{made['vectors']:,} keys of {made['dims']} dims, which keep {made['variance_kept']:.2f} of the variance of "
        f"the {made['hidden_size']}; {made['queries']:,} queries, 50 neighbours asked for."
    )
    if made["states_per_second"]:
        text += f" The model made {made['states_per_second']:,.0f} hidden states per second."
    return [text, "", *markdown_table(head, rows)]


@block(TABLES, "dense", name="thinning", alone=False)
def thinning(made: dict[str, Any]) -> list[str]:
    """What keys are worth that `--thin` would keep."""
    names = {"none": "none", "all": "all", "thinned": "thinned", "random": "as many at random"}
    rows = []
    for figures in made["thinning"]:
        alone = f"{figures['alone']:.2f}" if "alone" in figures else ""
        rows.append([names[figures["keys"]], f"{figures['share']:.0%}", alone, f"{figures['with_exact']:.2f}"])
    return markdown_table(["keys", "kept", "dense alone", "better of dense and exact matches"], rows)


@block(TABLES, "typing")
def typing(made: dict[str, Any]) -> list[str]:
    """Typing in an editor: with drafting, without, and without the kept keys and values."""
    variants = {name: f for name, f in made.items() if isinstance(f, dict) and "latency_ms" in f}
    real = made["typed_with_real_gaps"]
    marks = list(next(iter(variants.values()))["visible_characters"])
    lines = {
        "requests": [str(f["requests"]) for f in variants.values()],
        "answer, p50 / p95": [_milliseconds(f["latency_ms"]) for f in variants.values()],
        f"characters visible at {' / '.join(marks)} ms": [
            " / ".join(f"{f['visible_characters'][mark]:.0f}" for mark in marks) for f in variants.values()
        ],
        "answered of those typed with real gaps": [
            f"{real[name]['answered']} of {sum(real[name].values())}" for name in variants
        ],
        "time outside the model, p50 / p95": [_milliseconds(f["outside_model_ms"]) for f in variants.values()],
    }
    rows = [[what, *cells] for what, cells in lines.items()]
    requests = next(iter(variants.values()))["requests"]
    straight = requests - made["looping_requests"]
    seen, apart = made["visible_ratio"]["250"], made["visible_ratio_without_loops"]["250"]
    text = f"Typed in {', '.join(made['setup']['files'])} of {made['setup']['package']}."
    if seen and apart:
        text += (
            f" At 250 ms that is {seen:.2f} times as many characters as without drafts, {apart:.2f} times in the "
            f"{straight} of {requests} requests whose text does not loop (most of what so small a model writes does)."
        )
    return [*markdown_table(["", *variants], rows), "", text]


@block(TABLES, "larger")
def larger(made: dict[str, Any]) -> list[str]:
    """Recorded answers in real passes of larger models."""
    rows = []
    for figures in made["sizes"].values():
        for method, f in figures["methods"].items():
            drafted = "tokens_per_pass" in f
            rows.append(
                [
                    f"{figures['parameters'] / 1e9:.2f} B",
                    method,
                    ratio(f["speedup"]),
                    f"{f['speedup_pooled']:.2f}",
                    f"{f['after_prompt_pooled']:.2f}",
                    f"{f['slower_than_plain']} of {made['answers']}",
                    two(f["tokens_per_second"]),
                    f"{f['tokens_per_pass']:.2f}" if drafted else "",
                    f"{f['nodes_per_pass']:.1f}" if drafted else "",
                    f"{f['same']}/{made['answers']}",
                ]
            )
    head = ["model", "method", "speed-up (95 %)", "pooled", "without the prompt", "slower than plain", "tokens/s"]
    head += ["tokens/pass", "nodes/pass", "identical"]
    size = f"{made['answers']} answers, {made['new_tokens']:,} tokens behind {made['prompt_tokens']:,} of prompts."
    return [size, "", *markdown_table(head, rows)]


@block(TABLES, "edits")
def edits(made: dict[str, Any]) -> list[str]:
    """Characters per second of recorded edits through the server."""
    rows = [
        [
            file.removesuffix(".jsonl"),
            name,
            f"{figures['characters_per_second']:.1f}",
            ratio(figures["speedup"]),
            f"{figures['speedup_pooled']:.2f}",
            f"{figures['tokens_per_pass']:.2f}",
        ]
        for file, found in made["files"].items()
        for name, figures in found["variants"].items()
    ]
    several = ", ".join(f"{found['edits']} of {file.removesuffix('.jsonl')}" for file, found in made["files"].items())
    text = f"A model of {made['parameters'] / 1e9:.2f} B parameters with random weights; edits: {several}."
    head = ["file", "", "characters/s", "over drafting off (95 %)", "pooled", "tokens/pass"]
    return [*textwrap.wrap(text, 118), "", *markdown_table(head, rows)]


def _milliseconds(times: dict[str, float]) -> str:
    return f"{two(times['p50'])} / {two(times['p95'])} ms"


@block(TABLES, "typing-overhead", part="typing")
def typing_overhead(made: dict[str, Any]) -> list[str]:
    """The server's own time per request, by size of the workspace."""
    rows = []
    for package, figures in made["overhead_ms"].items():
        space = figures["workspace"]
        size = f"{package}: {space['files']} files, {millions(space['characters'])} characters"
        parts: list[Any] = [figures[part] for part in ("read", "prompt", "drafts", "answer", "total")]
        rows.append([size, *(f"{two(part['p50'])} / {two(part['p95'])}" for part in parts)])
    head = ["workspace", "reading", "prompt", "what to draft from", "answer", "all"]
    return markdown_table(head, rows)
