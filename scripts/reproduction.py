"""Parts of the reproduction: what `parts.toml` names, measured into docs/data/*.json; `scripts/reproduce` calls it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import shutil
import string
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import ROOT, published, tokenizer_of

from retrieve_spec.bench.machine import OtherWork, machine_facts
from retrieve_spec.bench.workloads import holdout

PARTS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "scripts" / "parts.toml").read_text("utf-8"))
OUT, DATA = Path("bench-out") / "reproduce", Path("docs") / "data"
TEMPERATURES = {"t0": [], "t0.7": ["--temperature", "0.7", "--top-p", "0.95"]}
"""Options of a run, by the end of its name; other ends are the temperature alone."""
FORKS = ("httpx2", "httpcore2")
"""Packages with much of the text of a held-out one."""
FILES = {
    "spec_bench": "specbench_vicuna7b_greedy.jsonl",
    "classeval": "code_classeval_incremental_deepseekcoder_greedy.jsonl",
    "evalplus": "code_evalplus_gpt35_llama3_mistral_greedy.jsonl",
    "fim": "code_fim_evocodebench_greedy.jsonl",
    "aider": "codeedit_aider_claude35sonnet.jsonl",
    "moatless": "agent_moatless_claude35sonnet_temp0.jsonl",
    "arena": "chat_arenabench_5models_temp0.jsonl",
}
"""Recorded answers, by the names that commands use."""


STORES = {
    "stdlib": ("--recipe datastores/python-stdlib.toml --tokenizer reference", 0, 200_000),
    "packages": ("--recipe datastores/installed-packages.toml {unseen} --tokenizer reference", 0, 200_000),
    "dense": ("--recipe datastores/python-stdlib.toml --dense reference --tokenizer reference", 500_000, 20_000),
    "other_answers": ("{arena} --field output --tokenizer {spec_bench_tokenizer}", 0, 0),
}
"""What stores are built of, and their tokens at most, also in a trial (0: all)."""


class Places:
    """What names in a command stand for: words, recorded files, stores that are built where they are not there."""

    kinds = "--tasks unseen,edit,structured,prose"
    presets = (
        "plain,prompt-lookup,off,auto,suffix,sam,anpd,ours/prompt-lookup,token-recycling,sam+recycling,stand,logitspec,"
        "lookahead,adaptive-trigram,rest,hierarchy"
    )
    left_out = "off,auto,auto~context,auto~session,auto~recycling,auto~ngram,auto~exact,auto~ngram~exact"
    packages_folder = sysconfig.get_paths()["purelib"]
    unseen = " ".join(f"--exclude {name}{end}" for name in sorted({*holdout(), *FORKS}) for end in ("/**", ".py"))

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, OUT / ("trial" if args.limit else "")

    def words(self, command: str) -> list[str]:
        """Words of a command with its names filled in."""
        return [word for part in command.split() for word in part.format_map(self).split("\n")]  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> str:
        if name in FILES:
            return str(self.trace(FILES[name]))
        if name in STORES:
            return str(self.store(name))
        if name.endswith("_tokenizer"):
            return self.tokenizer(FILES[name.removesuffix("_tokenizer")])
        place = getattr(self, name)
        return str(place()) if callable(place) else place.replace(" ", "\n")

    def trace(self, name: str) -> Path:
        """A recorded file."""
        if self.args.traces is None or self.args.tokenizer is None:
            sys.exit("This part needs --traces DIR and --tokenizer FILE.")
        return Path(self.args.traces).resolve(strict=True) / name

    def tokenizer(self, name: str) -> str:
        """The tokenizer of a recorded file."""
        return str(Path(tokenizer_of(name, self.args.native, self.args.tokenizer)).resolve())

    def random_words(self) -> Path:
        """Invented words in random order: a file, so that the command that is published can be repeated."""
        path = self.out / "random-words.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for seed in range(12):
                rng = random.Random(seed)
                words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(150)]
                file.write(json.dumps({"id": f"words {seed}", "task": "words", "prompt": " ".join(words) + " "}) + "\n")
        return path

    def store(self, name: str) -> Path:
        """A store, built unless it is there."""
        path = self.out / "stores" / name.replace("_", "-")
        if not (path / "manifest.json").exists():
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            words, whole, trial = STORES[name]
            tokens = trial if self.args.limit else whole
            limit = ["--max-tokens", str(tokens)] if tokens else []
            tool("retrieve-spec", "build", str(path), *self.words(words), *limit)
        return path


def measure(args: argparse.Namespace, name: str, how: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Data files of one entry of `parts.toml`: their names, and what was measured."""
    places, trial = Places(args), how.get("trial", f"--limit {args.limit}") if args.limit else ""
    if "run" in how:
        for end in how.get("at", [""]):
            sampling = TEMPERATURES.get(end, ["--temperature", end.removeprefix("t")]) if end else []
            file = f"{name}-{end}".rstrip("-")
            folder, words = places.out / file, [*places.words(how["run"]), *sampling]
            shutil.rmtree(folder, ignore_errors=True)
            words += [] if "--prompts" in words else ["--prompts", "builtin"]
            words += ["--limit", str(min(args.limit or how["limit"], how["limit"])), "--runs", str(how.get("runs", 1))]
            words += ["--max-new-tokens", "24"] if args.limit else []
            command = ["bench", "run", "--model", how.get("model", "reference"), *words, "--out", str(folder), "--json"]
            yield file, tool("retrieve-spec", *command, environment=how.get("environment", {}))
    elif "script" in how:
        program, *words = places.words(f"{how['script']} {trial}")
        yield name, tool(f"scripts/{program}.py", *words)
    elif "replay" in how:
        facts, others = machine_facts(), OtherWork()
        rows, commands = {}, []
        for values in itertools.product(*how["rows"].values()):
            row = dict(zip(how["rows"], values, strict=True))
            file = row.get("file", "spec_bench")
            words = [f"{{{file}}} --tokenizer {{{file}_tokenizer}} {how['replay']}"]
            words += [f"--nodes {row['nodes']}"] if "nodes" in row else []
            words += [f"--without {source}" for source in row.get("without", "").split()]
            words += [how["facts"]["options"][row["known"]]] if "known" in row else []
            title = [row[what] for what in ("nodes", "known", "without") if row.get(what)]
            command = places.words(f"bench replay {' '.join(words)} --quiet {trial}")
            made = tool("retrieve-spec", *command)
            rows[" ".join([*title, *([FILES[file]] if "file" in row else [])])] = made
            commands.append(published(["retrieve-spec", *command]))
        machine = facts | {"others": others.cores()}
        yield name, {"command": commands[0], "machine": machine, "rows": rows, **how["facts"]}
    elif "peers" in how:
        traces = sorted(map(str, places.trace("").glob("*.jsonl")))
        native = [f"{pattern}={Path(file).resolve()}" for pattern, _, file in (n.partition("=") for n in args.native)]
        words = [
            "--tokenizer",
            str(Path(args.tokenizer).resolve()),
            *how["peers"].split(),
            *["--native"] * bool(native),
        ]
        trial_words = ["--limit", str(args.limit), "--tokens", "300"] if args.limit else []
        yield name, tool("tools/compare/compare.py", *traces, *words, *native, *trial_words)
    else:
        places.words(how["made"])


def tool(program: str, *words: str, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Run an installed program; return the JSON object on the last line of its output, {} where there is none."""
    print(f"$ {program} {shlex.join(words)}", file=sys.stderr)
    first = [sys.executable, program] if program.endswith(".py") else [str(Path(sys.executable).parent / program)]
    done = subprocess.run([*first, *words], stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    if done.returncode:
        sys.exit(f"{program} failed with {done.returncode}")
    last = (done.stdout.splitlines() or [""])[-1]
    return dict(json.loads(last)) if last.startswith("{") else {}


def main() -> None:
    """Measure the parts that are named."""
    parser = argparse.ArgumentParser(prog="scripts/reproduce", description="See the head of scripts/reproduce.")
    parser.add_argument("parts", nargs="*", default=["list"], metavar="PART", help="list, all, or names of parts")
    parser.add_argument("--limit", type=int, help="a trial with so few prompts or rows")
    parser.add_argument("--traces", metavar="DIR")
    parser.add_argument("--tokenizer", metavar="FILE")
    parser.add_argument("--native", action="append", default=[], metavar="PATTERN=FILE")
    args = parser.parse_args()
    if args.parts == ["list"]:
        for name, part in PARTS.items():
            print(f"{name:<20}{part['minutes']:>4} min  {part['about']}{' [--traces]' if part.get('traces') else ''}")
        return
    names = args.parts
    if names == ["all"]:
        names = [name for name, part in PARTS.items() if args.traces or not part.get("traces")]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; see scripts/reproduce list")
    os.chdir(ROOT)
    folder = OUT / "trial" if args.limit else DATA
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for entry, how in PARTS[name]["data"].items():
            for file, made in measure(args, entry, how):
                (folder / f"{file}.json").write_text(json.dumps(made) + "\n", encoding="utf-8")
    if not args.limit:
        tool("scripts/generate_docs.py")


if __name__ == "__main__":
    main()
