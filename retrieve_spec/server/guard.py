"""Checks of every request: keys and origins before any handler runs, limits of bodies, schemas, counters.

Bodies are limited and validated; an error names the wrong field.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakSet

import pydantic_core
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieve_spec.errors import ServeError

if TYPE_CHECKING:
    from retrieve_spec.config import ServeConfig
    from retrieve_spec.server.jobs import Completion, Task
    from retrieve_spec.server.queueing import RequestQueue

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
"""Anthropic's names for kinds of errors."""
UNSUPPORTED = "unsupported_field"
Schema = TypeVar("Schema", bound=BaseModel)
PAGE = "/"
OPEN_PATHS = frozenset({PAGE, "/health", "/v1/health"})
"""Paths that need no key; the page asks for one."""


class Refusal(HTTPException):
    """An error answer, with its kind in OpenAI's terms."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        headers = {"Retry-After": "1"} if status == 503 else {}
        if status in (408, 413, 499):  # the rest of the body is not read
            headers["Connection"] = "close"
        super().__init__(status, message, headers)
        self.kind = kind

    def response(self, path: str = "") -> JSONResponse:
        """Return the answer in the dialect of a path."""
        return JSONResponse(self._body(path), self.status_code, self.headers)

    def _body(self, path: str) -> dict[str, Any]:
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC.get(self.status_code, "api_error" if self.status_code >= 500 else "invalid_request_error")
            return {"type": "error", "error": {"type": kind, "message": self.detail}}
        if path.startswith("/api/"):
            return {"error": self.detail}
        return {"error": {"code": self.status_code, "message": self.detail, "type": self.kind}}


class TooLong(Refusal):
    """A prompt that does not fit, reported in the words that make a dialect's clients shorten it."""

    code = "context_length_exceeded"

    def __init__(self, tokens: int, n_ctx: int) -> None:
        super().__init__(400, f"prompt is too long: {tokens} tokens > {n_ctx - 1} maximum")
        self._tokens, self._n_ctx = tokens, n_ctx
        self.told = (
            f"This model's maximum context length is {n_ctx} tokens. However, your prompt has {tokens} tokens."
            " Please reduce its length."
        )
        """OpenAI's message."""

    def _body(self, path: str) -> dict[str, Any]:
        body, tokens, n_ctx = super()._body(path), self._tokens, self._n_ctx
        if not path.startswith(("/v1/messages", "/api/")):
            openai = path.startswith(("/v1/", "/chat/"))
            body["error"] |= {
                "code": self.code if openai else 400,
                "type": "invalid_request_error" if openai else "exceed_context_size_error",
                "message": self.told,
                "n_prompt_tokens": tokens,
                "n_ctx": n_ctx,
            }
        return body


class ThreadNotFound(Refusal):
    """The answer to a request that continues an earlier one by its id: Anthropic's clients then send all messages."""

    def __init__(self) -> None:
        super().__init__(404, "earlier messages are not kept here: send all of them, without previous_message_id")

    def _body(self, path: str) -> dict[str, Any]:
        body = super()._body(path)
        body["error"]["details"] = {"error_code": "thread_not_found"}
        return body


class ResponseNotFound(Refusal):
    """The answer to a request that continues an earlier response: OpenAI's, after which clients send all items."""

    def __init__(self, response_id: str) -> None:
        message = f"Previous response with id '{response_id}' not found: none is kept here. Send all items."
        super().__init__(400, message)

    def _body(self, path: str) -> dict[str, Any]:
        body = super()._body(path)
        body["error"]["code"] = "previous_response_not_found"
        return body


async def refused(request: Request, error: Exception) -> Response:
    """Return the answer to a request that raised an error."""
    if isinstance(error, Refusal):
        return error.response(request.url.path)
    known = error if isinstance(error, HTTPException) else HTTPException(500, "internal error")
    message = f"{request.method} {request.url.path}: {known.detail}"
    if known.status_code == 404 and request.url.path.startswith("/api/"):
        message += " (of Ollama's API, tags, show, chat and generate are served; OpenAI's lies under /v1)"
    refusal = Refusal(known.status_code, message)
    refusal.headers = known.headers or refusal.headers
    return refusal.response(request.url.path)


class Problem(BaseModel):
    """An error; Anthropic's dialect has no code, but details of some."""

    code: int | str | None = None
    message: str
    type: str
    details: dict[str, str] | None = None


class ErrorBody(BaseModel):
    """The body of every error; Anthropic's dialect has a type, Ollama's only the message."""

    error: Problem | str
    type: Literal["error"] | None = None


_ERRORS = {
    401: "A key is required.",
    403: "Browser pages of other origins are refused.",
    404: "No model of that name is served.",
    400: "The request is not right, or asks for what is not served; the message says why.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    499: "A newer request of the client superseded this one.",
    500: "The model failed.",
    501: "The model has no fill-in-the-middle tokens.",
    503: "Too many requests wait, or the model is being loaded.",
}


def errors(*codes: int) -> dict[int | str, Any]:
    """Describe the errors of a route for the OpenAPI schema."""
    return {code: {"model": ErrorBody, "description": _ERRORS[code]} for code in codes}


def checked(schema: type[Schema], fields: Any) -> Schema:
    """Validate a body.

    Raises
    ------
    Refusal
        400: it is invalid; the message says what is wrong.
    """
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        kind = UNSUPPORTED if error.errors()[0]["type"] == UNSUPPORTED else "invalid_request_error"
        raise Refusal(400, reason(error), kind) from error


def reason(error: ValidationError) -> str:
    """Return one sentence that names the wrong field and what it should be.

    For a field with several types, the location is the deepest that any type reached.
    """
    errors = error.errors(include_url=False, include_input=False)
    said = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    path = ".".join(str(part) for part in said["loc"] if isinstance(part, int) or _is_field(part))
    message = said["msg"].removeprefix("Value error, ")
    return f'"{path}": {message}' if path else message


def _is_field(part: str) -> bool:
    """Whether a part of an error's location is a field's name, not the name of a type that was tried."""
    return part.islower() and part != "str" and "[" not in part


_DRAINED = 16 << 20
_SMALL = 64 << 10
"""Bytes of a small body: parsed on the event loop, and not counted in the limit of all bodies."""


async def _read(request: Request, schema: type[BaseModel]) -> BaseModel:
    """Read and validate a body, which is JSON whatever its content type; a large one in a thread.

    Raises
    ------
    Refusal
        400: it is invalid; and those of `_bytes`.
    """
    request.state.arrived = monotonic()
    given = await _bytes(request)
    body = _checked(given, schema) if len(given) < _SMALL else await asyncio.to_thread(_checked, given, schema)
    request.state.model = getattr(body, "model", None)
    return body


async def _bytes(request: Request) -> bytes:
    """Read a body within the limits of bytes and time.

    If it is too large, some more of it is read and dropped, because a client that is still sending when the connection
    closes does not see the answer.

    Raises
    ------
    Refusal
        413: too large; 408: too slow; 503: too many large bodies at once; 499: the client disconnected.
    """
    state, parts = request.app.state, list[bytes]()
    limit, seconds = state.models.config.max_body_bytes, state.models.config.body_s
    size = held = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit + _DRAINED:
                    break
                if size > limit:
                    parts.clear()
                    continue
                if size > _SMALL:
                    if len(part) > state.room:
                        raise Refusal(503, "too many large requests are being read", "overloaded")
                    state.room -= len(part)
                    held += len(part)
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {seconds:g} seconds", "timeout") from None
    except ClientDisconnect:
        raise Refusal(499, "the client closed the connection", "cancelled") from None
    finally:
        state.room += held
    if size > limit:
        raise Refusal(413, f"the body has more than {limit} bytes")
    return b"".join(parts)


def _checked(given: bytes, schema: type[BaseModel]) -> BaseModel:
    try:
        fields = pydantic_core.from_json(given, allow_inf_nan=False)
    except ValueError:
        fields = _repaired(given)
    return checked(schema, fields)


_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_TEXT_OR_LONG_NUMBER = re.compile(
    r'("(?:[^"\\]++|\\.)*+(?:"|\\?\Z))|(?<![0-9.eE+-])-?[0-9]{4301,}+(?![.eE])', re.DOTALL
)  # looked for at the beginning of a number alone: at each of its digits the time would be quadratic


def _repaired(body: bytes) -> Any:
    """Return JSON of which parts have no value here.

    Lone surrogates, left by clients that cut a text, become U+FFFD, and whole numbers too long for Python texts.

    Raises
    ------
    Refusal
        400: it is no JSON.
    """

    def repair(part: re.Match[str]) -> str:
        if part[1] is None:
            return f'"{part[0]}"'
        return _ESCAPE.sub(lambda found: "\\ufffd" if found[1] else found[0], part[1])

    text = _TEXT_OR_LONG_NUMBER.sub(repair, body.decode("utf-8-sig", "replace"))
    try:
        return pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error


class BoundedRoute(APIRoute):
    """A route with the body limits of the server's configuration.

    FastAPI describes it, but does not call its endpoint, which saves a third of the time of handling a small request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        endpoint, wanted, field = self.endpoint, self.dependant, self.body_field
        dependencies: list[tuple[Any, Any]] = [(each.name, each.call) for each in wanted.dependencies]

        async def read_and_answer(request: Request) -> Response:
            given = dict(request.path_params)
            if wanted.request_param_name is not None:
                given[wanted.request_param_name] = request
            try:
                if field is not None:
                    given[field.name] = await _read(request, field.field_info.annotation)  # type: ignore[arg-type]
                for name, find in dependencies:
                    given[name] = await find(request)
                answer: Response = await endpoint(**given)
            except asyncio.CancelledError:  # a stopping server cancels late requests
                return Refusal(503, "the server is stopping", "overloaded").response(request.url.path)
            return answer

        return read_and_answer


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Read API keys from a file, one per line; blank lines and lines that start with # are skipped.

    Raises
    ------
    ServeError
        The file cannot be read or has no key.
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
    """Return the key that a client sends: the first in a file, "" without one."""
    return read_keys(path)[0].decode() if path is not None else ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address belongs to this machine."""
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: Sequence[bytes]) -> None:
    """Require a key if the host can be reached from other machines.

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
        The application behind it.
    keys
        Accepted API keys. Without any, requests need no key, and the Host header must name this machine or an allowed
        host, so that a page cannot reach the server by DNS rebinding.
    config
        Allowed browser origins (as browsers write them), allowed hosts, and the path prefix of a proxy.
    unready
        Returns the answer to all requests except the page until the server is ready, then None.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[bytes], config: ServeConfig, unready: Callable[[], Response | None]
    ) -> None:
        self._app, self._keys, self._unready = app, tuple(keys), unready
        self._origins, self._hosts = frozenset(config.origins), frozenset(map(str.lower, config.allowed_hosts))
        self._prefix = "/" + config.path_prefix.strip("/") if config.path_prefix.strip("/") else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refused request; pass all others on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the connection omits the body
            scope = {**scope, "method": "GET"}
        path = "/" + "/".join(filter(None, scope["path"].split("/")))  # addresses that end with a slash give two
        if self._prefix and f"{path}/".startswith(f"{self._prefix}/"):
            path = path.removeprefix(self._prefix) or "/"
        scope = {**scope, "path": path}
        answer: ASGIApp | None = None if scope["path"] == PAGE else self._unready()
        if answer is None and (refusal := self._refuse(scope["path"], Headers(scope=scope))) is not None:
            answer = refusal.response(scope["path"])
        await (answer or self._app)(scope, receive, send)

    def _refuse(self, path: str, headers: Headers) -> Refusal | None:
        origin, host = headers.get("origin"), headers.get("host", "localhost")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            return Refusal(403, f"browser pages of {origin} may not call this server (--origin allows one)", "origin")
        if origin is None and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return Refusal(403, "browser pages of other sites may not call this server", "origin")
        if not self._keys and not self._is_ours(_host_name(host)):
            return Refusal(403, "the Host header does not name this machine (--allow-host allows another name)", "host")
        if self._keys and path not in OPEN_PATHS and not self._known(headers):
            return Refusal(401, "a valid API key is required (Authorization: Bearer …)", "authentication_error")
        return None

    def _is_ours(self, host: str) -> bool:
        return is_loopback(host) or host.lower() in self._hosts or host in ("0.0.0.0", "::")

    def _known(self, headers: Headers) -> bool:
        given = given_key(headers)
        found = False
        for key in self._keys:  # every key is compared, in constant time each
            found |= hmac.compare_digest(given, key)
        return found


def given_key(headers: Headers) -> bytes:
    """Return the key of a request, empty without one."""
    value = headers.get("authorization", "")
    scheme, _, key = value.partition(" ")
    # headers are bytes that Starlette reads as Latin-1; clients send keys of other characters as UTF-8
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip().encode("latin-1", "replace")


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1 : host.find("]")]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.375, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters of one server, in a registry of their own; ``queues`` add the numbers of their requests."""

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

    def exposed(self) -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class Counted:
    """ASGI middleware that counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and measure it until the last byte of its answer."""
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
