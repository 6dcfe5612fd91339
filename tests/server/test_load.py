"""Many clients at once, some of them malformed: nobody waits for ever, nothing grows without bound."""

import asyncio
import collections
import json
import os
import random
import time

import httpx
import pytest
from scripted import ScriptedBackend
from waiting import wait_for

from retrieve_spec.config import ServeConfig

SECONDS = float(os.environ.get("RETRIEVE_SPEC_LOAD_SECONDS", "8"))
CLIENTS = 200
MALFORMED = [
    (b"{", 400),
    (b"[]", 400),
    (b'{"input_prefix": 1, "input_suffix": ""}', 400),
    (b'{"input_suffix": ""}', 400),
    (b'{"input_prefix": "", "input_suffix": "", "input_extra": [{}]}', 400),
    (b"\xff" * 50, 400),
    (b"x" * 300_000, 413),
]


def rss():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def one_client(number, client, goes_on, seen):
    rng = random.Random(number)
    line = ""
    while goes_on():
        if rng.random() < 0.05:
            content, status = rng.choice(MALFORMED)
            answer = await client.post("/infill", content=content)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
            seen["malformed"] += 1
            continue
        line = (line + rng.choice("abcdef ."))[-30:]
        body = {"input_prefix": f"client = {number}\n", "prompt": line, "input_suffix": "\n", "n_predict": 8}
        headers = {"X-Client-Id": str(number)} if number % 2 else {}
        try:
            timeout = 0.02 if rng.random() < 0.03 else 120
            answer = await client.post("/infill", json=body, headers=headers, timeout=timeout)
        except httpx.TimeoutException:
            assert timeout < 1, "a request was never answered"
            seen["left"] += 1
            continue
        if answer.status_code == 503:
            seen["busy"] += 1
            await asyncio.sleep(rng.random() * 0.1)
            continue
        assert answer.status_code == 200, answer.text
        seen["superseded" if answer.json().get("superseded") else "answered"] += 1
        await asyncio.sleep(rng.random() * 0.2)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")
def test_two_hundred_clients(live, codec):
    class Working(ScriptedBackend):
        def _pass(self):
            time.sleep(0.001)
            super()._pass()

    said = codec.encode("return a + b\n")
    config = ServeConfig(max_queue=32, max_body_bytes=256 << 10, stale_s=0.5)
    server = live(Working(lambda prompt: [*said, 0]), config=config)
    seen: collections.Counter[str] = collections.Counter()

    async def run():
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=120, trust_env=False) as client:
            began = time.monotonic()

            def goes_on():
                taken = time.monotonic() - began
                return taken < SECONDS or (seen["answered"] <= CLIENTS and taken < 20 * SECONDS)  # a busy machine

            await asyncio.gather(*(one_client(number, client, goes_on, seen) for number in range(CLIENTS)))

    server.post("/infill", {"input_prefix": "", "input_suffix": ""})
    before = rss()
    asyncio.run(run())
    assert seen["answered"] > CLIENTS
    assert seen["malformed"] > 0
    wait_for(lambda: server.service.queue.queue_length == 0)  # the last to leave may not have been noticed yet
    assert server.client.get("/health").status_code == 200
    assert rss() - before < 300 << 20
    assert len(server.service.queue._pool._slots) <= config.slots
    print(json.dumps(dict(seen)))
