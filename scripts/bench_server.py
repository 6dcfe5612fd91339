"""Benchmark of the server where many ask at once, some of them nonsense.

    python scripts/bench_server.py --clients 200 --seconds 60

Clients are answered, or not, with the text that drafting off gives; memory is looked at after a third of the time and
at its end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import harness
from bench_typing import Server, find_package, make_session, percentiles

from retrieve_spec.bench.machine import resident_bytes

LARGE = b"x" * (5 << 20)
MALFORMED = [
    *(LARGE, b"{", b"[]", b"[" * 50_000, b"\xff" * 50, b'{"input_prefix": 1, "input_suffix": ""}'),
    b'{"input_prefix": "", "input_suffix": "", "input_extra": [' + b"{}," * 9000 + b"{}]}",
]


def post(connection: http.client.HTTPConnection, body: bytes, client: str = "") -> tuple[int, Any]:
    """Status and answer of one `/infill`."""
    connection.request("POST", "/infill", body, {"Content-Type": "application/json", "X-Client-Id": client})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


class Crowd:
    """Clients that ask one after another for texts that are known, and now and then for nonsense."""

    def __init__(self, server: Server, bodies: list[dict[str, Any]]) -> None:
        self.server, self.seen, self.wrong, self.took = server, Counter[str](), list[Any](), list[float]()
        self.over = threading.Event()
        self.bodies = [json.dumps(body).encode() for body in bodies]
        plain = [json.dumps({**body, "speculative": False}).encode() for body in bodies]
        self.texts = [post(server.connect(), body)[1]["content"] for body in plain]

    def come(self, number: int) -> None:
        """Ask until it is over."""
        rng, connection = random.Random(number), self.server.connect()
        while not self.over.is_set():
            if rng.random() < 0.05:
                self.nonsense(rng, connection)
                connection = self.server.connect()
                continue
            which, begun = rng.randrange(len(self.bodies)), time.perf_counter()
            status, answer = post(connection, self.bodies[which], f"client {number}")
            text, expected = answer.get("content", ""), self.texts[which]
            if status != 200:
                self.note(str(status), status == 503, answer)
                time.sleep(rng.random())
            elif answer.get("superseded") or answer.get("deadline"):
                self.note("in part", expected.startswith(text), text)
            else:
                self.took.append(1000 * (time.perf_counter() - begun))
                self.note("answered", text == expected, [expected, text])

    def nonsense(self, rng: random.Random, connection: http.client.HTTPConnection) -> None:
        """Send what nobody should, and let go of the connection."""
        if rng.random() < 0.3:  # an upload that ends in the middle, or an answer that nobody waits for
            body = rng.choice(self.bodies)
            part = body[: rng.choice((len(body) // 2, len(body)))]
            connection.request("POST", "/infill", part, {"Content-Length": str(len(body))})
            self.note("given up", True)
        else:
            body = rng.choice(MALFORMED)
            got = post(connection, body)
            self.note("malformed", got[0] == (413 if body is LARGE else 400), got)
        connection.close()

    def note(self, what: str, right: bool, got: Any = None) -> None:
        """Count an answer, and keep it if it is wrong."""
        self.seen[what] += 1
        self.wrong += [] if right else [got]


def resident(server: Server) -> float:
    """MiB of memory that the server holds."""
    return resident_bytes(server.child.pid) / 2**20


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Let many ask at once."""
    files = sorted(find_package("uvicorn").glob("*.py"), key=lambda path: -path.stat().st_size)[:8]
    keys = [key for seed, path in enumerate(files) for key in make_session(path, seed, 6)]
    same = {"stream": False, "n_predict": 16, "t_max_predict_ms": 0, "deadline_ms": 60_000}
    with tempfile.TemporaryDirectory() as folder, closing(Server(Path(folder), ["--max-body-mib", "4"])) as server:
        asked = Crowd(server, [{**key.body, **same} for key in keys])
        memory = []
        with ThreadPoolExecutor(options.clients) as pool:
            clients = [pool.submit(asked.come, number) for number in range(options.clients)]
            for _ in range(int(2 * options.seconds)):
                time.sleep(0.5)
                memory.append(resident(server))
            asked.over.set()
        third, sixth = len(memory) // 3, len(memory) // 6
        warm, end = statistics.median(memory[third : third + sixth]), statistics.median(memory[-sixth:])
        return {
            **{"clients": options.clients, "seconds": options.seconds, "seen": dict(asked.seen)},
            **{"wrong": len(asked.wrong), "for_example": asked.wrong[:2]},
            "errors": [repr(client.exception()) for client in clients if client.exception()],
            "answer_ms": percentiles(asked.took),
            "memory_mib": {"warm": warm, "end": end, "every_10_s": memory[::20], "later": resident(server)},
        }


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, clients=200, seconds=60.0)


if __name__ == "__main__":
    main()
