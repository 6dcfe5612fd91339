"""Attached editors: connections that say that an editor is there; a server of theirs ends some time after the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response

from retrieve_spec.server.events import EventStream

_PING_S = 30


class Attached:
    """Counts the editors that are there, and ends the server ``linger_s`` seconds after the last one; 0 for never."""

    def __init__(self, linger_s: float = 0.0, end: Callable[[], None] = lambda: None) -> None:
        self._linger_s, self._end = linger_s, end
        self._timer: asyncio.TimerHandle | None = None
        self.count = 0

    def wait(self) -> None:
        """Begin to count the time without an editor; for the event loop."""
        self._stop()
        if self._linger_s and not self.count:
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def attach(self, request: Request) -> Response:
        """`GET /v1/attach`: a stream without events, open for as long as the editor is there."""

        async def nothing() -> AsyncGenerator[bytes, None]:
            self.count += 1
            self._stop()
            try:
                while True:
                    await asyncio.sleep(_PING_S)
                    yield b": still here\n\n"
            finally:
                self.count -= 1
                self.wait()

        return EventStream(nothing())
