"""Simulation of typing in company by a clock of processor time, however busy the machine is.

The server's own service and engine run in this thread. Its clock stands still while nothing is computed and otherwise
goes as fast as processor time; keys are pressed, chats begun and answers seen by that clock. Time on the wire is not in
it, and what a server does beside the model on another core is. The last line of the output is JSON.

    OMP_NUM_THREADS=1 python scripts/typing_simulation.py --clients 8 --chats 2
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
from bench_typing import VARIANTS, Key, explained, find_package, make_session, percentile

from retrieve_spec.config import ServeConfig
from retrieve_spec.reference_model import load_model
from retrieve_spec.server.engine import QueueFullError
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.run import assemble
from retrieve_spec.server.schemas import ChatRequest, InfillRequest
from retrieve_spec.server.service import Caller, Service


class Clock:
    """Seconds of processor time since it began, and those that were waited."""

    def __init__(self) -> None:
        self._waited = -time.process_time()

    def __call__(self) -> float:
        return self._waited + time.process_time()

    def wait_until(self, moment: float) -> None:
        """Nothing is done until a moment."""
        self._waited += max(0.0, moment - self())


class Typist:
    """Types a session; asks at every key that the suggestion on the screen does not explain."""

    def __init__(self, number: int, session: list[Key], fields: dict[str, Any]) -> None:
        self.name, self.number, self.session, self.fields, self.at = f"typist {number}", number, session, fields, 0.0
        self.keys = 0
        self.shown = ("\0", "")
        self.latency_ms: list[float] = []
        self.visible: list[int] = []
        self.reuse: list[float] = []
        self.outcomes = Counter[str]()
        self.accepted = self.passes = 0

    @property
    def over(self) -> bool:
        return self.keys == len(self.session)

    def open(self, service: Service) -> None:
        """Have the file read as far as the cursor, as editors do ahead."""
        request = InfillRequest.model_validate({**self.session[0].body, "n_predict": 0, "stream": False})
        prepared = service.infill(request, Caller("", self.name, explicit=True))
        service.engine.submit(prepared.task, lambda event: None)

    def press(self, service: Service, clock: Clock) -> None:
        """Press the next key."""
        key, pressed = self.session[self.keys], self.at
        self.keys += 1
        self.at += key.gap_s
        if explained(key.body, self.shown):
            self.outcomes["explained"] += 1
            return
        request = InfillRequest.model_validate({**key.body, **self.fields})
        prepared = service.infill(request, Caller("", self.name, explicit=True, arrived=pressed))
        seen = [0]
        self.visible.append(0)
        index = len(self.visible) - 1

        def sink(event: Delta | Completion) -> None:
            ms = 1000 * (clock() - pressed)
            if isinstance(event, Delta):
                seen[0] += len(event.text)
                if ms <= 250:
                    self.visible[index] = seen[0]
                return
            self.outcomes[event.outcome] += 1
            self.passes += event.figures.passes
            if event.outcome == "done":
                prepared.remember(event)
                self.latency_ms.append(ms)
                self.reuse.append(event.cached_tokens / event.prompt_tokens)
                self.shown = (key.body["input_prefix"] + key.body["prompt"], event.text)
                agreed = [a == b for a, b in zip(event.text, key.truth, strict=False)]
                self.accepted += next((i for i, same in enumerate(agreed) if not same), len(agreed))

        try:
            service.engine.submit(prepared.task, sink)
        except QueueFullError:
            self.outcomes["refused"] += 1


class Talker:
    """Talks about a long text without an end."""

    def __init__(self, service: Service, number: int, text: str) -> None:
        self.service = service
        messages = [{"role": "user", "content": f"# {number}\n{text}"}]
        self.body = ChatRequest.model_validate({"messages": messages, "max_tokens": 400})
        self.tokens, self.talking = 0, False

    def talk(self) -> None:
        """Ask, and again when that is answered."""
        if self.talking:
            return
        service = self.service
        prepared = service.raw(service.prompts.chat(self.body.messages), self.body, Caller(), 400)
        self.talking = True
        self.hush = service.engine.submit(prepared.task, self._hear).cancel

    def _hear(self, event: Delta | Completion) -> None:
        if isinstance(event, Delta):
            self.tokens += len(event.token_ids)
        else:
            self.talking = False


def simulate(
    service: Service, clock: Clock, sessions: list[list[Key]], chats: list[str], fields: dict[str, Any]
) -> Any:
    """Let all type and talk at once."""
    began = clock()
    talkers = [Talker(service, number, text) for number, text in enumerate(chats)]
    typists = [Typist(n, session, fields) for n, session in enumerate(sessions)]
    for typist in typists:
        typist.open(service)
        while service.engine.go_on():
            pass
    for typist in typists:
        typist.at = clock() + 0.03 * typist.number
    opened = clock() - began
    working = True
    while True:
        typing = [typist for typist in typists if not typist.over]
        due = [typist for typist in typing if typist.at <= clock()]
        if due:
            min(due, key=lambda typist: typist.at).press(service, clock)
            working = True
            continue
        if not typing and not service.engine.busy and not service.engine.queue_length:
            break
        for talker in talkers:
            if typing:
                talker.talk()
            else:
                talker.hush()
        working = service.engine.go_on()
        if not working and typing:
            clock.wait_until(min(typist.at for typist in typing))
    latency = [ms for typist in typists for ms in typist.latency_ms]
    return {
        "seconds": clock() - began,
        "opening_ms": 1000 * opened / len(typists),
        "outcomes": dict(sum((typist.outcomes for typist in typists), Counter[str]())),
        "answer_ms": {"p50": percentile(latency, 0.5), "p95": percentile(latency, 0.95)},
        "visible_at_250_ms": [statistics.mean(typist.visible or [0]) for typist in typists],
        "prompt_reused": {
            "p50": percentile([share for typist in typists for share in typist.reuse], 0.5),
            "p05": percentile([share for typist in typists for share in typist.reuse], 0.05),
        },
        "accepted_characters": sum(typist.accepted for typist in typists),
        "passes": sum(typist.passes for typist in typists),
        "chat_tokens": sum(talker.tokens for talker in talkers),
    }


def main() -> None:
    """Simulate every variant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", default="uvicorn", help="an installed package to type in")
    parser.add_argument("--clients", type=int, default=8, help="how many type at once")
    parser.add_argument("--chats", type=int, default=2, help="how many talk while they type")
    parser.add_argument("--keys", type=int, default=20, help="keys of a session")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", nargs="+", default=["drafting", "drafting off"], choices=list(VARIANTS))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    os.environ["RETRIEVE_SPEC_CACHE"] = str(folder / "cache")
    workspace = folder / "workspace"
    shutil.copytree(find_package(options.package), workspace, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    files = sorted(p for p in workspace.rglob("*.py") if len(p.read_text("utf-8").splitlines()) > 80)
    chosen = random.Random(options.seed).sample(files, min(options.clients, len(files)))
    sessions = [make_session(path, options.seed + i, options.keys) for i, path in enumerate(chosen)]
    for path in chosen:
        path.unlink()  # what is typed is not in the workspace
    talks = [sessions[0][0].body["input_prefix"][-6000:]] * options.chats
    report: dict[str, Any] = {}
    try:
        for name in options.variants:
            clock = Clock()
            model, tokenizer = load_model("reference")
            service = assemble(
                model, tokenizer, "reference", ServeConfig(), workspaces=[workspace], clock=clock
            ).service
            assert service.workspace is not None
            service.workspace.scan()
            for _ in range(2):  # kernels
                simulate(service, clock, [sessions[0][:2]], talks[:1], VARIANTS[name])
            service.forget("")
            report[name] = simulate(service, clock, sessions, talks, VARIANTS[name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps(report))


if __name__ == "__main__":
    main()
