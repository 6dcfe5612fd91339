"""The HTTP surface: routes of the dialects that editors and OpenAI clients speak, all answered by one queue."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from time import perf_counter
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieve_spec._version import __version__
from retrieve_spec.server.completions import CompletionHandlers
from retrieve_spec.server.guard import Guard, Refusal
from retrieve_spec.server.information import InformationHandlers
from retrieve_spec.server.metrics import Metrics
from retrieve_spec.server.provenance import Provenance
from retrieve_spec.server.reading import BodyReader, ReadingRoute
from retrieve_spec.server.service import Service

_HEADERS = ("authorization", "content-type", "x-api-key", "x-client-id")
"""What a page of an allowed origin may send."""


class Problem(BaseModel):
    """What went wrong."""

    code: int
    message: str
    type: str


class ErrorBody(BaseModel):
    """The body of every error."""

    error: Problem


_ERRORS = {
    401: "A key is required.",
    403: "Browser pages of other origins are refused.",
    400: "The request is not right, or asks for what is not served; the message says why.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    499: "A newer request of the client superseded this one.",
    500: "The model failed.",
    501: "The model has no fill-in-the-middle tokens.",
    503: "Too many requests wait, or the model is being loaded.",
}
_ANSWER: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}


def _errors(*codes: int) -> dict[int | str, Any]:
    return {code: {"model": ErrorBody, "description": _ERRORS[code]} for code in codes}


def create_app(
    service: Service, metrics: Metrics, *, keys: Sequence[bytes] = (), provenance: Provenance | None = None
) -> FastAPI:
    """The ASGI application of a service."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.queue.start()
        if service.workspace is not None:
            service.workspace.start()
        yield
        if service.workspace is not None:
            service.workspace.close()
        service.close()

    app = FastAPI(
        title="retrieve-spec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=_middleware(service, metrics, keys),
        exception_handlers={Refusal: _refused, HTTPException: _plain, 500: _plain},
        responses=_errors(401, 403),
    )
    app.router.route_class = ReadingRoute
    app.state.reader = BodyReader(service.config)
    _add_completions(app, CompletionHandlers(service, provenance or Provenance()))
    _add_information(app, InformationHandlers(service, metrics))
    return app


def _add_completions(app: FastAPI, h: CompletionHandlers) -> None:
    def post(handler: Callable[..., Any], *paths: str) -> None:
        """Answer at these paths, the first of which is the one that is described."""
        responses = _ANSWER | _errors(400, 408, 413, 499, 500, 501, 503)
        for path in paths:
            app.post(path, responses=responses, include_in_schema=path == paths[0])(handler)

    post(h.infill, "/infill")
    post(h.completion, "/completion", "/completions")
    post(h.completions, "/v1/completions")
    post(h.fim, "/v1/fim/completions")
    post(h.chat, "/v1/chat/completions", "/chat/completions")
    post(h.edits, "/v1/edits", "/v1/edit")


def _add_information(app: FastAPI, h: InformationHandlers) -> None:
    posts: dict[str, Callable[..., Any]] = {
        "/tokenize": h.tokenize,
        "/detokenize": h.detokenize,
        "/apply-template": h.template,
    }
    for path, handler in posts.items():
        app.post(path, responses=_errors(400, 408, 413, 503))(handler)
    for path in ("/v1/models", "/models"):
        app.get(path, include_in_schema=path == "/v1/models")(h.models)
    for path in ("/health", "/v1/health"):
        app.get(path, include_in_schema=path == "/health")(h.health)
    app.get("/props")(h.props)
    app.get("/", response_class=HTMLResponse)(h.page)
    app.get("/metrics", response_class=PlainTextResponse)(h.expose)
    app.get("/v1/workspace")(h.kept)
    app.delete("/v1/workspace", responses=_errors(500))(h.forget)


def _middleware(service: Service, metrics: Metrics, keys: Sequence[bytes]) -> list[Middleware]:
    config = service.config
    middleware = [
        Middleware(Guard, keys=keys, origins=config.origins, host=config.host),
        Middleware(Counted, metrics=metrics),
    ]
    if config.origins:
        pages = Middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=_HEADERS,
            allow_private_network=True,  # Chrome asks for pages from elsewhere that call this machine
        )
        middleware.insert(0, pages)  # in front, so that the page can read why it is refused
    return middleware


async def _refused(request: Request, refusal: Any) -> Response:
    response: Response = refusal.response()
    return response


async def _plain(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    answer = Refusal(status, f"{request.method} {request.url.path}: {detail}").response()
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer


class Counted:
    """ASGI middleware that counts requests by route and status, and says what time was spent outside the model."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; its time is over with the last byte of its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = perf_counter(), 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                model_s = scope.get("state", {}).get("model_s")
                if model_s is not None:
                    overhead = max(0.0, perf_counter() - begun - model_s)
                    self._metrics.overhead(scope["route"].path, overhead)
                    timing = f"overhead;dur={1000 * overhead:.2f}, model;dur={1000 * model_s:.2f}"
                    message["headers"] = [*message["headers"], (b"server-timing", timing.encode())]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if (route := scope.get("route")) is not None:
                self._metrics.request(route.path, status, perf_counter() - begun)
