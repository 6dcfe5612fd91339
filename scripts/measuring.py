"""Measured data files: commands of `parts.toml`, run once, continued where they were interrupted, with the machine."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkout import ROOT
from harness import shown

from retrieve_spec.bench.machine import NOT_MEASURED, OtherWork, machine_facts
from retrieve_spec.bench.workloads import holdout

OUT = Path("bench-out") / "reproduce"
DATA, TRIAL = Path("docs") / "data", OUT / "trial"
BIN = Path(sys.executable).parent
TEMPERATURES = {"t0": [], "t0.7": ["--temperature", "0.7", "--top-p", "0.95"]}
"""Of a run, by the end of its name; of others it is the temperature alone."""
FORKS = ("httpx2", "httpcore2")
"""Packages with much of the text of a held-out one."""
FILES = {
    "spec_bench": "specbench_vicuna7b_greedy.jsonl",
    "classeval": "code_classeval_incremental_deepseekcoder_greedy.jsonl",
    "evalplus": "code_evalplus_gpt35_llama3_mistral_greedy.jsonl",
    "fim": "code_fim_evocodebench_greedy.jsonl",
    "aider": "codeedit_aider_claude35sonnet.jsonl",
    "nofuneval": "codeedit_nofuneval_deepseekcoder33b_greedy.jsonl",
    "moatless": "agent_moatless_claude35sonnet_temp0.jsonl",
    "multisample": "reasoning_r1distill_multisample10.jsonl",
    "airline": "agent_taubench_airline_gpt4o_4trials.jsonl",
    "arena": "chat_arenabench_5models_temp0.jsonl",
}
"""Recorded answers, by the names that commands use."""


class NotPossible(Exception):
    """A part lacks something; the message says what."""


class Places:
    """What names in a command stand for: files that are found, stores and files that are made if they are not there."""

    kinds = "--tasks unseen,edit,structured,prose"
    presets = (
        "plain,prompt-lookup,off,auto,suffix,sam,anpd,ours/prompt-lookup,token-recycling,sam+recycling,stand,logitspec,"
        "lookahead,adaptive-trigram,rest,hierarchy"
    )
    left_out = "off,auto,auto~context,auto~session,auto~recycling,auto~ngram,auto~exact,auto~ngram~exact"
    packages_folder = sysconfig.get_paths()["purelib"]

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def words(self, command: str) -> list[str]:
        """Words of a command with its names filled in."""
        return [word for part in command.split() for word in part.format_map(self).split("\n")]  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> str:
        if name.endswith("_tokenizer"):
            return self.tokenizer(FILES[name.removesuffix("_tokenizer")])
        if name in FILES:
            return str(self.trace(FILES[name]))
        place = getattr(self, name)
        return str(place()) if callable(place) else place.replace(" ", "\n")

    def trace(self, name: str) -> Path:
        """A recorded file."""
        if self.args.traces is None or self.args.tokenizer is None:
            raise NotPossible("it needs --traces DIR and --tokenizer FILE")
        path = Path(self.args.traces).resolve() / name
        if not path.exists():
            raise NotPossible(f"{path} is not there")
        return path

    def tokenizer(self, name: str) -> str:
        """The tokenizer of a recorded file."""
        self.trace(name)
        entries = [entry.split("=", 1) for entry in self.args.native]
        file = next((file for pattern, file in entries if fnmatch.fnmatch(name, pattern)), self.args.tokenizer)
        return str(Path(file).resolve())

    def stdlib(self) -> Path:
        """A store of the standard library."""
        return self._store("stdlib", "python-stdlib")

    def packages(self) -> Path:
        """A store of installed packages, without what the model is prompted with."""
        left_out = [word for package in sorted({*holdout(), *FORKS}) for word in _excluded(package)]
        return self._store("packages", "installed-packages", *left_out)

    def dense(self) -> Path:
        """A store with a key of the hidden state for each token."""
        return self._store("dense", "python-stdlib", "--dense", "reference", most=(500_000, 20_000))

    def other_answers(self) -> Path:
        """A store of other models' answers."""
        words = [
            self["arena"],
            "--recipe",
            "datastores/model-outputs.toml",
            "--tokenizer",
            self["spec_bench_tokenizer"],
        ]
        return build(OUT / "stores" / "other-answers", *words)

    def random_words(self) -> Path:
        """Invented words in random order: a file, so that the command that is published can be repeated."""
        path = OUT / "random-words.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for seed in range(12):
                rng = random.Random(seed)
                words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(150)]
                row = {"id": f"words {seed}", "task": "words", "prompt": " ".join(words) + " "}
                file.write(json.dumps(row) + "\n")
        return path

    def _store(self, name: str, recipe: str, *words: str, most: tuple[int, int] = (0, 200_000)) -> Path:
        whole, trial = most
        tokens = trial if self.args.limit else whole
        limit = ["--max-tokens", str(tokens)] if tokens else []
        path = OUT / "stores" / (f"{name}-trial" if self.args.limit else name)
        return build(path, "--recipe", f"datastores/{recipe}.toml", "--tokenizer", "reference", *words, *limit)


def _excluded(package: str) -> list[str]:
    return ["--exclude", f"{package}/**", "--exclude", f"{package}.py"]


def measure(args: argparse.Namespace, name: str, how: dict[str, Any]) -> None:
    """Measure a data file, or one for each temperature, as `parts.toml` says it."""
    places, trial = Places(args), how.get("trial", f"--limit {args.limit}") if args.limit else ""
    if "run" in how:
        for end in how.get("at", [""]):
            sampling = TEMPERATURES.get(end, ["--temperature", end.removeprefix("t")]) if end else []
            words = [*places.words(how["run"]), *sampling]
            run(args, f"{name}-{end}".rstrip("-"), words, how["limit"], how.get("runs", 1))
    elif "script" in how:
        program, *words = places.words(f"{how['script']} {trial}")
        with suffix_decoding() if "suffix_decoding" in how else contextlib.nullcontext():
            write(args, name, json.loads(tool(f"scripts/{program}.py", *words).splitlines()[-1]))
    elif "replay" in how:
        rows = {row: places.words(f"bench replay {words} --quiet {trial}") for row, words in replayed(how)}
        replays(args, name, rows, how["facts"])
    elif "peers" in how:
        peers(args, name, how["peers"].split())
    else:
        places.words(how["made"])


def replayed(how: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and words of replays: one for each combination of what `rows` names."""
    for values in itertools.product(*how["rows"].values()):
        row = dict(zip(how["rows"], values, strict=True))
        file, *more = row.get("file", "spec_bench").split()
        words = [f"{{{file}}} --tokenizer {{{file}_tokenizer}}", how["replay"], *more]
        words += [f"--nodes {row['nodes']}"] if "nodes" in row else []
        words += [f"--without {source}" for source in row.get("without", "").split()]
        words += [how["facts"]["options"][row["known"]]] if "known" in row else []
        name = [row[what] for what in ("nodes", "known", "without") if row.get(what)]
        yield " ".join([*name, *([FILES[file]] if "file" in row else [])]), " ".join(words)


def run(args: argparse.Namespace, name: str, words: list[str], limit: int, runs: int) -> None:
    """One `bench run` into a folder, and its summary into the data."""
    folder = work(args) / name
    prompts = [] if "--prompts" in words else ["--prompts", "builtin"]
    command = ["bench", "run", "--model", "reference", *prompts, *words]
    command += ["--limit", str(min(args.limit or limit, limit)), "--runs", str(runs)]
    command += ["--max-new-tokens", "24"] if args.limit else []
    command += ["--out", str(folder), "--json"]
    header = begun(folder / "run.json", args, shlex.join(["retrieve-spec", *command]))
    if header is None:
        shutil.rmtree(folder, ignore_errors=True)
    elif "finished" in header:
        command = ["bench", "report", str(folder), "--json"]
    else:
        command.append("--resume")
    summary = json.loads(tool("retrieve-spec", *command).splitlines()[-1])
    summary["header"].pop("cost_curves", None)  # long, and in the report's figure
    write(args, name, summary)


def replays(args: argparse.Namespace, name: str, rows: dict[str, list[str]], facts: dict[str, Any]) -> None:
    """Several `bench replay` with names into one data file; each is kept when it is done."""
    file, first = work(args) / f"{name}.rows.json", next(iter(rows.values()))
    made = begun(file, args, shlex.join(first))
    if made is None:
        made = {"command": shlex.join(first), "machine": machine_facts(), "rows": {}, **facts}
    others = OtherWork()
    for row, words in rows.items():
        if row not in made["rows"]:
            made["rows"][row] = json.loads(tool("retrieve-spec", *words).splitlines()[-1])
            made["machine"]["others"] = max(others.cores() or 0.0, made["machine"].get("others", 0.0))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(made) + "\n", encoding="utf-8")
    write(args, name, {**made, "command": shown(["retrieve-spec", *first])})


def peers(args: argparse.Namespace, name: str, sample: list[str]) -> None:
    """Other projects' drafting and ours on all recorded answers; a file that is done is kept."""
    traces, out = sorted(map(str, Places(args).trace("").glob("*.jsonl"))), work(args) / f"{name}.rows.json"
    words = [*traces, "--tokenizer", str(Path(args.tokenizer).resolve()), *sample, "--out", str(out)]
    natives = [entry.partition("=") for entry in args.native]
    words += ["--native"] * bool(natives) + [f"{pattern}={Path(file).resolve()}" for pattern, _, file in natives]
    words += ["--limit", str(args.limit), "--tokens", "300"] if args.limit else []
    if not args.fresh and out.exists() and same_code(json.loads(out.read_text())["machine"]["commit"], commit()):
        words.append("--resume")
    write(args, name, json.loads(tool("tools/compare/compare.py", *words).splitlines()[-1]))


def build(path: Path, *words: str) -> Path:
    """A store, unless it is there; goes on where a build was interrupted."""
    if not (path / "manifest.json").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        tool("retrieve-spec", "build", str(path), *words, *(["--resume"] if path.exists() else []))
    return path


def work(args: argparse.Namespace) -> Path:
    """Where results are kept until they are whole; a trial's are apart."""
    return TRIAL if args.limit else OUT


def begun(file: Path, args: argparse.Namespace, command: str) -> dict[str, Any] | None:
    """What an earlier call of the same command left, if it measured the same code."""
    if args.fresh or not file.exists():
        return None
    made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    same = made["command"] == command and same_code(made["machine"]["commit"].split(", then ")[-1], commit())
    return made if same else None


def same_code(then: str, now: str) -> bool:
    """Whether nothing that is measured differs between two commits of this checkout."""
    if then == now or not then or "+" in then + now:
        return then == now
    command = ["git", "diff", "--quiet", then, now, "--", ".", *NOT_MEASURED]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def commit() -> str:
    """Commit of the checkout, as results carry it."""
    return str(machine_facts()["commit"])


def write(args: argparse.Namespace, name: str, made: Any) -> None:
    """Write one data file; a trial's goes elsewhere."""
    folder = TRIAL if args.limit else DATA
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(made) + "\n", encoding="utf-8")


def tool(program: str, *words: str) -> str:
    """Run a program of the environment; progress and errors go through, standard output comes back."""
    print(f"$ {program} {shlex.join(words)}", file=sys.stderr)
    first = [sys.executable, program] if program.endswith(".py") else [str(BIN / program)]
    with subprocess.Popen([*first, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()  # interrupted too; it keeps what it has
            raise
    if process.returncode:
        sys.exit(f"{program} failed with {process.returncode}; the same command goes on when it is repaired")
    return output


@contextlib.contextmanager
def suffix_decoding() -> Iterator[None]:
    """Let scripts import the suffix trees of Arctic Inference, where they can be had."""
    sys.path.insert(0, str(ROOT / "tools" / "compare"))
    peer_code = importlib.import_module("sources")
    sys.path.pop(0)
    before = os.environ.get("PYTHONPATH", "")
    with contextlib.suppress(peer_code.Skipped):  # then the script says that they are not there
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(peer_code.arctic_folder())]))
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before
