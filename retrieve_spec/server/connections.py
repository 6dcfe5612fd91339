"""Connections that bring a request's head in time and in bounds, or end."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_S = 20.0
"""Seconds a client may take from the connection, or from a request's first byte, to the end of the headers."""
HEAD_BYTES = 64 << 10
_BEGINNING = b"HTTP/1.1 "
"""What every answer begins with."""
_LOOK_S = 0.02
"""Seconds between two looks whether a client that says nothing more still reads."""


class _Begun:
    """The transport of an answer whose beginning has been sent."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport

    def write(self, data: bytes) -> None:
        """Send the rest of the answer's head; what comes after it goes to the connection's own transport."""
        self._cycle.transport = self._transport
        self._transport.write(data[len(_BEGINNING) :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with a bound of time and of bytes on what comes before a body."""

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _answering: RequestResponseCycle | None = None
    _says_no_more = False

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

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client says no more; it gets the answer under way if it still reads.

        One that has closed the connection looks the same, until something is sent to it: the beginning of the answer,
        or of a chunk's length, which may be a zero.
        """
        answer = self._answering
        if answer is None or answer.response_complete or answer.more_body:
            return False
        self._says_no_more = True
        if not answer.response_started:
            answer.transport.write(_BEGINNING)
            answer.transport = _Begun(answer)  # type: ignore[assignment]
        elif answer.chunked_encoding:
            answer.transport.write(b"0")
        self.loop.call_soon(self._look)
        return True

    def _look(self) -> None:
        """End the connection where what was sent has not been taken."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_S, self._look)

    def on_response_complete(self) -> None:
        """An answer is over, and so is the connection where no further request waits in it and none will come."""
        super().on_response_complete()
        if self._says_no_more and self._answering is not None and self._answering.response_complete:
            self.transport.close()

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
