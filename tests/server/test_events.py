"""Event streams: every event in turn, and an end where the client, or the server, goes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from retrieve_spec.server.completions import EventStream, opened
from retrieve_spec.server.guard import Refusal


class Client:
    """The other end of an ASGI connection."""

    def __init__(self, method: str = "GET") -> None:
        self.scope = {"type": "http", "method": method}
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)


class Source:
    """Events that come when they are asked for, and then no more."""

    def __init__(self, events: list[bytes], ends: bool = True) -> None:
        self.log: list[str] = []
        self._events, self._ends = events, ends
        self.waits = asyncio.Event()

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        self.log.append("begun")
        try:
            for event in self._events:
                yield event
            if not self._ends:
                self.waits.set()
                await asyncio.Event().wait()
        finally:
            self.log.append("closed")


def test_a_client_that_leaves_ends_the_stream_and_nothing_else() -> None:
    async def run() -> str:
        client, source = Client(), Source([b"one"], ends=False)
        response = asyncio.create_task(EventStream(source())(client.scope, client.receive, client.send))
        await source.waits.wait()
        client.gone.set()
        await response
        assert source.log == ["begun", "closed"]
        assert client.sent[-1]["more_body"]
        assert not response.cancelling()
        await asyncio.sleep(0)  # what handled the request goes on
        return "over"

    assert asyncio.run(run()) == "over"


class Taking:
    """An engine that takes a number of tasks, and notes which are given up."""

    def __init__(self, most: int) -> None:
        self.given_up: list[Any] = []
        self.taken: list[Any] = []
        self._most = most

    def submit(self, task: Any, sink: Any) -> Any:
        if len(self.taken) == self._most:
            raise Refusal(503, "there is no room")
        self.taken.append(task)
        return lambda: self.given_up.append(task)


def tasks(*names: str) -> list[Any]:
    return [SimpleNamespace(task=name) for name in names]


def test_tasks_of_one_request_are_all_taken_or_none() -> None:
    engine = Taking(2)
    service: Any = SimpleNamespace(queue=engine)
    with pytest.raises(Refusal):
        asyncio.run(opened(service, lambda: tasks("a", "b", "c")))
    assert engine.given_up == ["a", "b"]


def test_a_request_that_is_cancelled_while_a_thread_prepares_it_is_given_up() -> None:
    async def run() -> list[Any]:
        engine, may_go_on = Taking(9), threading.Event()
        service: Any = SimpleNamespace(queue=engine)

        def prepare() -> list[Any]:
            may_go_on.wait(60)
            return tasks("a", "b")

        opening = asyncio.create_task(opened(service, prepare))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        may_go_on.set()
        while len(engine.given_up) < 2:
            await asyncio.sleep(0.001)
        return engine.given_up

    assert asyncio.run(run()) == ["a", "b"]
