"""Streams between threads: what the engine's thread says about a task, in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from retrieve_spec.server.engine import EngineClosedError, QueueFullError
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.service import Prepared, Service


class Stream:
    """What the engine says about one task, as an asynchronous iterator; leaving it early gives the task up.

    Parameters
    ----------
    service
        The server's parts.
    prepared
        The task.
    """

    def __init__(self, service: Service, prepared: Prepared) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delta | Completion] = asyncio.Queue()

        def sink(event: Delta | Completion) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self.prepared = prepared
        try:
            self._ticket = service.engine.submit(prepared.task, sink)
        except (QueueFullError, EngineClosedError) as error:
            raise Refusal(503, str(error), "overloaded") from error

    async def __aiter__(self) -> AsyncIterator[Delta | Completion]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Completion):
                return

    async def result(self, seen: Callable[[Delta], object] | None = None) -> Completion:
        """The completion, when it is there; ``seen`` is called with every delta before it."""
        async for event in self:
            if isinstance(event, Completion):
                return event
            if seen is not None:
                seen(event)
        raise AssertionError("a stream ends with a completion")

    def close(self) -> None:
        """Give the task up (no effect when it is done)."""
        self._ticket.cancel()


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Delta | Completion]]:
    """What comes of several tasks, as it comes, each with the number of its task."""
    events: asyncio.Queue[tuple[int, Delta | Completion]] = asyncio.Queue()

    async def follow(number: int, stream: Stream) -> None:
        async for event in stream:
            events.put_nowait((number, event))

    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    followers = [asyncio.ensure_future(follow(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            number, event = await events.get()
            left -= isinstance(event, Completion)
            yield number, event
    finally:
        for follower in followers:
            follower.cancel()
