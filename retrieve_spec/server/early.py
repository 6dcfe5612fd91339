"""Answers of a server from its first second: it is loading, before libraries are even imported."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from threading import Event, Thread
from time import monotonic
from typing import Any

from retrieve_spec.errors import ServeError

_BACKLOG = 128
_LOOK_S = 0.1
"""Seconds between two checks of whether the thread should end."""
_HEAD_S, _HEAD_BYTES = 1.0, 64 << 10
"""Limits of a request's head, in seconds and bytes."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; requests wait until it is served.

    The protocol is set because asyncio only then disables Nagle's algorithm.

    Raises
    ------
    ServeError
        The address is in use, or does not belong to this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ServeError(
            f"to listen on {host}, port {port}",
            error.strerror or str(error),
            "End what listens there, or choose another with --port.",
        ) from error
    return listener


def loading(stage: str, seconds: float) -> dict[str, Any]:
    """Return the answer of a server that is not ready, in llama.cpp's form, with its progress."""
    error = {"code": 503, "message": f"Loading model: {stage}", "type": "unavailable_error"}
    return {"error": error, "status": "loading", "loading": {"stage": stage, "seconds": round(seconds, 1)}}


class EarlyListener:
    """A listening socket; a thread answers its connections with 503 until it is released."""

    def __init__(self, listener: socket.socket) -> None:
        self.socket, self._begun, self._over = listener, monotonic(), Event()
        self.socket.settimeout(_LOOK_S)
        self._thread = Thread(target=self._answer, name="retrieve-spec-early", daemon=True)
        self._thread.start()

    def release(self) -> socket.socket:
        """End the thread; the caller owns the socket from then on."""
        self._over.set()
        self._thread.join()
        return self.socket

    def close(self) -> None:
        """Close the socket."""
        self.release().close()

    def _answer(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):
                connection, _ = self.socket.accept()
                with connection:
                    self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        connection.settimeout(_HEAD_S)
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
            part = connection.recv(4096)
            if not part:
                return
            head += part
        body = json.dumps(loading("importing libraries", monotonic() - self._begun)).encode()
        connection.sendall(
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
