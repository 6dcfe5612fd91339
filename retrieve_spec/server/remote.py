"""Remote completer: suggestions of a server that editors share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import logging
import os
import socket
import threading
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from retrieve_spec.errors import ServeError
from retrieve_spec.server.lsp import Completer, Cursor, create_server

log = logging.getLogger("retrieve_spec.server")

_ANSWER_S = 60.0
_AGAIN_S = 0.25
_CHARS_BEFORE, _CHARS_AFTER = 400_000, 100_000
"""Characters before and after a cursor that are sent: as many as any model is shown."""


class Remote:
    """The address of a server, as ``http://127.0.0.1:8012``, and how to ask it with an API key, "" for none.

    Raises
    ------
    ServeError
        The address is none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        try:
            self.host, port = parts.hostname or "", parts.port
        except ValueError:
            self.host, port = "", None
        if parts.scheme not in ("http", "https") or not self.host or parts.query:
            raise ServeError("the address of a server, as http://127.0.0.1:8012", repr(url), "Give one like it.")
        self.url, self._path, self._key = url.rstrip("/"), parts.path.rstrip("/"), key
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.port = port or (443 if parts.scheme == "https" else 80)

    def connection(self, timeout: float | None = _ANSWER_S) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        return self._kind(self.host, self.port, timeout=timeout)

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, client: str = ""
    ) -> http.client.HTTPResponse:
        """Send a request; the answer's head."""
        headers: dict[str, str | bytes] = {"Content-Type": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}".encode()  # keys are not always Latin-1
        if client:
            headers["X-Client-Id"] = client
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        connection.request(method, self._path + path, data, headers)
        return connection.getresponse()

    def ask(self, method: str, path: str, body: Any = None, *, timeout: float = 5.0) -> tuple[int, Any]:
        """Status and body of an answer; status 0 where nobody answers."""
        connection = self.connection(timeout)
        try:
            answer = self.send(connection, method, path, body)
            return answer.status, _parsed(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


class RemoteCompleter(Completer):
    """Completions by a server elsewhere, which sees what was taken and saved itself."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._me = f"lsp-{os.getpid()}"

    async def complete(self, cursor: Cursor) -> str:
        """A suggestion for a place."""
        near = replace(cursor, left=cursor.left[-_CHARS_BEFORE:], right=cursor.right[:_CHARS_AFTER])
        body = {**near.request(), "response_fields": ["content"]}
        client = f"{self._me}-{hashlib.sha256(cursor.uri.encode('utf-8', 'replace')).hexdigest()[:16]}"
        connection = self.remote.connection()

        def exchange() -> tuple[int, Any]:
            try:
                answer = self.remote.send(connection, "POST", "/infill", body, client)
                return answer.status, _parsed(answer.read())
            except (OSError, http.client.HTTPException):
                return 0, None
            finally:
                connection.close()

        try:
            status, found = await asyncio.to_thread(exchange)
        except asyncio.CancelledError:
            _hang_up(connection.sock)  # the server stops after the pass under way
            raise
        if status != 200:
            log.warning("%s answered %s: %s", self.remote.url, status or "nothing", reason_of(found))
            return ""
        text = str(found.get("content", "")) if isinstance(found, dict) else ""
        return text if text.strip() else ""

    def forget(self) -> None:
        """Have the server drop what it keeps of this user."""
        self.remote.ask("DELETE", "/v1/workspace", timeout=_ANSWER_S)

    def close(self) -> None:
        """Nothing to end: the server is not this editor's."""


def connected(remote: Remote, given_up: threading.Event) -> RemoteCompleter:
    """A completer that asks a server, once its model is loaded.

    Raises
    ------
    ServeError
        Nobody answers, the server refuses, or it was ``given_up`` to wait.
    """
    while True:
        status, found = remote.ask("GET", "/v1/models")
        if status == 200:
            return RemoteCompleter(remote)
        if status != 503:
            got = f"it answered {status}: {reason_of(found)}" if status else "nobody answers"
            raise ServeError(f"to reach {remote.url}", got, "Start retrieve-spec serve; check --connect and the key.")
        if given_up.wait(_AGAIN_S):
            raise ServeError(f"to reach {remote.url}", "the editor has closed it", "Open the editor again.")


def connect_stdio(remote: Remote) -> None:
    """Serve a language server on standard input and output by asking a server elsewhere."""
    given_up = threading.Event()
    server = create_server(lambda roots: connected(remote, given_up))
    server.give_up = given_up.set
    server.start_io()


def reason_of(body: Any) -> str:
    """What a server says of a request that it refuses, "" for nothing."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def _hang_up(held: socket.socket | None) -> None:
    """Close a connection that another thread reads from."""
    if held is not None:
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)
