"""Benchmark of typing in real files: what is visible when, with drafting, without, and without KV reuse.

A session takes a real Python file out of a package, leaves the package as the workspace, and types a stretch of the
file again: a request at every keystroke that the last suggestion does not explain (what editors send), now and then the
rest of a word or line at once (a suggestion was taken), gaps drawn from a log-normal around 180 ms, some pauses.
Every variant answers the same requests, in turn. Then some sessions are typed with their real gaps, nobody waiting for
answers, to count the requests that newer keystrokes replaced.

    python scripts/bench_typing.py --package uvicorn --sessions 4

With ``--together`` all sessions are typed at once while others talk.

    python scripts/bench_typing.py --together --sessions 8 --chats 2

`--weights int8` lets the servers multiply by weights of another format than they are stored in.
"""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np

MARKS_MS = (150, 250, 375, 500)
SEED = 1
REAL_GAPS = 2
"""Sessions that are typed with their real gaps."""
VARIANTS: dict[str, dict[str, Any]] = {
    "drafting": {},
    "drafting off": {"speculative": False},
    "no KV reuse": {"cache_prompt": False},
}


class Key(NamedTuple):
    """One keystroke: seconds before the next one, and the request that an editor sends for it."""

    gap_s: float
    body: dict[str, Any]


@dataclass
class Outcome:
    """What one variant showed."""

    latency_ms: list[float] = field(default_factory=list)
    visible: dict[int, list[int]] = field(default_factory=lambda: {mark: [] for mark in MARKS_MS})
    overhead_ms: list[float] = field(default_factory=list)
    loops: list[bool] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


def make_session(path: Path, seed: int, keys: int) -> list[Key]:
    """Type a stretch of a file again, every character a key but indentation and what a suggestion supplied."""
    rng = random.Random(seed)
    text = path.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    first = rng.randrange(len(lines) // 4, max(len(lines) // 4 + 1, len(lines) - 12))
    above, typed, below = "".join(lines[:first]), "".join(lines[first : first + 12]), "".join(lines[first + 12 :])
    session: list[Key] = []
    at = 0
    while at < len(typed) and len(session) < keys:
        at += 1
        if typed[at - 1] == " " and typed[max(0, at - 8) : at].isspace():
            continue  # indentation is the editor's
        start = typed.rfind("\n", 0, at) + 1
        body = {
            "input_prefix": above[-20_000:] + typed[:start],
            "prompt": typed[start:at],
            "input_suffix": "\n" + "".join(below.splitlines(keepends=True)[:64]),
            "n_predict": 64,
            "top_k": 1,
            "t_max_predict_ms": 500,
            "deadline_ms": 700,
            "stream": True,
        }
        gap = rng.lognormvariate(-1.7, 0.5) + (rng.random() < 0.05) * rng.uniform(0.5, 1.5)
        session.append(Key(gap, body))
        if rng.random() < 0.25:  # a suggestion was taken: the rest of the word or line appears at once
            stop = typed.find("\n", at) if rng.random() < 0.3 else at + len(typed[at:].split(" ")[0])
            at = max(at, stop if stop >= 0 else len(typed))
    return session


class Server:
    """A server process of its own for each variant, waited for until its workspace is indexed."""

    def __init__(self, cache: Path, arguments: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "retrieve_spec.cli", "serve", "--quiet"]
        environment = {**os.environ, "RETRIEVE_SPEC_CACHE": str(cache)}
        self.child = subprocess.Popen([*command, "--port", str(self.port), *arguments], env=environment)
        limit = time.monotonic() + 300
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=30) as answer:
                    body = json.load(answer)
                if body["status"] == "ok" and body.get("workspace", {"indexed": True})["indexed"]:
                    return
            except OSError:
                if self.child.poll() is not None:
                    raise SystemExit("the server did not start") from None
            if time.monotonic() > limit:
                raise SystemExit("the server did not become ready")
            time.sleep(0.2)

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def close(self) -> None:
        """Stop it."""
        self.child.terminate()
        self.child.wait(timeout=20)


def ask(server: Server, body: dict[str, Any], outcome: Outcome, client: str = "bench") -> str:
    """Send one request, note when which characters arrived; return them, or "" where there is no whole answer."""
    connection = server.connect()
    begun, arrivals, text, event = time.perf_counter(), [], "", {}  # type: float, list[tuple[float, int]], str, Any
    headers = {"Content-Type": "application/json", "X-Client-Id": client}
    try:
        connection.request("POST", "/infill", json.dumps(body), headers)
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                now, event = 1000 * (time.perf_counter() - begun), json.loads(line[6:])
                text += event["content"]
                arrivals.append((now, len(text)))
                if event["stop"]:
                    break
    except OSError:
        event = {}
    connection.close()
    outcome.ends["replaced" if event.get("superseded") else "answered" if event.get("stop") else "failed"] += 1
    for mark in MARKS_MS:
        outcome.visible[mark].append(max((n for at, n in arrivals if at <= mark), default=0))
    if not event.get("stop") or event.get("superseded"):
        return ""
    timings = event["timings"]
    outcome.latency_ms.append(arrivals[-1][0])
    outcome.loops.append(looping(text))
    spent = timings["prompt_ms"] + timings["predicted_ms"] + timings["waited_ms"]
    outcome.overhead_ms.append(max(0.0, arrivals[-1][0] - spent))
    return text


def type_live(
    server: Server, session: list[Key], fields: dict[str, Any], outcome: Outcome, client: str, every: bool = False
) -> None:
    """Type a session with its real gaps, nobody waiting for answers: `every` key asks, or those not explained."""
    shown = ("\0", "")

    def press(body: dict[str, Any]) -> None:
        nonlocal shown
        if text := ask(server, {**body, **fields}, outcome, client):
            shown = (body["input_prefix"] + body["prompt"], text)

    with ThreadPoolExecutor(len(session)) as pool:
        asked = []
        for key in session:
            if not every and explained(key.body, shown):
                outcome.ends["explained"] += 1
            else:
                asked.append(pool.submit(press, key.body))
            time.sleep(key.gap_s)
    for answer in asked:
        answer.result()


def type_together(server: Server, sessions: list[list[Key]], talks: list[str], fields: dict[str, Any]) -> list[Outcome]:
    """Let all type with their real gaps while others talk; what each typist saw."""
    outcomes = [Outcome() for _ in sessions]
    over = threading.Event()

    def type_one(number: int) -> None:
        time.sleep(0.03 * number)
        type_live(server, sessions[number], fields, outcomes[number], f"typist {number}")

    def talk(number: int) -> None:
        message = {"role": "user", "content": f"# {number}\n{talks[number]}"}
        body = json.dumps({"messages": [message], "max_tokens": 400, "stream": True})
        while not over.is_set():
            connection = server.connect()
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            for _ in connection.getresponse():
                if over.is_set():
                    break
            connection.close()

    for number, session in enumerate(sessions):
        ask(server, {**session[0].body, "n_predict": 0}, Outcome(), f"typist {number}")  # as editors read ahead
    with ThreadPoolExecutor(len(talks) + len(sessions)) as pool:
        talkers = [pool.submit(talk, number) for number in range(len(talks))]
        typists = [pool.submit(type_one, number) for number in range(len(sessions))]
        wait(typists)
        over.set()
    for thread in [*talkers, *typists]:
        thread.result()
    return outcomes


def typed_at_once(chats: int, folder: Path, serve: list[str], sessions: list[list[Key]]) -> dict[str, Any]:
    """What those who type at once see, with drafting and without."""
    talks = [sessions[0][0].body["input_prefix"][-6000:]] * chats
    report: dict[str, Any] = {}
    for name in ("drafting", "drafting off"):
        with closing(Server(folder / name.replace(" ", "-"), serve)) as server:
            time.sleep(5)  # the stores are attached
            type_together(server, [sessions[0][:2]], talks[:1], VARIANTS[name])  # kernels
            outcomes = type_together(server, sessions, talks, VARIANTS[name])
        ends = sum((each.ends for each in outcomes), Counter[str]())
        visible = [statistics.mean(each.visible[250] or [0]) for each in outcomes]
        report[name] = {**summary(outcomes), "ends": dict(ends), "visible_at_250_ms_by_client": visible}
    return report


def explained(body: dict[str, Any], shown: tuple[str, str]) -> bool:
    """Whether what was typed since the last suggestion is the beginning of that suggestion."""
    left, suggestion = body["input_prefix"] + body["prompt"], shown[1]
    typed = left.removeprefix(shown[0])
    return left != typed and len(typed) < len(suggestion) and suggestion.startswith(typed)


def percentiles(values: list[float]) -> dict[str, float]:
    """Median and 95 % of a list, 0 for an empty one."""
    return dict(zip(("p50", "p95"), np.percentile(values or [0.0], (50, 95)).tolist(), strict=True))


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of one variant."""
    latency = [ms for each in outcomes for ms in each.latency_ms]
    visible = {mark: [n for each in outcomes for n in each.visible[mark]] for mark in MARKS_MS}
    return {
        "requests": len(latency),
        "latency_ms": percentiles(latency),
        "visible_characters": {str(mark): statistics.mean(visible[mark]) for mark in MARKS_MS},
        "outside_model_ms": percentiles([ms for each in outcomes for ms in each.overhead_ms]),
    }


def looping(text: str) -> bool:
    """Whether a completion repeats itself, which flatters every drafter."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return len(lines) >= 4 and len(set(lines)) <= len(lines) // 2


def find_package(name: str) -> Path:
    """Folder of an installed package."""
    return Path(str(importlib.import_module(name).__file__)).parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What typists see."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workspace = folder / "workspace"
        shutil.copytree(find_package(options.package), workspace, ignore=shutil.ignore_patterns("__pycache__"))
        files = sorted(p for p in workspace.rglob("*.py") if len(p.read_text("utf-8").splitlines()) > 80)
        chosen = random.Random(SEED).sample(files, min(options.sessions, len(files)))
        sessions = [make_session(path, SEED + i, options.keys) for i, path in enumerate(chosen)]
        for path in chosen:
            path.unlink()  # what is typed is not in the workspace
        serve = ["--workspace", str(workspace), *(["--quantize", options.weights] if options.weights else [])]
        if options.together:
            return typed_at_once(options.chats, folder, serve, sessions)
        setup = {"package": options.package, "files": [path.name for path in chosen], "model": "reference"}
        return {**typed_in_turn(folder, serve, sessions), "setup": setup}


def typed_in_turn(folder: Path, serve: list[str], sessions: list[list[Key]]) -> dict[str, Any]:
    """Every session on every variant, the variants in turn; then some with their real gaps."""
    results = {name: Outcome() for name in VARIANTS}
    typed = {name: Outcome() for name in VARIANTS}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(closing(Server(folder / name.replace(" ", "-"), serve))) for name in VARIANTS
        }
        time.sleep(5)  # the stores are attached
        warm = sessions[0][0].body
        for name, server in servers.items():
            for _ in range(3):
                ask(server, {**warm, **VARIANTS[name], "prompt": "    warm"}, Outcome())
        keys = skipped = 0
        for session in sessions:
            shown = ("\0", "")
            for key in session:
                keys += 1
                if explained(key.body, shown):  # the editor goes on showing what it has
                    skipped += 1
                else:
                    texts = [ask(server, {**key.body, **VARIANTS[n]}, results[n]) for n, server in servers.items()]
                    shown = (key.body["input_prefix"] + key.body["prompt"], max(texts, key=len))
        for session in sessions[:REAL_GAPS]:
            for name, server in servers.items():
                type_live(server, session, VARIANTS[name], typed[name], name, every=True)
    # A request counts as looping when the longest of its answers loops, whatever each variant had time for.
    loops = [any(flags) for flags in zip(*(outcome.loops for outcome in results.values()), strict=True)]
    return {
        **{name: summary([outcome]) for name, outcome in results.items()},
        "visible_ratio": visible_ratio(results, [False] * len(loops)),
        "visible_ratio_without_loops": visible_ratio(results, loops),
        "looping_requests": sum(loops),
        "typed_with_real_gaps": {name: dict(outcome.ends) for name, outcome in typed.items()},
        "keys": {"pressed": keys, "answered_by_the_last_suggestion": skipped},
    }


def visible_ratio(results: dict[str, Outcome], left_out: list[bool]) -> dict[str, float | None]:
    """By time, how many times as many characters are visible with drafting as without."""
    found: dict[str, float | None] = {}
    for mark in MARKS_MS:
        fast, slow = (
            sum(n for n, without in zip(results[name].visible[mark], left_out, strict=True) if not without)
            for name in ("drafting", "drafting off")
        )
        found[str(mark)] = fast / slow if slow else None
    return found


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, package="uvicorn", sessions=4, keys=20, weights="", together=False, chats=2)


if __name__ == "__main__":
    main()
