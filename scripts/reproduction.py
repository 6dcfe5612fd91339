"""Parts of the reproduction: their measurements, and results in docs/data/*.json; `scripts/reproduce` calls it."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cost_parts
import measuring
from measuring import NotPossible, bench, native, replays, the_trace

SAMPLED = {"t0": [], "t0.7": ["--temperature", "0.7", "--top-p", "0.95"], "t1.0": ["--temperature", "1.0"]}
PRESETS = "suffix,sam,anpd,ours/prompt-lookup,token-recycling,sam+recycling,stand,logitspec,lookahead,adaptive-trigram"
LEADING = "suffix,sam,anpd,sam+recycling"
SPEC_BENCH = "specbench_vicuna7b_greedy.jsonl"
OTHER_ANSWERS = "chat_arenabench_5models_temp0.jsonl"
KNOWLEDGE_FILES = (
    SPEC_BENCH,
    "code_classeval_incremental_deepseekcoder_greedy.jsonl",
    "code_evalplus_gpt35_llama3_mistral_greedy.jsonl",
    "code_fim_evocodebench_greedy.jsonl",
    "codeedit_aider_claude35sonnet.jsonl",
    "agent_moatless_claude35sonnet_temp0.jsonl",
)
DENSE_TOKENS = 500_000
"""Of the store that has a key of a hidden state for each."""
KNOWN = {
    "cold": ("--without", "phrases"),
    "warm": ("--phrases", "warm"),
    "kept": ("--session",),
    "second-day": ("--second-day",),
}
"""What `auto` knows beside the text, and how `bench replay` is told."""
SAMPLED_FILES = {
    "reasoning_r1distill_multisample10.jsonl": (2, 4, 8, 10),
    "agent_taubench_airline_gpt4o_4trials.jsonl": (2, 4),
}
"""Files with several answers to each question, and how many of them are replayed together: as many as there are."""
EPOCHS_FILE, EPOCHS = "reasoning_r1distill_multisample10.jsonl", 5
"""The file whose answers are replayed as epochs over its questions, and how many; two answers in each."""
EDITED_FILES = ("codeedit_aider_claude35sonnet.jsonl", "codeedit_nofuneval_deepseekcoder33b_greedy.jsonl")
INTERRUPTED = 130
TIMED_ROWS, TIMED_TOKENS = 10, 2_500
"""Of each file, where only times are measured again; acceptance does not depend on the machine."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to measure.

    Attributes
    ----------
    minutes
        On two quiet cores; where it needs stores, with the stores built.
    about
        For the list.
    run
        Measures it.
    traces
        Whether it replays recorded answers.
    """

    minutes: float
    about: str
    run: Callable[[argparse.Namespace], Any]
    traces: bool = False


def reference(args: argparse.Namespace) -> None:
    """Unseen Python files at three temperatures."""
    for name, sampling in SAMPLED.items():
        words = ["--prompts", "builtin", "--tasks", "unseen", "--methods", "plain,prompt-lookup,off,auto"]
        bench(args, f"reference-{name}", *words, *sampling, limit=24)


def stores(args: argparse.Namespace) -> list[str]:
    """Options that draft from the two stores."""
    return [word for path in measuring.stores(args) for word in ("--store", str(path))]


def with_stores(args: argparse.Namespace) -> None:
    """Unseen Python files with two stores of other code, and without them."""
    opened = stores(args)
    for name, sampling in SAMPLED.items():
        words = ["--prompts", "builtin", "--tasks", "unseen", "--methods", "plain,off,auto~ngram~exact,auto"]
        bench(args, f"stores-{name}", *words, *opened, *sampling, limit=24)


def presets(args: argparse.Namespace) -> None:
    """Every preset and auto, cold and with everything kept."""
    opened = stores(args)[:2]
    for state in ("cold", "shared"):
        methods = f"plain,prompt-lookup,off,auto,{PRESETS},rest,hierarchy"
        words = ["--prompts", "builtin", "--tasks", "unseen", "--methods", methods, "--state", state, *opened]
        bench(args, f"presets-{state}", *words, limit=12)


def never_slower(args: argparse.Namespace) -> None:
    """Text with nothing to look up."""
    words_file = measuring.OUT / "random-words.jsonl"  # a file, so that the command that is published can be repeated
    words_file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"words {seed}", "task": "words", "prompt": random_words(seed)}) for seed in range(12)]
    words_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    methods = ["--methods", "plain,off,auto"]
    bench(args, "slower-words-t1.0", "--prompts", str(words_file), *methods, "--temperature", "1.0", limit=12)
    unseen = ["--prompts", "builtin", "--tasks", "unseen", *methods]
    for temperature in ("1.0", "1.5"):
        bench(args, f"slower-unseen-t{temperature}", *unseen, "--temperature", temperature, limit=12)


def random_words(seed: int) -> str:
    """Invented words in random order."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(3, 9))) for _ in range(150)]
    return " ".join(words) + " "


def workloads(args: argparse.Namespace, sampling: str = "t0", name: str = "workloads") -> None:
    """Four kinds of text, with the presets that come near `auto` on any of them (of all: `presets`)."""
    methods = f"plain,off,auto,{LEADING}"
    words = ["--prompts", "builtin", "--tasks", "unseen,edit,structured,prose", "--methods", methods]
    bench(args, name, *words, *SAMPLED[sampling], limit=6, runs=3)


def sampled_workloads(args: argparse.Namespace) -> None:
    """Four kinds of text, sampled: greedy prose of so small a model loops."""
    workloads(args, "t0.7", "workloads-t0.7")


def builtin(args: argparse.Namespace) -> None:
    """The default workload, all five kinds."""
    words = ["--prompts", "builtin", "--methods", "plain,prompt-lookup,off,auto"]
    bench(args, "reference-tasks", *words, limit=6)


def sources(args: argparse.Namespace) -> None:
    """What each source adds to auto, on the bundled model: auto without it."""
    left_out = "auto~context,auto~session,auto~recycling,auto~ngram,auto~exact,auto~ngram~exact"
    words = ["--prompts", "builtin", "--tasks", "unseen", "--methods", f"off,auto,{left_out}", "--state", "shared"]
    for name in ("t0", "t0.7"):
        bench(args, f"sources-live-{name}", *words, *stores(args), *SAMPLED[name], limit=12)
    edits = "off,auto,auto~prediction,auto~context,auto~recycling"
    bench(args, "sources-edit", "--prompts", "builtin", "--tasks", "edit", "--methods", edits, limit=12)


def neighbours(args: argparse.Namespace) -> None:
    """What neighbours of the hidden state add, and the published rule that drafts from them alone."""
    store = measuring.OUT / "stores" / ("dense" if not args.limit else "dense-trial")
    tokens = str(20_000 if args.limit else DENSE_TOKENS)
    words = ["--recipe", "datastores/python-stdlib.toml", "--tokenizer", "reference", "--dense", "reference"]
    measuring.build(store, [*words, "--max-tokens", tokens])
    words = ["--prompts", "builtin", "--tasks", "unseen,edit,structured,prose", "--store", str(store)]
    bench(args, "dense-drafting", *words, "--methods", "off,rest,dresd,auto,auto~dense", limit=8)


def sources_replay(args: argparse.Namespace) -> None:
    """What each source adds to auto on recorded answers of Vicuna-7B, with a store of other answers."""
    trace, tokenizer = the_trace(args, SPEC_BENCH), native(args, SPEC_BENCH)
    store = other_answers(args, tokenizer)
    words = ["bench", "replay", str(trace), "--tokenizer", tokenizer, "--session", "--store", str(store), *few(args)]
    commands = {}
    for nodes in (16, 60):
        for left_out in ("", "context", "session", "phrases", "alignment", "ngram", "exact", "ngram exact"):
            without = [word for name in left_out.split() for word in ("--without", name)]
            commands[f"{nodes} {left_out}".strip()] = [*words, "--nodes", str(nodes), *without]
    replays(args, "sources-replay", {"store": OTHER_ANSWERS}, commands)


def knowledge(args: argparse.Namespace) -> None:
    """Recorded files by what `auto` knows: the text alone, phrases of the other half of the file, earlier answers."""
    commands = {}
    for nodes in (16, 60):
        for file in KNOWLEDGE_FILES:
            words = ["bench", "replay", str(the_trace(args, file)), "--tokenizer", native(args, file)]
            for known, options in KNOWN.items():
                commands[f"{nodes} {known} {file}"] = [*words, "--nodes", str(nodes), *options, *few(args)]
    replays(args, "knowledge", {"options": {known: " ".join(options) for known, options in KNOWN.items()}}, commands)


def other_answers(args: argparse.Namespace, tokenizer: str) -> Path:
    """A store of other models' answers."""
    store = measuring.OUT / "stores" / "other-answers"
    words = ["--recipe", "datastores/model-outputs.toml", "--tokenizer", tokenizer]
    measuring.build(store, [str(the_trace(args, OTHER_ANSWERS)), *words])
    return store


def few(args: argparse.Namespace) -> list[str]:
    """Options of every replay."""
    return ["--quiet", "--json", *(["--limit", str(args.limit)] if args.limit else [])]


def siblings(args: argparse.Namespace) -> None:
    """Recorded answers to the same questions, so many at a time, that draft from one another and that do not."""
    commands = {}
    for file, counts in SAMPLED_FILES.items():
        words = ["bench", "replay", str(the_trace(args, file)), "--tokenizer", native(args, file), "--nodes", "16"]
        words += [word for count in counts for word in ("--siblings", str(count))]
        commands[file] = [*words, "--quiet", *(["--limit", "20"] if args.limit else [])]
    replays(args, "siblings", {"nodes": 16}, commands)


def epochs(args: argparse.Namespace) -> None:
    """Recorded answers to the same questions, replayed as epochs with a rollout memory and without."""
    words = ["bench", "replay", str(the_trace(args, EPOCHS_FILE)), "--tokenizer", native(args, EPOCHS_FILE)]
    words += ["--nodes", "16", "--siblings", "2", "--epochs", str(EPOCHS), "--quiet"]
    words += ["--limit", "20"] if args.limit else []
    replays(args, "epochs", {"nodes": 16}, {EPOCHS_FILE: words})


def larger(args: argparse.Namespace) -> None:
    """Recorded answers of Vicuna-7B, given by models of random weights in real passes."""
    words = [str(the_trace(args, SPEC_BENCH)), "--tokenizer", native(args, SPEC_BENCH)]
    trial = ["--size", "0.1b", "--answers", "1", "--new-tokens", "32"] if args.limit else []
    measuring.script(args, "larger", "scripts/bench_recorded.py", *words, *trial)


def edits(args: argparse.Namespace) -> None:
    """Recorded edits, given again through the server by a model of random weights."""
    words = [*(str(the_trace(args, file)) for file in EDITED_FILES), "--tokenizer", native(args, SPEC_BENCH)]
    words += ["--processor", "--longest", "400", "--edits", "1" if args.limit else "6"]
    measuring.script(args, "edits", "scripts/bench_edits.py", *words)


def peers(args: argparse.Namespace, name: str = "compare", sample: tuple[str, ...] = ()) -> None:
    """Other projects' drafting and ours on all recorded answers; a file that is done is kept."""
    traces = sorted(str(path) for path in the_trace(args, "").glob("*.jsonl"))
    out = measuring.work(args) / f"{name}.rows.json"
    words = [*traces, "--tokenizer", str(Path(args.tokenizer).resolve()), *sample, "--out", str(out)]
    for entry in args.native:
        pattern, _, file = entry.partition("=")
        words += ["--native", f"{pattern}={Path(file).resolve()}"]
    if args.limit:
        words += ["--limit", str(args.limit), "--tokens", "300"]
    if not args.fresh and out.exists():
        commits = json.loads(out.read_text())["machine"]["commit"], measuring.commit()
        words += ["--resume"] if measuring.same_code(*commits) else []
    measuring.write(args, name, json.loads(measuring.tool("tools/compare/compare.py", *words).splitlines()[-1]))


def peers_times(args: argparse.Namespace) -> None:
    """What peers and presets cost, on a few rows of each file."""
    peers(args, "compare-times", ("--limit", str(TIMED_ROWS), "--tokens", str(TIMED_TOKENS)))


PARTS: dict[str, Part] = {
    "stores-build": Part(2, "the two stores that other parts draft from", stores),
    "reference": Part(5, "unseen files at T = 0, 0.7 and 1.0 (README)", reference),
    "terminal": Part(1, "the recording of a terminal (README)", cost_parts.terminal),
    "builtin": Part(2, "the default workload: all five kinds, greedy", builtin),
    "stores": Part(5, "unseen files with stores of the standard library and of installed packages", with_stores),
    "presets": Part(4, "every preset and auto, cold and with everything kept", presets),
    "slower": Part(3, "random words and high temperatures, where drafting should not cost anything", never_slower),
    "workloads": Part(4, "unseen, edit, structured and prose, greedy: auto and presets", workloads),
    "workloads-t0.7": Part(5, "the same at T = 0.7", sampled_workloads),
    "sources": Part(4, "auto without each of its sources, on the bundled model", sources),
    "passes": Part(1, "what a pass costs", cost_parts.passes),
    "batches": Part(9, "batches beside the original generate", cost_parts.batches),
    "arrivals": Part(4, "requests that arrive at random", cost_parts.arrivals),
    "rollouts": Part(9, "many answers to the same prompts: stragglers, and epochs with a memory", cost_parts.rollouts),
    "datastores": Part(6, "size, opening and walking of a store of 100 M tokens", cost_parts.datastores),
    "datastores-changes": Part(
        8, "builds by one and two workers, and changes of a store", cost_parts.datastore_changes
    ),
    "datastores-segments": Part(4, "cursors through a hundred segments of 10 M tokens", cost_parts.datastore_segments),
    "datastores-peers": Part(2, "what others make of the same text, 1 M tokens", cost_parts.datastore_peers),
    "dense": Part(6, "kinds of dense indexes, and thinning", cost_parts.dense),
    "dense-drafting": Part(6, "drafting with neighbours of the hidden state, and without", neighbours),
    "typing": Part(4, "typing in an editor, and the server's own time", cost_parts.typing),
    "sources-replay": Part(4, "auto without each of its sources, on recorded answers", sources_replay, traces=True),
    "knowledge": Part(8, "tokens per pass cold, with phrases and with answers kept", knowledge, traces=True),
    "siblings": Part(8, "tokens per pass of samples that draft from one another", siblings, traces=True),
    "epochs": Part(6, "tokens per pass of later answers to the same prompts", epochs, traces=True),
    "larger": Part(9, "recorded answers in real passes of larger models with random weights", larger, traces=True),
    "edits": Part(9, "recorded edits through the server, with and without the old text", edits, traces=True),
    "peers": Part(7, "peers and presets on all recorded answers", peers, traces=True),
    "peers-times": Part(4, "only their times again, on a few rows of each file", peers_times, traces=True),
}


def main() -> None:
    """Measure the parts that are named."""
    parser = argparse.ArgumentParser(prog="scripts/reproduce", description="See the head of scripts/reproduce.")
    parser.add_argument("parts", nargs="*", default=["list"], metavar="PART", help="list, all, or names of parts")
    parser.add_argument("--limit", type=int, help="a trial with so few prompts or rows")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured with this code")
    parser.add_argument("--traces", metavar="DIR")
    parser.add_argument("--tokenizer", metavar="FILE")
    parser.add_argument("--native", action="append", default=[], metavar="PATTERN=FILE")
    args = parser.parse_args()
    if args.parts == ["list"]:
        for name, part in PARTS.items():
            print(f"{name:<18}{part.minutes:>4.0f} min  {part.about}{' [--traces]' if part.traces else ''}")
        minutes = sum(part.minutes for part in PARTS.values() if not part.traces)
        print(f"{'all':<18}{minutes:>4.0f} min  all that needs no traces, with --traces the others too")
        return
    every = [name for name, part in PARTS.items() if not part.traces or args.traces]
    names = every if args.parts == ["all"] else args.parts
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; see scripts/reproduce list")
    os.chdir(measuring.ROOT)
    for name in names:
        try:
            PARTS[name].run(args)
        except NotPossible as reason:
            sys.exit(f"{name}: {reason}")
        except KeyboardInterrupt:
            print(f"{name} was interrupted; the same command goes on with it.", file=sys.stderr)
            sys.exit(INTERRUPTED)
    if not args.limit:
        measuring.tool("scripts/generate_docs.py")


if __name__ == "__main__":
    main()
