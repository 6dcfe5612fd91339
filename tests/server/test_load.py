"""Many clients at once, some of which go away: nobody waits for ever, nothing grows without bound."""

import asyncio
import collections
import random
from typing import Any

import httpx
import pytest
from waiting import HANG_S, wait_for

from retrieve_spec.bench.machine import resident_bytes
from retrieve_spec.config import ServeConfig

CLIENTS, KEYS = 200, 3


async def one_client(number, client, seen):
    rng, line = random.Random(number), ""
    headers = {"X-Client-Id": str(number)} if number % 2 else {}
    for _ in range(KEYS):
        line += rng.choice("abcdef .")
        body = {"input_prefix": f"client = {number}\n", "prompt": line, "input_suffix": "\n", "n_predict": 8}
        timeout = 0.02 if rng.random() < 0.03 else HANG_S
        try:
            answer = await client.post("/infill", json=body, headers=headers, timeout=timeout)
        except httpx.TimeoutException:
            assert timeout < 1, "a request was never answered"
            seen["left"] += 1
            continue
        assert answer.status_code in (200, 503), answer.text
        seen[answer.status_code, answer.json().get("superseded", False)] += 1
        await asyncio.sleep(rng.random() * 0.2)


@pytest.mark.slow
@pytest.mark.skipif(not resident_bytes(), reason="the system does not tell how much memory a process holds")
def test_two_hundred_clients(live, say):
    config = ServeConfig(max_queue=32, stale_s=0.5)
    server = live(say("return a + b\n", pass_s=0.001), config=config)
    seen: collections.Counter[Any] = collections.Counter()

    async def run():
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(one_client(number, client, seen) for number in range(CLIENTS)))

    server.post("/infill", {"input_prefix": "", "input_suffix": ""})
    before = resident_bytes()
    asyncio.run(run())
    assert seen[200, False] > CLIENTS / 2, seen
    wait_for(lambda: server.service.queue.queue_length == 0)  # the last to leave may not have been noticed yet
    assert server.client.get("/health").status_code == 200
    assert resident_bytes() - before < 100 << 20
    assert len(server.service.queue._pool._slots) <= config.slots
