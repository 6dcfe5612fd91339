"""Remote completer: suggestions of a server that editors share, which is started where none answers.

While an editor is there it holds one connection (`GET /v1/attach`) open. A server that was started for editors ends
some time after the last of these connections, however that one ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from retrieve_spec.errors import ServeError, in_a_line
from retrieve_spec.paths import cache_dir
from retrieve_spec.server.completer import Completer, Cursor
from retrieve_spec.server.guard import is_loopback

log = logging.getLogger("retrieve_spec.server")

LINGER_S = 30
"""Seconds that a server which was started for editors goes on without one."""
_ANSWER_S = 60.0
_AGAIN_S = 1.0
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
        self.here = parts.scheme == "http" and is_loopback(self.host) and not self._path

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

    def listens(self) -> bool:
        """Whether anybody is there, be it too busy to answer."""
        try:
            socket.create_connection((self.host, self.port), timeout=5.0).close()
        except OSError:
            return False
        return True


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


Start = Callable[[], "subprocess.Popen[bytes] | None"]


class RemoteCompleter(Completer):
    """Completions by a server elsewhere, which sees what was taken and saved itself.

    What can ``start`` one there gives its process.
    """

    def __init__(self, remote: Remote, start: Start | None = None) -> None:
        self.remote, self._start = remote, start
        self._me = f"lsp-{os.getpid()}"
        self._attached = threading.Event()
        self._closed = threading.Event()
        self._held: socket.socket | None = None
        self.trouble = ""
        threading.Thread(target=self._run, name="retrieve-spec-attached", daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the server is there; False if it is not in time, or never will be."""
        return self._attached.wait(seconds) and not self.trouble

    async def complete(self, cursor: Cursor) -> list[str]:
        """Suggestions for a place, the best first."""
        near = replace(cursor, left=cursor.left[-_CHARS_BEFORE:], right=cursor.right[:_CHARS_AFTER])
        body = {**near.request(), "response_fields": ["content", "superseded"]}
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
            return []
        answers = found if isinstance(found, list) else [found]
        return [str(one["content"]) for one in answers if isinstance(one, dict) and str(one.get("content", "")).strip()]

    def forget(self) -> None:
        """Have the server drop what it keeps of this user."""
        self.remote.ask("DELETE", "/v1/workspace", timeout=_ANSWER_S)

    def close(self) -> None:
        """Let go of the server; who waits for it does so no longer."""
        self._closed.set()
        _hang_up(self._held)
        self._fail("closed")

    def _fail(self, trouble: str) -> None:
        self.trouble = self.trouble or trouble
        self._attached.set()

    def _run(self) -> None:
        try:
            self._hold()
        except Exception as error:
            log.exception("the server at %s is not looked for any longer", self.remote.url)
            self._fail(in_a_line(error))

    def _hold(self) -> None:
        """Hold a connection open while the editor lives; where it ends, look for the server again."""
        start, process = self._start, None
        while not self._closed.is_set():
            ended = process is not None and process.poll() is not None  # before: another's may listen since
            status, found = self.remote.ask("GET", "/health")
            if status == 0 and ended and not self.remote.listens():
                if not self._attached.is_set():
                    return self._fail(f"the server that was started ended; see {log_of(self.remote)}")
                process = None  # an editor that had one goes on looking
            elif status == 0 and start is not None and not self._closed.is_set():
                try:
                    process = start()
                except OSError as error:
                    return self._fail(f"none could be started: {error}")
                start = None  # once: a server that does not come up says why in its log
            elif status == 200:
                self._attach()
                start = self._start
            elif status not in (0, 503):
                return self._fail(f"{self.remote.url} answered {status}: {reason_of(found)}")
            self._closed.wait(_AGAIN_S / 4 if status == 503 else _AGAIN_S)

    def _attach(self) -> None:
        connection = self.remote.connection(None)
        try:
            connection.connect()
            self._held = connection.sock
            answer = self.remote.send(connection, "GET", "/v1/attach")
            if answer.status == 404:  # another program that speaks the dialect
                self._attached.set()
                self._closed.wait()
            elif answer.status != 200:
                self._fail(f"{self.remote.url} answered {answer.status}: {reason_of(_parsed(answer.read()))}")
                self._closed.set()
            else:
                self._attached.set()
                while answer.read(1):
                    pass
        except (OSError, http.client.HTTPException):
            pass  # the server ended, or this end was closed
        finally:
            self._held = None
            connection.close()


def reason_of(body: Any) -> str:
    """What a server says of a request that it refuses, "" for nothing."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def _hang_up(held: socket.socket | None) -> None:
    """Close a connection that another thread reads from."""
    if held is not None:
        with contextlib.suppress(OSError):
            held.shutdown(socket.SHUT_RDWR)


def log_of(remote: Remote) -> Path:
    """Where a server that is started for editors says what happens to it."""
    return cache_dir() / "servers" / f"{remote.port}.log"


def starter(remote: Remote, arguments: Sequence[str]) -> Start | None:
    """What starts a server with these arguments at an address of this machine, None for one elsewhere."""
    if not remote.here:
        return None

    def start() -> subprocess.Popen[bytes]:
        said_in = log_of(remote)
        said_in.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "retrieve_spec.cli", "serve", "--host", remote.host]
        command += ["--port", str(remote.port), "--linger", str(LINGER_S), *arguments]
        with open(said_in, "ab", opener=lambda p, f: os.open(p, f, 0o600)) as said:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, close_fds=True
            )
        log.warning("no server at %s: one is being started, its log is %s", remote.url, said_in)
        return process

    return start
