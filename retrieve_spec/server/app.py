"""The HTTP application: its routes, and the handlers about the server itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from retrieve_spec._version import __version__
from retrieve_spec.server import completions, ollama, schemas, translations
from retrieve_spec.server.completions import scope_of
from retrieve_spec.server.guard import BoundedRoute, Counted, Guard, Refusal, errors, refused
from retrieve_spec.server.models import DEFAULT, Known, Meant, Models

_HEADERS = ("authorization", "content-type", "x-api-key", "x-client-id")
"""Headers that pages of allowed origins may send."""
_MOST_CHARS = 2 << 20
"""The longest text to encode, in characters (some seconds of one core)."""

router = APIRouter(route_class=BoundedRoute)


def create_app(models: Models, *, keys: Sequence[bytes] = ()) -> FastAPI:
    """Return the ASGI application for a server's models; its start loads the first of them."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(models.start())
        yield
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        models.close()

    app = FastAPI(
        title="retrieve-spec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=_middleware(models, keys),
        exception_handlers={HTTPException: refused, 500: refused},
        responses=errors(401, 403),
    )
    app.state.models, app.state.room = models, models.config.bodies_bytes
    for routes in (completions.router, translations.router, ollama.router, router):
        app.include_router(routes)
    return app


def _middleware(models: Models, keys: Sequence[bytes]) -> list[Middleware]:
    config = models.config
    middleware = [
        Middleware(Guard, keys=keys, config=config, unready=models.unready),
        Middleware(Counted, metrics=models.metrics),
    ]
    if config.origins:
        pages = Middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=_HEADERS,
            allow_private_network=True,  # required by Chrome for other sites' pages that call this machine
        )
        middleware.insert(0, pages)  # first, so that a page can read why it is refused
    return middleware


_PAGE = Path(__file__).with_name("page.html")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


@router.get("/", response_class=HTMLResponse)
async def page() -> Response:
    """A page for browsers: running models, how to connect a client, live figures."""
    return HTMLResponse(_PAGE.read_text("utf-8"), headers={"Content-Security-Policy": _POLICY})


@router.post("/tokenize", responses=errors(400, 408, 413, 503))
async def tokenize(body: schemas.TokenizeRequest, service: Meant) -> Response:
    """Tokenize a text."""
    codec = service.codec
    if len(body.content) > _MOST_CHARS:
        raise Refusal(400, f"{len(body.content)} characters; at most {_MOST_CHARS} are encoded at once")

    def encode() -> list[int]:
        if body.conversation is not None:
            return service.prompts.chat(body.conversation).token_ids
        if body.parse_special:
            return codec.encode_prompt(body.content, add_special_tokens=body.add_special)
        return codec.encode(body.content)

    def answer() -> JSONResponse:
        ids = encode()
        told: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.backend.n_ctx}
        if body.with_pieces:
            told["tokens"] = [{"id": i, "piece": piece} for i, piece in zip(ids, codec.pieces(ids), strict=True)]
        if body.return_token_strs:
            told["token_strs"] = codec.pieces(ids)
        return JSONResponse(told)

    return await asyncio.to_thread(answer)


@router.post("/detokenize", responses=errors(400, 408, 413, 503))
async def detokenize(body: schemas.DetokenizeRequest, service: Meant) -> Response:
    """Convert token ids to text: llama.cpp's `content` and vLLM's `prompt`."""
    ids = service.known(body.tokens)

    def answer() -> JSONResponse:
        text = service.codec.decode(ids)
        return JSONResponse({"content": text, "prompt": text})

    return await asyncio.to_thread(answer)


@router.post("/apply-template", responses=errors(400, 408, 413, 503))
async def template(body: schemas.TemplateRequest, request: Request, service: Meant) -> Response:
    """Render a conversation as a prompt."""
    prompt = await asyncio.to_thread(service.prompts.chat, body)
    told = completions.left_out_header(request, body.left_out)
    return JSONResponse({"prompt": service.codec.decode(prompt.token_ids)}, headers=told)


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def listed(models: Known) -> Response:
    """List all models with their status, and the aliases under which Continue sends predictions."""
    return JSONResponse({"object": "list", "data": list(models.entries().values())})


@router.get("/v1/models/{name:path}", responses=errors(404))
async def model(name: str, models: Known) -> Response:
    """Describe one model; its name may contain slashes."""
    entries = models.entries()
    found = entries.get(models.first if name == DEFAULT else name)
    if found is None:
        raise Refusal(404, f"no model {name!r} is served here; there are {', '.join(entries)}")
    return JSONResponse(found)


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(models: Known) -> Response:
    """Report that the server runs, what the first model drafts from, and the status of each model."""
    states = {name: model.state for name, model in models.models.items()}
    service = models.models[models.first].service
    said = {"status": "ok", "model": models.first} if service is None else service.state()
    return JSONResponse({**said, **({"models": states} if models.several else {})})


@router.get("/props")
async def props(service: Meant) -> Response:
    """Return the context length and default settings."""
    settings = {"n_ctx": service.backend.n_ctx, "params": {"n_predict": -1, "temperature": 0.0}}
    body = {
        "default_generation_settings": settings,
        "total_slots": service.config.slots,
        "model_path": service.name,
        "model_alias": service.name,
        "chat_template": getattr(service.tokenizer, "chat_template", None) or "",
        "build_info": f"retrieve-spec {__version__}",
        "fim": service.family,
    }
    return JSONResponse(body)


@router.get("/v1/workspace")
async def kept(request: Request, models: Known) -> Response:
    """List what is kept for the key of this request."""
    return JSONResponse(await asyncio.to_thread(models.of_all, lambda service: service.kept(scope_of(request))))


@router.delete("/v1/workspace", responses=errors(500))
async def forget(request: Request, models: Known) -> Response:
    """Delete everything that is kept for the key of this request, and the workspace if no keys share it."""
    gone = await asyncio.to_thread(models.of_all, lambda service: service.forget(scope_of(request)))
    return JSONResponse({"forgotten": True, "kept": gone})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(models: Known) -> Response:
    """Export metrics for Prometheus."""
    return models.metrics.exposed()
