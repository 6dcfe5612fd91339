"""The HTTP surface: routes of the dialects that editors and OpenAI clients speak, all answered by one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from time import perf_counter

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from retrieve_spec.server.completions import CompletionHandlers
from retrieve_spec.server.events import EventStream
from retrieve_spec.server.guard import Guard, Refusal
from retrieve_spec.server.information import InformationHandlers
from retrieve_spec.server.metrics import Metrics
from retrieve_spec.server.provenance import Provenance
from retrieve_spec.server.reading import Reader
from retrieve_spec.server.service import Service

_HEADERS = ("authorization", "content-type", "x-api-key", "x-client-id")
"""What a page of an allowed origin may send."""


def create_app(
    service: Service,
    metrics: Metrics,
    *,
    keys: Sequence[bytes] = (),
    provenance: Provenance | None = None,
) -> Starlette:
    """The ASGI application of a service."""
    reader = Reader(service.config)
    h = CompletionHandlers(service, provenance or Provenance(), reader)
    about = InformationHandlers(service, metrics, reader)

    def route(path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
        return Route(path, _counted(handler, path, metrics), methods=list(methods))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        if service.workspace is not None:
            service.workspace.start()
        yield
        if service.workspace is not None:
            service.workspace.close()
        service.close()

    routes = [
        route("/infill", h.infill, "POST"),
        route("/completion", h.completion, "POST"),
        route("/completions", h.completion, "POST"),
        route("/v1/completions", h.completions, "POST"),
        route("/v1/fim/completions", h.fim, "POST"),
        route("/v1/chat/completions", h.chat, "POST"),
        route("/chat/completions", h.chat, "POST"),
        route("/v1/edits", h.edits, "POST"),
        route("/v1/edit", h.edits, "POST"),
        route("/v1/models", about.models, "GET"),
        route("/models", about.models, "GET"),
        route("/health", about.health, "GET"),
        route("/v1/health", about.health, "GET"),
        route("/props", about.props, "GET"),
        route("/tokenize", about.tokenize, "POST"),
        route("/detokenize", about.detokenize, "POST"),
        route("/apply-template", about.apply_template, "POST"),
        route("/v1/workspace", about.kept, "GET"),
        route("/v1/workspace", about.forget, "DELETE"),
        route("/metrics", about.expose, "GET"),
        route("/openapi.json", about.openapi, "GET"),
    ]
    config = service.config
    middleware = [Middleware(Guard, keys=keys, origins=config.origins, host=config.host)]
    if config.origins:
        middleware.insert(  # in front, so that the page can read why it is refused
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=config.origins,
                allow_methods=("GET", "HEAD", "POST", "DELETE"),
                allow_headers=_HEADERS,
                allow_private_network=True,  # Chrome asks for pages from elsewhere that call this machine
            ),
        )

    async def plain(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else "internal error"
        headers = getattr(error, "headers", None) or {}
        answer = Refusal(status, f"{request.method} {request.url.path}: {detail}").response()
        answer.headers.update(headers)
        return answer

    return Starlette(
        routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers={HTTPException: plain, 500: plain}
    )


async def _timed(events: AsyncGenerator[bytes, None], counted: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream; the request is counted when the last one is gone, or the client."""
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                yield event
    finally:
        counted()


def _counted(
    handler: Callable[[Request], Awaitable[Response]], path: str, metrics: Metrics
) -> Callable[[Request], Awaitable[Response]]:
    async def counted(request: Request) -> Response:
        begun = perf_counter()
        try:
            response = await handler(request)
        except Refusal as refusal:
            response = refusal.response()
        except asyncio.CancelledError:  # only an ending server cancels a request that is not done in time
            response = Refusal(503, "the server is stopping", "overloaded").response()
        if isinstance(response, EventStream):  # its time is over with its last byte
            status = response.status_code
            response.events = _timed(response.events, lambda: metrics.request(path, status, perf_counter() - begun))
            return response
        total = perf_counter() - begun
        metrics.request(path, response.status_code, total)
        model_s = getattr(request.state, "model_s", None)
        if model_s is not None:
            overhead = max(0.0, total - model_s)
            metrics.overhead(path, overhead)
            response.headers["Server-Timing"] = f"overhead;dur={1000 * overhead:.2f}, model;dur={1000 * model_s:.2f}"
        return response

    return counted
