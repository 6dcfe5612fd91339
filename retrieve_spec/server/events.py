"""Event streams: responses of server-sent events, each sent as it comes, which end where the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_HEADERS = {"Cache-Control": "no-store", "Connection": "keep-alive", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """A response whose events an asynchronous generator makes; it is closed at the end, or where nobody listens."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and every event; nothing but the head where only that is asked for."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] == "HEAD" or await self._is_sent(receive, send):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()

    async def _is_sent(self, receive: Receive, send: Send) -> bool:
        """Send all events; whether there was somebody until the end."""
        sending, left = asyncio.current_task(), False
        assert sending is not None

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = True
            sending.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except asyncio.CancelledError:
            if not left or sending.uncancel():  # cancelled by somebody else, too
                raise
        finally:
            watching.cancel()
        return not left
