"""Turns the names of parts into measurements, and their results into docs/data/*.json; `scripts/reproduce` calls it."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("bench-out") / "reproduce"
DATA, TRIAL = Path("docs") / "data", OUT / "trial"
BIN = Path(sys.executable).parent
SAMPLED = {"t0": [], "t0.7": ["--temperature", "0.7", "--top-p", "0.95"], "t1.0": ["--temperature", "1.0"]}
FORKS = ("httpx2", "httpcore2")
"""Packages with much of the text of a held-out one."""
STORES = {"stdlib": "python-stdlib", "packages": "installed-packages"}
PRESETS = "suffix,sam,anpd,ours/prompt-lookup,token-recycling,sam+recycling,stand,logitspec,lookahead,adaptive-trigram"
SPEC_BENCH = "specbench_vicuna7b_greedy.jsonl"
OTHER_ANSWERS = "chat_arenabench_5models_temp0.jsonl"


class NotPossible(Exception):
    """A part lacks something; the message says what."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to measure.

    Attributes
    ----------
    minutes
        On two quiet cores, nothing built before.
    about
        For the list.
    run
        Measures it.
    traces
        Whether it replays recorded answers.
    """

    minutes: float
    about: str
    run: Callable[[argparse.Namespace], None]
    traces: bool = False


def bench(args: argparse.Namespace, name: str, *words: str, limit: int, runs: int = 1) -> None:
    """One `bench run` into OUT/name, and its summary into the data; continued where it was interrupted."""
    folder = OUT / name
    limit = min(args.limit or limit, limit)
    command = ["bench", "run", "--model", "reference", *words, "--limit", str(limit), "--runs", str(runs)]
    if args.limit:
        command += ["--max-new-tokens", "24"]
    if (folder / "run.json").exists():
        header = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if header["machine"]["commit"] == commit() and limit_of(header["command"]) == limit and not args.fresh:
            command.append("--resume")
        else:
            shutil.rmtree(folder)
    output = tool("retrieve-spec", *command, "--out", str(folder), "--json")
    summary = json.loads(output.splitlines()[-1])
    summary["header"].pop("cost_curves", None)  # long, and in the report's figure
    write(args, name, summary)


def limit_of(command: str) -> int | None:
    """The limit that a recorded command was given."""
    words = command.split()
    return int(words[words.index("--limit") + 1]) if "--limit" in words else None


def commit() -> str:
    """Commit of the checkout, as results carry it."""
    from retrieve_spec.bench.machine import machine_facts

    return str(machine_facts()["commit"])


def write(args: argparse.Namespace, name: str, made: Any) -> None:
    """Write one data file; a trial's goes elsewhere."""
    folder = TRIAL if args.limit else DATA
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(made) + "\n", encoding="utf-8")


def tool(program: str, *words: str) -> str:
    """Run a program of the environment; progress and errors go through, standard output comes back."""
    print(f"$ {program} {' '.join(words)}", file=sys.stderr)
    executable = sys.executable if program.endswith(".py") else str(BIN / program)
    first = [executable, program] if program.endswith(".py") else [executable]
    done = subprocess.run([*first, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{program} failed with {done.returncode}; the same command goes on when it is repaired")
    return done.stdout


def reference(args: argparse.Namespace) -> None:
    """Unseen Python files at three temperatures."""
    for name, sampling in SAMPLED.items():
        words = ["--prompts", "builtin", "--tasks", "unseen", "--methods", "plain,prompt-lookup,off,auto"]
        bench(args, f"reference-{name}", *words, *sampling, limit=24)


def stores(args: argparse.Namespace) -> list[str]:
    """Paths of the two stores, built if they are not there; what the model is prompted with is not in them."""
    from retrieve_spec.bench.workloads import holdout

    paths = []
    for name, recipe in STORES.items():
        path = OUT / "stores" / (name if not args.limit else f"{name}-trial")
        words = ["--recipe", f"datastores/{recipe}.toml", "--tokenizer", "reference"]
        if name == "packages":
            for package in sorted({*holdout(), *FORKS}):
                words += ["--exclude", f"{package}/**", "--exclude", f"{package}.py"]
        if args.limit:
            words += ["--max-tokens", "200000"]
        if not (path / "manifest.json").exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            resume = ["--resume"] if path.exists() else []
            tool("retrieve-spec", "build", str(path), *words, *resume)
        paths += ["--store", str(path)]
    return paths


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
    words_file = OUT / "random-words.jsonl"  # a file, so that the command that is published can be repeated
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


def workloads(args: argparse.Namespace) -> None:
    """Four kinds of text."""
    methods = f"plain,prompt-lookup,off,auto,{PRESETS}"
    words = ["--prompts", "builtin", "--tasks", "unseen,edit,structured,prose", "--methods", methods]
    bench(args, "workloads", *words, limit=6)
    bench(args, "workloads-t0.7", *words, *SAMPLED["t0.7"], limit=6)  # greedy prose of so small a model loops


def builtin(args: argparse.Namespace) -> None:
    """The default workload, all five kinds."""
    words = ["--prompts", "builtin", "--methods", "plain,prompt-lookup,off,auto"]
    bench(args, "reference-tasks", *words, limit=6)


def sources(args: argparse.Namespace) -> None:
    """What each source adds to auto, on the bundled model: auto without it."""
    left_out = "auto~context,auto~session,auto~recycling,auto~ngram,auto~exact"
    words = ["--prompts", "builtin", "--tasks", "unseen", "--methods", f"off,auto,{left_out}", "--state", "shared"]
    bench(args, "sources-live", *words, *stores(args), limit=12)
    edits = ["--prompts", "builtin", "--tasks", "edit", "--methods", "off,auto,auto~prediction,auto~context"]
    bench(args, "sources-edit", *edits, limit=12)


def sources_replay(args: argparse.Namespace) -> None:
    """What each source adds to auto on recorded answers of Vicuna-7B, with a store of other answers."""
    from retrieve_spec.bench.machine import machine_facts

    trace, tokenizer = the_trace(args, SPEC_BENCH), native(args, SPEC_BENCH)
    store = OUT / "stores" / "other-answers"
    if not (store / "manifest.json").exists():
        answers = str(the_trace(args, OTHER_ANSWERS))
        words = ["--recipe", "datastores/model-outputs.toml", "--tokenizer", tokenizer]
        tool("retrieve-spec", "build", str(store), answers, *words, *(["--resume"] if store.exists() else []))
    fixed = [str(trace), "--tokenizer", tokenizer, "--session", "--store", str(store), "--quiet", "--json"]
    shown = (
        f"retrieve-spec bench replay {trace.name} --tokenizer {Path(tokenizer).name} --session --store other-answers"
    )
    limit = ["--limit", str(args.limit)] if args.limit else []
    rows = {}
    for nodes in (16, 60):
        for left_out in ("", "context", "session", "ngram", "exact", "ngram exact"):
            words = ["--nodes", str(nodes), *limit]
            for name in left_out.split():
                words += ["--without", name]
            rows[f"{nodes} {left_out}".strip()] = json.loads(tool("retrieve-spec", "bench", "replay", *fixed, *words))
    facts = machine_facts()
    write(args, "sources-replay", {"machine": facts, "command": shown, "store": OTHER_ANSWERS, "rows": rows})


def replayed_presets(args: argparse.Namespace) -> None:
    """The table of docs/presets.md."""
    from retrieve_spec.bench.machine import machine_facts

    trace, tokenizer = the_trace(args, SPEC_BENCH), native(args, SPEC_BENCH)
    fixed = [str(trace), "--tokenizer", tokenizer, "--quiet", "--json"]
    limit = ["--limit", str(args.limit)] if args.limit else []
    rows = {}
    for draft in ("auto", "prompt-lookup", "anpd", "sam", "suffix", "adaptive-trigram"):
        for session in ([], ["--session"]) if draft in ("auto", "suffix") else ([],):
            words = [*fixed, "--draft", draft, *session, *limit]
            rows[" ".join([draft, *session])] = json.loads(tool("retrieve-spec", "bench", "replay", *words))
    write(args, "presets-replay", {"machine": machine_facts(), "trace": trace.name, "rows": rows})


def peers(args: argparse.Namespace) -> None:
    """Other projects' drafting and ours on all recorded answers."""
    traces = sorted(str(path) for path in the_trace(args, "").glob("*.jsonl"))
    out = (TRIAL if args.limit else DATA) / "compare.json"
    words = [*traces, "--tokenizer", args.tokenizer, "--out", str(out)]
    for entry in args.native:
        words += ["--native", entry]
    if args.limit:
        words += ["--limit", str(args.limit), "--tokens", "300"]
    if out.exists() and not args.fresh and json.loads(out.read_text())["machine"]["commit"] == commit():
        words.append("--resume")
    tool("tools/compare/compare.py", *words)


def passes(args: argparse.Namespace) -> None:
    """The table of docs/verifier.md."""
    words = ["--repeats", "2"] if args.limit else []
    write(args, "passes", json.loads(tool("scripts/bench_pass.py", *words).splitlines()[-1]))


def datastores(args: argparse.Namespace) -> None:
    """The tables of docs/datastores.md, over the source of all installed packages."""
    import sysconfig

    words = ["--text", sysconfig.get_paths()["purelib"]]
    if args.limit:
        words += ["--tokens", "1e6", "--real", "1e6", "--peer-tokens", "0"]
    write(args, "datastores", json.loads(tool("scripts/bench_datastore.py", *words).splitlines()[-1]))


def typing(args: argparse.Namespace) -> None:
    """The figures of docs/server.md."""
    words = ["--sessions", "1", "--keys", "3"] if args.limit else []
    write(args, "typing", json.loads(tool("scripts/bench_typing.py", *words).splitlines()[-1]))


def the_trace(args: argparse.Namespace, name: str) -> Path:
    """A recorded file."""
    if args.traces is None or args.tokenizer is None:
        raise NotPossible("it needs --traces DIR and --tokenizer FILE")
    path = Path(args.traces) / name
    if not path.exists():
        raise NotPossible(f"{path} is not there")
    return path


def native(args: argparse.Namespace, name: str) -> str:
    """The tokenizer of a recorded file."""
    import fnmatch

    entries = [entry.split("=", 1) for entry in args.native]
    return next((file for pattern, file in entries if fnmatch.fnmatch(name, pattern)), str(args.tokenizer))


PARTS: dict[str, Part] = {
    "reference": Part(5, "unseen files at T = 0, 0.7 and 1.0 (README)", reference),
    "builtin": Part(2, "the default workload: all five kinds, greedy", builtin),
    "stores": Part(14, "unseen files with stores of the standard library and of installed packages", with_stores),
    "presets": Part(6, "every preset and auto, cold and with everything kept", presets),
    "slower": Part(3, "random words and high temperatures, where drafting should not cost anything", never_slower),
    "workloads": Part(9, "unseen, edit, structured and prose: auto and presets", workloads),
    "sources": Part(4, "auto without each of its sources, on the bundled model", sources),
    "passes": Part(3, "what a pass costs (docs/verifier.md)", passes),
    "datastores": Part(15, "building, opening and walking stores (docs/datastores.md)", datastores),
    "typing": Part(10, "typing in an editor (docs/server.md)", typing),
    "sources-replay": Part(6, "auto without each of its sources, on recorded answers", sources_replay, traces=True),
    "presets-replay": Part(4, "presets on recorded answers (docs/presets.md)", replayed_presets, traces=True),
    "peers": Part(10, "peers and presets on all recorded answers", peers, traces=True),
}


def main() -> None:
    """Measure the parts that are named."""
    parser = argparse.ArgumentParser(prog="scripts/reproduce", description="See the head of scripts/reproduce.")
    parser.add_argument("parts", nargs="*", default=["list"], metavar="PART", help="list, all, or names of parts")
    parser.add_argument("--limit", type=int, help="a trial with so few prompts or rows")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured at this commit")
    parser.add_argument("--traces", metavar="DIR")
    parser.add_argument("--tokenizer", metavar="FILE")
    parser.add_argument("--native", action="append", default=[], metavar="PATTERN=FILE")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.parts == ["list"]:
        for name, part in PARTS.items():
            print(f"{name:<16}{part.minutes:>4.0f} min  {part.about}{' [--traces]' if part.traces else ''}")
        print(
            f"{'all':<16}{sum(p.minutes for p in PARTS.values() if not p.traces):>4.0f} min  all that needs no traces"
        )
        return
    every = [name for name, part in PARTS.items() if not part.traces or args.traces]
    names = every if args.parts == ["all"] else args.parts
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; see scripts/reproduce list")
    for name in names:
        try:
            PARTS[name].run(args)
        except NotPossible as reason:
            sys.exit(f"{name}: {reason}")
    if not args.limit:
        tool("scripts/generate_docs.py")


if __name__ == "__main__":
    main()
