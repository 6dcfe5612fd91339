"""The HTTP surface: routes of the dialects that editors and OpenAI clients speak, all answered by one queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from html import escape
from time import monotonic
from typing import Any, Literal

import pydantic_core
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from retrieve_spec._version import __version__
from retrieve_spec.config import EDITORS, ServeConfig
from retrieve_spec.server import schemas
from retrieve_spec.server.completions import CompletionHandlers, scope_of
from retrieve_spec.server.embeddings import EmbeddingHandlers
from retrieve_spec.server.guard import Counted, Guard, Metrics, Refusal
from retrieve_spec.server.messages import MessageHandlers
from retrieve_spec.server.responses import ResponseHandlers
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


class MessagesProblem(BaseModel):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """The body of every error of Anthropic's dialect."""

    type: Literal["error"]
    error: MessagesProblem


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
_ANSWER: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}


def _errors(*codes: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, Any]:
    return {code: {"model": body, "description": _ERRORS[code]} for code in codes}


def create_app(service: Service, *, keys: Sequence[bytes] = ()) -> FastAPI:
    """The ASGI application of a service."""
    handlers = CompletionHandlers(service), InformationHandlers(service), EmbeddingHandlers(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.queue.start()
        if service.workspace is not None:
            service.workspace.start()
        yield
        if service.workspace is not None:
            service.workspace.close()
        service.close()
        for each in handlers:
            del each.service  # FastAPI remembers the methods of routes for as long as the process lives

    app = guarded_app(service.config, service.metrics, keys, lifespan)
    app.router.route_class = BoundedRoute
    app.state.reader = BodyReader(service.config)
    _add_completions(app, handlers[0])
    _add_information(app, handlers[1])
    app.post("/v1/embeddings", responses=_errors(400, 408, 413, 503))(handlers[2].embeddings)
    return app


def guarded_app(
    config: ServeConfig,
    metrics: Metrics,
    keys: Sequence[bytes],
    lifespan: Any,
    openapi_url: str | None = "/openapi.json",
) -> FastAPI:
    """An application without routes, whose requests are guarded and counted, and whose errors are those of a server."""
    return FastAPI(
        title="retrieve-spec",
        version=__version__,
        openapi_url=openapi_url,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=_middleware(config, metrics, keys),
        exception_handlers={HTTPException: _refused, 500: _refused},
        responses=_errors(401, 403),
    )


def _add_completions(app: FastAPI, h: CompletionHandlers) -> None:
    def post(handler: Callable[..., Any], *paths: str, body: type[BaseModel] = ErrorBody) -> None:
        """Answer at these paths, the first of which is the one that is described."""
        responses = _ANSWER | _errors(400, 401, 403, 408, 413, 499, 500, 501, 503, body=body)
        for path in paths:
            app.post(path, responses=responses, include_in_schema=path == paths[0])(handler)

    post(h.infill, "/infill")
    post(h.completion, "/completion", "/completions")
    post(h.completions, "/v1/completions")
    post(h.fim, "/v1/fim/completions")
    post(h.chat, "/v1/chat/completions", "/chat/completions")
    post(h.edits, "/v1/edits", "/v1/edit")
    post(MessageHandlers(h).messages, "/v1/messages", body=MessagesErrorBody)
    post(MessageHandlers(h).count, "/v1/messages/count_tokens", body=MessagesErrorBody)
    post(ResponseHandlers(h).responses, "/v1/responses")


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
        app.head(path, include_in_schema=False)(h.models)
    app.get("/v1/models/{name:path}", responses=_errors(404))(h.model)
    app.head("/v1/models/{name:path}", include_in_schema=False)(h.model)
    for path in ("/health", "/v1/health"):
        app.get(path, include_in_schema=path == "/health")(h.health)
    app.get("/props")(h.props)
    app.get("/", response_class=HTMLResponse)(h.page)
    app.get("/metrics", response_class=PlainTextResponse)(h.expose)
    app.get("/v1/workspace")(h.kept)
    app.delete("/v1/workspace", responses=_errors(500))(h.forget)


def _middleware(config: ServeConfig, metrics: Metrics, keys: Sequence[bytes]) -> list[Middleware]:
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


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        return error.response(request.url.path)
    known = error if isinstance(error, HTTPException) else HTTPException(500, "internal error")
    refusal = Refusal(known.status_code, f"{request.method} {request.url.path}: {known.detail}")
    refusal.headers = known.headers or refusal.headers
    return refusal.response(request.url.path)


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>retrieve-spec</title>
<style>body{{font:16px sans-serif;margin:2em}}th,td{{text-align:left;padding-right:2em}}</style>
<h1>retrieve-spec</h1>
<table><tr><th>Model<th>State<th>Fill-in-the-middle<th>Context{models}</table>
<h2>So far</h2><table>{figures}</table>
<h2>Connect an editor</h2><pre>{connect}</pre>
<p>OpenAI clients: the base URL is this address with <code>/v1</code>. What is taken:
<a href="/openapi.json">openapi.json</a>.</html>
"""


def page(request: Request, models: Iterable[dict[str, Any]], figures: Mapping[str, float]) -> HTMLResponse:
    """What runs here, how to connect an editor, and figures so far, for a browser; of models their `model_entries`."""
    url = str(request.base_url).rstrip("/")
    rows = []
    for model in models:
        meta = model.get("meta", {})
        cells = (model["id"], model["status"]["value"], meta.get("fim") or "–", meta.get("n_ctx", "–"))
        rows.append("<tr>" + "".join(f"<td>{escape(str(cell))}" for cell in cells))
    table = "".join(f"<tr><th>{escape(name)}<td>{value:.4g}" for name, value in figures.items())
    connect = "\n".join(f"retrieve-spec editor {name} --url {escape(url)}" for name in EDITORS)
    return HTMLResponse(_PAGE.format(models="".join(rows), figures=table, connect=connect))


def model_entries(name: str, service: Service | None, state: str = "loaded") -> dict[str, dict[str, Any]]:
    """What is said of a model, by its name and the alias under which Continue sends predictions."""
    said: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "retrieve-spec", "status": {"value": state}}
    if service is not None:
        said["meta"] = {
            "n_ctx": service.backend.n_ctx,
            "n_vocab": service.backend_vocabulary,
            "fim": service.fim.fmt.family if service.fim else None,
        }
    return {known: {"id": known, **said} for known in (name, f"{name}-Fast-Apply")}


_MOST_CHARS = 2 << 20
"""Characters of a text to encode, a few seconds of a core."""


def exposed(metrics: Metrics) -> Response:
    """Metrics as Prometheus reads them."""
    return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


class InformationHandlers:
    """Handlers about one server."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def tokenize(self, body: schemas.TokenizeRequest) -> Response:
        """Text as token ids."""
        codec = self.service.codec
        if len(body.content) > _MOST_CHARS:
            raise Refusal(400, f"{len(body.content)} characters; at most {_MOST_CHARS} are encoded at once")

        def encode() -> list[Any]:
            if body.parse_special:
                ids = codec.encode_prompt(body.content, add_special_tokens=body.add_special)
            else:
                ids = codec.encode(body.content)
            if not body.with_pieces:
                return ids
            return [{"id": i, "piece": piece} for i, piece in zip(ids, codec.pieces(ids), strict=True)]

        return await asyncio.to_thread(lambda: JSONResponse({"tokens": encode()}))

    async def detokenize(self, body: schemas.DetokenizeRequest) -> Response:
        """Token ids as text."""
        if any(i >= self.service.backend_vocabulary for i in body.tokens):
            raise Refusal(400, f"token ids must be below {self.service.backend_vocabulary}")
        return await asyncio.to_thread(lambda: JSONResponse({"content": self.service.codec.decode(body.tokens)}))

    async def template(self, body: schemas.TemplateRequest) -> Response:
        """The prompt of a conversation."""
        ids = await asyncio.to_thread(self.service.prompts.chat, body.messages, **body.rendering())
        return JSONResponse({"prompt": self.service.codec.decode(ids)})

    async def models(self) -> Response:
        """The model, and the alias under which Continue sends predictions."""
        entries = model_entries(self.service.name, self.service)
        return JSONResponse({"object": "list", "data": list(entries.values())})

    async def model(self, name: str) -> Response:
        """One of these, by its name, which may have slashes."""
        models = model_entries(self.service.name, self.service)
        if name not in models:
            raise Refusal(404, f"no model {name!r} is served here; there are {', '.join(models)}")
        return JSONResponse(models[name])

    async def health(self) -> Response:
        """What is served, and what it drafts from."""
        return JSONResponse(self.state())

    def state(self) -> dict[str, Any]:
        """What `health` answers with."""
        service, workspace = self.service, self.service.workspace
        body: dict[str, Any] = {
            "status": "ok",
            "model": service.name,
            "fim": self._family(),
            "n_ctx": service.backend.n_ctx,
            "queue": service.queue.queue_length,
        }
        if service.fim is None:
            body["fim_missing"] = service.no_fim()
        if workspace is not None:
            body["workspace"] = {
                "indexed": workspace.indexed.is_set() and not (workspace.forgotten or workspace.trouble),
                "files": len(workspace.texts),
                **({} if workspace.indexed.is_set() else {"read": workspace.read[0], "of": workspace.read[1]}),
                "left_out": dict(workspace.left_out),
                **({"forgotten": True} if workspace.forgotten else {}),
            }
            if workspace.trouble:  # nobody needs a key to ask, and what failed may name files
                kind = workspace.trouble.partition(":")[0]
                body["workspace"]["trouble"] = f"{kind}: it is not followed for now; the server's log says more"
        return body

    async def props(self) -> Response:
        """Context length and defaults."""
        service = self.service
        settings = {"n_ctx": service.backend.n_ctx, "params": {"n_predict": -1, "temperature": 0.0}}
        body = {
            "default_generation_settings": settings,
            "total_slots": service.config.slots,
            "model_path": service.name,
            "model_alias": service.name,
            "chat_template": getattr(service.tokenizer, "chat_template", None) or "",
            "build_info": f"retrieve-spec {__version__}",
            "fim": self._family(),
        }
        return JSONResponse(body)

    async def kept(self, request: Request) -> Response:
        """What there is to forget of this user."""
        return JSONResponse(await asyncio.to_thread(self.service.kept, scope_of(request)))

    async def forget(self, request: Request) -> Response:
        """Drop everything that is kept of this user, and of the workspace if it is theirs."""
        kept = await asyncio.to_thread(self.service.forget, scope_of(request))
        return JSONResponse({"forgotten": True, "kept": kept})

    async def expose(self) -> Response:
        """Prometheus metrics."""
        return exposed(self.service.metrics)

    async def page(self, request: Request) -> Response:
        """What runs here, how to connect an editor, and figures so far, for a browser."""
        service, figures = self.service, {}
        if service.workspace is not None:
            figures["Files of the workspace"] = float(len(service.workspace.texts))
        entries = model_entries(service.name, service)
        return page(request, [entries[service.name]], figures | service.metrics.figures())

    def _family(self) -> str | None:
        return self.service.fim.fmt.family if self.service.fim else None


_DRAINED = 16 << 20
_SMALL = 64 << 10
SMALL_BODY = 64 << 10
"""Bytes of a body that is parsed where other requests wait; larger ones are parsed in a thread."""


class BodyReader:
    """Reads the bodies of one server's requests, each and all together within its bounds.

    The first `_SMALL` bytes of every body are not counted among all, so that ordinary requests always come through.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._left = config.bodies_bytes

    async def read(self, request: Request) -> bytes:
        """A body in bounds of bytes and time.

        Of one that is too large a little more is read and dropped, since a client that is still sending when the
        connection closes never sees the answer.

        Raises
        ------
        Refusal
            413: too large; 408: too slow; 503: too much is being read; 499: the client has gone.
        """
        limit, seconds = self._config.max_body_bytes, self._config.body_s
        parts: list[bytes] = []
        size = held = 0
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        parts.clear()
                        if size > limit + _DRAINED:
                            break
                        continue
                    if size > _SMALL:
                        if len(part) > self._left:
                            raise Refusal(503, "too many large requests are being read", "overloaded")
                        self._left -= len(part)
                        held += len(part)
                    parts.append(part)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {seconds:g} seconds", "timeout") from None
        except ClientDisconnect:
            raise Refusal(499, "the client closed the connection", "cancelled") from None
        finally:
            self._left += held
        if size > limit:
            raise Refusal(413, f"the body has more than {limit} bytes")
        return b"".join(parts)


class _BoundedRequest(Request):
    """A request whose body is read by a `BodyReader`, and is JSON whatever its client called it."""

    def __init__(self, request: Request, reader: BodyReader, schema: type[BaseModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._reader, self._schema, self._read = reader, schema, b""

    @property
    def headers(self) -> Headers:
        """The headers, with the type that FastAPI reads."""
        return Headers(raw=[*super().headers.raw, (b"content-type", b"application/json")])

    async def body(self) -> bytes:
        """The bytes of the body; without any it is a blank, which is no JSON."""
        self._read = await self._reader.read(self) or b" "
        return self._read

    async def json(self) -> BaseModel:
        """The body as its schema; a large one is read in a thread."""
        return self._checked() if len(self._read) < SMALL_BODY else await asyncio.to_thread(self._checked)

    def _checked(self) -> BaseModel:
        try:
            fields = pydantic_core.from_json(self._read, allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(400, f"the body is not JSON: {error}") from error
        return schemas.checked(self._schema, fields)


class BoundedRoute(APIRoute):
    """A route whose body is read by the `BodyReader` at `app.state.reader`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        answer, field = super().get_route_handler(), self.body_field
        if field is None:
            return answer
        schema: Any = field.field_info.annotation

        async def read_and_answer(request: Request) -> Response:
            request.state.arrived = monotonic()
            try:
                return await answer(_BoundedRequest(request, request.app.state.reader, schema))
            except asyncio.CancelledError:  # only an ending server cancels a request that is not done in time
                return Refusal(503, "the server is stopping", "overloaded").response(request.url.path)

        return read_and_answer
