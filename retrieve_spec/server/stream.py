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
    loop
        The event loop it is read in; the stream may be opened in any thread.
    """

    def __init__(self, service: Service, prepared: Prepared, loop: asyncio.AbstractEventLoop) -> None:
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

    async def result(self) -> Completion:
        """The completion, when it is there."""
        while isinstance(event := await self._events.get(), Delta):
            pass
        return event

    def close(self) -> None:
        """Give the task up (no effect when it is done)."""
        self._ticket.cancel()


async def opened(
    service: Service, prepare: Callable[[], Sequence[Prepared]], then: Callable[[Sequence[Stream]], object] = len
) -> list[Stream]:
    """Streams of tasks that a thread prepares and hands to the engine, which need not wait for the event loop.

    What is to be done while the model is at work on them, the thread does ``then``.

    Raises
    ------
    Refusal
        503: the engine takes no more of them; and whatever `prepare` raises.
    """
    loop = asyncio.get_running_loop()

    def work() -> list[Stream]:
        streams: list[Stream] = []
        try:
            for item in prepare():
                streams.append(Stream(service, item, loop))
            then(streams)
        except BaseException:
            _close(streams)
            raise
        return streams

    opening = loop.run_in_executor(None, work)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread goes on
        opening.add_done_callback(_give_up)
        raise


def _give_up(opening: asyncio.Future[list[Stream]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        _close(opening.result())


def _close(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.close()


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
