"""Streams: what the queue's thread says about the tasks of a request, in an event loop, and events to a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.queueing import QueueClosedError, QueueFullError
from retrieve_spec.server.service import Prepared, Service

_HEADERS = {"Cache-Control": "no-store", "Connection": "keep-alive", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Server-sent events that a generator makes; it is closed at the end, or where the client goes away."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and every event."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.events.aclose()


Said = tuple[int, Delta | Completion]
"""What the queue says, and the number of the task that it is about."""


class Stream:
    """What the queue says about the tasks of a request: all that has come since the last look.

    Attributes
    ----------
    prepared
        The tasks that have begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._said: deque[Said] = deque()
        self._told = asyncio.Event()
        self._leave: list[Callable[[], None]] = []
        self.prepared: list[Prepared] = []

    def begin(self, service: Service, prepared: Prepared) -> None:
        """Hand a task to the queue.

        Raises
        ------
        Refusal
            503: it takes no more.
        """
        number = len(self.prepared)

        def sink(event: Delta | Completion) -> None:
            self._said.append((number, event))
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._told.set)

        try:
            self._leave.append(service.queue.submit(prepared.task, sink))
        except (QueueFullError, QueueClosedError) as error:
            raise Refusal(503, str(error), "overloaded") from error
        self.prepared.append(prepared)

    async def __aiter__(self) -> AsyncIterator[list[Said]]:
        left = len(self.prepared)
        while left:
            await self._told.wait()
            self._told.clear()
            said = [self._said.popleft() for _ in range(len(self._said))]
            left -= sum(isinstance(event, Completion) for _, event in said)
            if said:
                yield said

    async def results(self) -> list[Completion]:
        """The completions, when all are there."""
        done = {number: event async for said in self for number, event in said if isinstance(event, Completion)}
        return [done[number] for number in range(len(self.prepared))]

    def close(self) -> None:
        """Give the tasks up (no effect on those that are done)."""
        for leave in self._leave:
            leave()


async def opened(
    service: Service, prepare: Callable[[], Sequence[Prepared]], then: Callable[[Prepared], object] | None = None
) -> Stream:
    """The stream of tasks that a thread prepares and hands to the queue, which need not wait for the event loop.

    ``then`` is done by the thread with the first of them, while the model is at work.

    Raises
    ------
    Refusal
        503: the queue takes no more of them; and whatever `prepare` raises.
    """
    stream = Stream(asyncio.get_running_loop())

    def work() -> None:
        try:
            for item in prepare():
                stream.begin(service, item)
            if then is not None:
                then(stream.prepared[0])
        except BaseException:
            stream.close()
            raise

    opening = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread goes on
        opening.add_done_callback(lambda _: stream.close())
        raise
    return stream
