"""Connections that bring a request's head in time and in bounds, or end."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 20.0
"""Seconds a client may take from the connection, or from a request's first byte, to the end of the headers."""
HEAD_BYTES = 64 << 10


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with a bound of time and of bytes on what comes before a body."""

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins; the first one has been waited for since the connection was made."""
        self._head_bytes = 0
        if self._timer is None:
            self._wait()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is here; the time of a body is bounded where it is read."""
        self._stop_waiting()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Read what came, unless the connection has been given up."""
        if not self.transport.is_closing():
            super().data_received(data)

    def shutdown(self) -> None:
        """The server ends, and with it a stream under way; an answer that comes as a whole is still sent."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and cycle.chunked_encoding and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.close()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._refuse, b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, piece: bytes) -> None:
        self._head_bytes += len(piece)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
