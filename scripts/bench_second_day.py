"""Benchmark of yesterday's answers: one process replays half of a trace, another one the other half.

::

    python scripts/bench_second_day.py TRACE.jsonl --tokenizer TOKENIZER.json [--nodes 60] [--scopes 8]

Halves share no group. Prints one JSON object: tokens per pass of the second half with nothing kept, with a session that
begins empty, and with the first half's file; how large that is, and the processor time that opening it takes. With
--scopes, rows are dealt out to so many users, whose answers are kept apart; without, requests have no scope.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from tokenizers import Tokenizer

from retrieve_spec.bench.replay import Replay, halves
from retrieve_spec.bench.traces import read_trace
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.engine.drafters import Drafters

MODEL = "recorded"


def day(args: argparse.Namespace, session: bool | str, half: int) -> dict[str, Any]:
    """Replay a half of the rows as a process that drafts with this session."""
    tokenizer = Tokenizer.from_file(args.tokenizer)
    rows = halves(read_trace(args.trace, tokenizer, args.limit))[half]
    began = time.process_time()
    drafters = Drafters(SpeculationConfig(session=session), [], None, MODEL, tokenizer)
    scopes = [f"user {number}" for number in range(args.scopes)] or [""]
    for scope in scopes:
        drafters.sessions.of(scope)
    opened = time.process_time() - began
    replay: Replay | None = None
    for number, row in enumerate(rows):
        drafter = drafters.lend(scope=scopes[number % len(scopes)])
        assert isinstance(drafter, MixtureDrafter)
        replay = Replay(drafter, args.nodes) if replay is None else replay.beside(drafter)
        replay.run([row])
        drafters.give_back(drafter)
        drafters.keep()
    drafters.keep(at_once=True)
    assert replay is not None
    result = replay.result()
    return {name: result[name] for name in ("tokens_per_pass", "tokens", "passes")} | {"open_seconds": opened}


def apart(args: argparse.Namespace, session: bool | str, half: int) -> Any:
    """The same in a process of its own."""
    words = [str(args.trace), "--tokenizer", args.tokenizer, "--nodes", str(args.nodes), "--scopes", str(args.scopes)]
    words += ["--limit", str(args.limit)] if args.limit else []
    words += ["--day", json.dumps([session, half])]
    ran = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--nodes", type=int, default=60)
    parser.add_argument("--scopes", type=int, default=0, help="users")
    parser.add_argument("--limit", type=int, help="first rows of the file")
    parser.add_argument("--day", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.day is not None:
        print(json.dumps(day(args, *args.day)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answers.bin"
        apart(args, str(file), 0)
        size = file.stat().st_size
        figures = {
            "cold": apart(args, False, 1),
            "session": apart(args, True, 1),
            "second_day": apart(args, str(file), 1),
        }
    print(json.dumps({"trace": args.trace.name, "nodes": args.nodes, "scopes": args.scopes, "bytes": size, **figures}))


if __name__ == "__main__":
    main()
