"""Measured data files: one command each, run once, continued where it was interrupted, with its machine."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkout import ROOT
from harness import shown

from retrieve_spec.bench.machine import NOT_MEASURED, OtherWork, machine_facts

OUT = Path("bench-out") / "reproduce"
DATA, TRIAL = Path("docs") / "data", OUT / "trial"
BIN = Path(sys.executable).parent


class NotPossible(Exception):
    """A part lacks something; the message says what."""


def bench(args: argparse.Namespace, name: str, *words: str, limit: int, runs: int = 1) -> None:
    """One `bench run` into OUT/name, and its summary into the data; continued where it was interrupted."""
    folder = work(args) / name
    command = ["bench", "run", "--model", "reference", *words, "--limit", str(min(args.limit or limit, limit))]
    command += ["--runs", str(runs)]
    if args.limit:
        command += ["--max-new-tokens", "24"]
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


def script(args: argparse.Namespace, name: str, program: str, *words: str) -> None:
    """One script whose last line is a JSON object, into the data."""
    write(args, name, json.loads(tool(program, *words).splitlines()[-1]))


def replays(args: argparse.Namespace, name: str, facts: dict[str, Any], commands: dict[str, list[str]]) -> None:
    """Several `bench replay` with names into one data file; each is kept when it is done."""
    file = work(args) / f"{name}.rows.json"
    first = shlex.join(next(iter(commands.values())))
    made = begun(file, args, first)
    if made is None:
        made = {"command": first, "machine": machine_facts(), "rows": {}, **facts}
    others = OtherWork()
    for row, words in commands.items():
        if row not in made["rows"]:
            made["rows"][row] = json.loads(tool("retrieve-spec", *words).splitlines()[-1])
            busiest = max(others.cores() or 0.0, made["machine"].get("others", 0.0))
            made["machine"]["others"] = busiest
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(made) + "\n", encoding="utf-8")
    write(args, name, {**made, "command": shown(["retrieve-spec", *next(iter(commands.values()))])})


STORES = {"stdlib": "python-stdlib", "packages": "installed-packages"}
FORKS = ("httpx2", "httpcore2")
"""Packages with much of the text of a held-out one."""


def stores(args: argparse.Namespace) -> list[Path]:
    """The two stores, built if they are not there; what the model is prompted with is not in them."""
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
        build(path, words)
        paths.append(path)
    return paths


def build(path: Path, words: list[str]) -> None:
    """A store, unless it is there; goes on where a build was interrupted."""
    if not (path / "manifest.json").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if path.exists() else []
        tool("retrieve-spec", "build", str(path), *words, *resume)


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
    executable = sys.executable if program.endswith(".py") else str(BIN / program)
    first = [executable, program] if program.endswith(".py") else [executable]
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


def the_trace(args: argparse.Namespace, name: str) -> Path:
    """A recorded file."""
    if args.traces is None or args.tokenizer is None:
        raise NotPossible("it needs --traces DIR and --tokenizer FILE")
    path = Path(args.traces).resolve() / name
    if not path.exists():
        raise NotPossible(f"{path} is not there")
    return path


def native(args: argparse.Namespace, name: str) -> str:
    """The tokenizer of a recorded file."""
    entries = [entry.split("=", 1) for entry in args.native]
    file = next((file for pattern, file in entries if fnmatch.fnmatch(name, pattern)), args.tokenizer)
    return str(Path(file).resolve())
