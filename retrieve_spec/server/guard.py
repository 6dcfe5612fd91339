"""What every request passes: wrong keys and pages of other origins never reach a handler, the rest is counted."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieve_spec.errors import ServeError

if TYPE_CHECKING:
    from retrieve_spec.server.jobs import Completion, Task
    from retrieve_spec.server.queueing import RequestQueue

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Kinds of errors as Anthropic calls them."""
OPEN_PATHS = frozenset({"/", "/health", "/v1/health"})
"""What answers without a key."""


class Refusal(HTTPException):
    """A request that is answered with an error, of a kind as OpenAI names them."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        headers = {"Retry-After": "1"} if status == 503 else {}
        if status in (408, 413, 499):  # what is left of the body is not read
            headers["Connection"] = "close"
        super().__init__(status, message, headers)
        self.kind = kind

    def response(self, path: str = "") -> JSONResponse:
        """The answer, in the dialect of the path that was asked."""
        body: dict[str, Any] = {"error": {"code": self.status_code, "message": self.detail, "type": self.kind}}
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC.get(self.status_code, "api_error" if self.status_code >= 500 else "invalid_request_error")
            body = {"type": "error", "error": {"type": kind, "message": self.detail}}
        return JSONResponse(body, self.status_code, self.headers)


def read_keys(path: Path) -> tuple[bytes, ...]:
    """API keys of a file, one a line; blank lines and lines that start with # are skipped.

    Raises
    ------
    ServeError
        The file cannot be read or holds no key.
    """
    try:
        lines = path.expanduser().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(
            "a readable file of API keys", f"{path} ({error})", "Give a text file, one key a line."
        ) from error
    keys = tuple(line.strip().encode() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ServeError("at least one API key", f"none in {path}", "Put one key on each line.")
    return keys


def client_key(path: Path | None) -> str:
    """The key that a client sends: the first of a file, "" without one."""
    return read_keys(path)[0].decode() if path is not None else ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: Sequence[bytes]) -> None:
    """Refuse to serve others without a key.

    Raises
    ------
    ServeError
        The host can be reached from other machines and there is no key.
    """
    if not is_loopback(host) and not keys:
        raise ServeError(
            "an API key for a host that others can reach", f"--host {host} without one", "Give --api-key-file."
        )


class Guard:
    """ASGI middleware in front of all routes.

    Parameters
    ----------
    app
        What it guards.
    keys
        Accepted API keys; none: no key is asked for.
    origins
        Browser origins that may call (`normal_origins`).
    host
        Where the server listens; on a loopback address the Host header must name one too, so that a page cannot
        reach the server under a name of its own (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[bytes] = (), origins: Sequence[str] = (), host: str = ""
    ) -> None:
        self._app = app
        self._keys = tuple(keys)
        self._origins = frozenset(origins)
        self._local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request, pass the others on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refuse(scope["path"], Headers(scope=scope))
        if scope["method"] == "HEAD":  # the connection leaves out what a GET answers with
            scope = {**scope, "method": "GET"}
        await (self._app if refusal is None else refusal.response(scope["path"]))(scope, receive, send)

    def _refuse(self, path: str, headers: Headers) -> Refusal | None:
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            return Refusal(403, f"browser pages of {origin} may not call this server (--origin allows one)", "origin")
        if origin is None and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return Refusal(403, "browser pages of other sites may not call this server", "origin")
        if self._local and not is_loopback(_host_name(headers.get("host", "localhost"))):
            return Refusal(403, "the Host header does not name this machine", "host")
        if self._keys and path not in OPEN_PATHS and not self._known(headers):
            return Refusal(401, "a valid API key is required (Authorization: Bearer …)", "authentication_error")
        return None

    def _known(self, headers: Headers) -> bool:
        given = given_key(headers)
        found = False
        for key in self._keys:  # every key is compared, in constant time each
            found |= hmac.compare_digest(given, key)
        return found


def given_key(headers: Headers) -> bytes:
    """The key a request carries, empty when none."""
    value = headers.get("authorization", "")
    scheme, _, key = value.partition(" ")
    # headers are bytes that Starlette reads as Latin-1; clients send keys of other characters as UTF-8
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode("latin-1", "replace")


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1 : host.find("]")]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def normal_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Browser origins as browsers write them: scheme and host in small letters, no path, no usual port.

    Raises
    ------
    ServeError
        One is no origin, or stands for every page there is.
    """
    found = []
    for origin in origins:
        try:
            url = httpx.URL(origin.strip())
        except httpx.InvalidURL:
            url = httpx.URL("")
        if not url.scheme or not url.host or url.path != "/" or url.query or url.fragment or "*" in url.host:
            raise ServeError(
                "the origin of a page, as http://localhost:3000",
                repr(origin),
                "Give each one that may call with an --origin of its own; there is none that stands for all.",
            )
        found.append(f"{url.scheme}://{url.netloc.decode()}")
    return tuple(found)


_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.375, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The counters of one server, in a registry of its own; of the requests in its ``queues``, too."""

    def __init__(self) -> None:
        self.queues: WeakSet[RequestQueue] = WeakSet()
        self.registry = r = CollectorRegistry()
        p = "retrieve_spec_"
        self._requests = Counter(p + "requests", "Requests by path and status.", ["path", "status"], registry=r)
        self._latency = Histogram(
            p + "request_seconds", "Time to answer, by path.", ["path"], buckets=_SECONDS, registry=r
        )
        self._first = Histogram(
            p + "first_token_seconds", "Time to the first token, by what asked.", ["kind"], buckets=_SECONDS, registry=r
        )
        self._outcomes = Counter(p + "completions", "Completions by outcome.", ["outcome"], registry=r)
        self._emitted = Counter(p + "tokens_emitted", "Tokens emitted.", registry=r)
        self._passes = Counter(p + "passes", "Forward passes spent on decoding.", registry=r)
        self._drafted = Counter(p + "draft_nodes", "Draft nodes verified.", registry=r)
        self._accepted = Counter(p + "accepted_tokens", "Accepted draft tokens by source.", ["source"], registry=r)
        self._prompt = Counter(p + "prompt_tokens", "Prompt tokens by how they were read.", ["read"], registry=r)
        waiting = Gauge(p + "queue_length", "Requests waiting.", registry=r)
        waiting.set_function(lambda: sum(queue.queue_length for queue in self.queues))
        running = Gauge(p + "running", "Requests under way.", registry=r)
        running.set_function(lambda: sum(queue.begun for queue in self.queues))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(seconds)

    def completion(self, task: Task, done: Completion) -> None:
        """Count a finished task."""
        self._outcomes.labels(done.outcome).inc()
        self._prompt.labels("cache").inc(done.cached_tokens)
        if done.outcome == "done":
            self._prompt.labels("model").inc(max(0, done.prompt_tokens - done.cached_tokens))
        if done.token_ids:
            self._first.labels("typing" if task.typing else "other").observe(done.first_s)
        self._emitted.inc(len(done.token_ids))
        self._passes.inc(done.report.passes)
        self._drafted.inc(done.report.nodes)
        for source, count in done.report.accepted_by_source.items():
            self._accepted.labels(source).inc(count)

    def figures(self) -> dict[str, float]:
        """What a page shows: tokens per pass, accepted draft tokens by source, requests that wait and are under way."""
        values = {
            (sample.name.removeprefix("retrieve_spec_"), sample.labels.get("source", "")): sample.value
            for family in self.registry.collect()
            for sample in family.samples
        }
        figures = {"Tokens per pass": values["tokens_emitted_total", ""] / max(values["passes_total", ""], 1.0)}
        figures |= {f"Accepted from {of}": n for (name, of), n in values.items() if name == "accepted_tokens_total"}
        return figures | {"Requests waiting": values["queue_length", ""], "Under way": values["running", ""]}

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class Counted:
    """ASGI middleware that counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; its time is over with the last byte of its answer."""
        begun, status = perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if (route := scope.get("route")) is not None:
                self._metrics.request(route.path, status, perf_counter() - begun)
