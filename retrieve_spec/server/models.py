"""Several models behind one address: each is a server's application of its own, loaded when it is first asked for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pydantic_core
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError, in_a_line
from retrieve_spec.model_files import PACKAGED
from retrieve_spec.reference_model import REFERENCE, reference_path
from retrieve_spec.server.app import (
    SMALL_BODY,
    BodyReader,
    InformationHandlers,
    create_app,
    exposed,
    guarded_app,
    model_entries,
    page,
)
from retrieve_spec.server.completions import scope_of
from retrieve_spec.server.editors import display_name
from retrieve_spec.server.guard import Metrics, Refusal
from retrieve_spec.server.service import Service

log = logging.getLogger("retrieve_spec.server")

T = TypeVar("T")
DEFAULT = "default"
"""Another name of the first model."""
_ABOUT_ONE = ("/props", "/openapi.json")
"""What is asked with GET of one model."""
_LOOK_S = 0.05
"""Seconds between two looks whether the requests of a model that is given up are over."""


def begun(work: Callable[[], T]) -> Future[T]:
    """Something that a thread does, for which a program that ends meanwhile does not wait."""
    made: Future[T] = Future()
    made.set_running_or_notify_cancel()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="retrieve-spec-loading", daemon=True).start()
    return made


def named(given: Sequence[str]) -> dict[str, str]:
    """Models by name, from `NAME=PATH`, or a path or hub id that is called as `display_name` has it.

    Raises
    ------
    ServeError
        Two have one name.
    """
    models: dict[str, str] = {}
    for text in given:
        before, equals, path = text.partition("=")
        name, path = (display_name(text), text) if not equals or Path(text).exists() else (before.strip(), path)
        if not (name and path) or name in models:
            raise ServeError(
                "models by names of their own, as NAME=PATH", repr(text), "Name each with --model NAME=PATH."
            )
        models[name] = path
    return models


def bytes_on_disk(model_name: str) -> int:
    """Bytes of a model's weights as files, 0 where they are not on this machine under that name."""
    if model_name in PACKAGED:  # which may still be packed
        return PACKAGED[model_name].unpacked_bytes
    path = reference_path() if model_name == REFERENCE else Path(model_name).expanduser()
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))


class Model:
    """One of several models.

    Parameters
    ----------
    load
        Makes its service; takes as long as it takes.
    size
        Bytes of its weights, as far as is known before it is loaded.
    stays
        Whether it is never given up.

    Attributes
    ----------
    state
        `"unloaded"`, `"loading"`, `"loaded"` or `"failed"`, as llama.cpp's server calls them.
    service, app
        What is loaded, None while nothing is.
    users, used
        Requests under way, and when the last one came.
    """

    def __init__(self, load: Callable[[], Service], size: int = 0, *, stays: bool = False) -> None:
        self.load, self.size, self.stays = load, size, stays
        self.state = "unloaded"
        self.service: Service | None = None
        self.app: FastAPI | None = None
        self.users = self.used = 0
        self._ends = contextlib.AsyncExitStack()

    async def begin(self, service: Service, keys: Sequence[bytes]) -> None:
        """Serve with what was loaded."""
        app = create_app(service, keys=keys)
        await self._ends.enter_async_context(app.router.lifespan_context(app))
        self.service, self.app, self.state, self.size = service, app, "loaded", service.backend.weight_bytes

    async def end(self) -> None:
        """Let go of what was loaded when the requests under way are over; those that come meanwhile load it again."""
        self.service = self.app = None
        self.state = "unloaded"
        while self.users:
            await asyncio.sleep(_LOOK_S)
        await self._ends.aclose()


class Models:
    """The models of a server, by name; for the event loop's thread.

    Parameters
    ----------
    models
        The first is the one that is meant where no other is named.
    most_bytes
        Bytes of weights that may be loaded: the model that was used longest ago is given up for another one. 0 keeps
        all.
    most_waiting
        Requests that may wait for models.
    keys
        API keys of the server.
    """

    def __init__(
        self, models: Mapping[str, Model], *, most_bytes: int = 0, most_waiting: int = 32, keys: Sequence[bytes] = ()
    ) -> None:
        self.models, self._keys = dict(models), keys
        self._most_bytes, self._most_waiting = most_bytes, most_waiting
        self._changing = asyncio.Lock()
        self._waiting = self._uses = 0

    def find(self, name: Any) -> str:
        """The name of the model that a request means.

        Raises
        ------
        Refusal
            404: there is none of that name.
        """
        for known in self.models:
            if name in (known, f"{known}-Fast-Apply"):
                return known
        if name in (None, "", DEFAULT):
            return next(iter(self.models))
        raise Refusal(404, f"no model {name!r} is served here; there are {', '.join(self.models)}")

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[ASGIApp]:
        """The application of a model, which stays loaded meanwhile; who asks for one that is not loaded waits for it.

        Raises
        ------
        Refusal
            500: it cannot be loaded; 503: too many wait.
        """
        model = self.models[name]
        if model.app is None:
            await self._wait_for(name, model)
        assert model.app is not None
        self._uses += 1
        model.users, model.used = model.users + 1, self._uses
        try:
            yield model.app
        finally:
            model.users -= 1

    async def _wait_for(self, name: str, model: Model) -> None:
        if self._waiting >= self._most_waiting:
            raise Refusal(
                503, f"{self._waiting} requests wait for models to be loaded, which is the limit", "overloaded"
            )
        self._waiting += 1
        try:
            async with self._changing:  # one after another, in the order in which they were asked for
                if model.app is None:
                    await self._load(name, model)
        finally:
            self._waiting -= 1

    async def _load(self, name: str, model: Model) -> None:
        await self._make_room(model)
        model.state = "loading"
        try:
            await model.begin(await asyncio.wrap_future(begun(model.load)), self._keys)
        except Exception as error:
            model.state = "failed"
            log.exception("%s could not be loaded", name)
            kind = in_a_line(error).partition(":")[0]
            message = f"the model {name!r} could not be loaded ({kind}); the server's log says why"
            raise Refusal(500, message, "server_error") from error
        log.info("%s is loaded, %d MiB of weights", name, model.size >> 20)
        await self._make_room(model)

    async def _make_room(self, wanted: Model) -> None:
        """Give up what was used longest ago until there is room; a model that is too large is loaded alone."""
        while self._most_bytes:
            others = [model for model in self.models.values() if model.app is not None and model is not wanted]
            free = [model for model in others if not model.stays]
            if not free or wanted.size + sum(model.size for model in others) <= self._most_bytes:
                return
            await min(free, key=lambda model: model.used).end()
            await asyncio.to_thread(_collect)

    async def close(self) -> None:
        """Let go of all that are loaded; their requests have been ended."""
        for model in self.models.values():
            model.users = 0
            await model.end()


def _collect() -> None:
    """Give the memory back that nobody refers to, also of what was there when a server had started."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def create_front(models: Models, first: Service, config: ServeConfig, *, keys: Sequence[bytes] = ()) -> FastAPI:
    """The ASGI application of several models, of which the first is loaded.

    What is about all of them is answered here, the rest by the application of each.
    """
    metrics, loaded = first.metrics, [first]

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await models.models[models.find(DEFAULT)].begin(loaded.pop(), keys)
        yield
        await models.close()

    app = guarded_app(config, metrics, keys, lifespan, openapi_url=None)
    front = Front(models, metrics, BodyReader(config))
    for path in ("/v1/models", "/models"):
        app.get(path)(front.list)
        app.head(path)(front.list)
    app.get("/v1/models/{name:path}")(front.describe)
    app.head("/v1/models/{name:path}")(front.describe)
    for path in ("/health", "/v1/health"):
        app.get(path)(front.health)
    app.get("/")(front.page)
    app.get("/metrics")(front.expose)
    app.get("/v1/workspace")(front.kept)
    app.delete("/v1/workspace")(front.forget)
    app.mount("/", front.dispatch)
    return app


class Front:
    """Handlers about all models, and the way to each."""

    def __init__(self, models: Models, metrics: Metrics, reader: BodyReader) -> None:
        self._models, self._metrics, self._reader = models, metrics, reader

    def _entries(self) -> dict[str, dict[str, Any]]:
        return {
            known: entry
            for name, model in self._models.models.items()
            for known, entry in model_entries(name, model.service, model.state).items()
        }

    async def list(self) -> Response:
        """All models, and whether they are loaded."""
        return JSONResponse({"object": "list", "data": list(self._entries().values())})

    async def describe(self, name: str) -> Response:
        """One of them."""
        found = self._models.find(name)
        return JSONResponse(self._entries()[name if name in self._entries() else found])

    async def health(self) -> Response:
        """That the server runs, which models are loaded, and what there is to say of the first."""
        states = {name: model.state for name, model in self._models.models.items()}
        first = next(iter(states))
        service = self._models.models[first].service
        said = {"status": "ok", "model": first} if service is None else InformationHandlers(service).state()
        return JSONResponse({**said, "models": states})

    async def page(self, request: Request) -> HTMLResponse:
        """What runs here, for a browser."""
        entries = {name: entry for name, entry in self._entries().items() if name in self._models.models}
        return page(request, entries.values(), self._metrics.figures())

    async def expose(self) -> Response:
        """Prometheus metrics of all models."""
        return exposed(self._metrics)

    async def kept(self, request: Request) -> Response:
        """What there is to forget of this user, by model."""
        return JSONResponse(await asyncio.to_thread(self._of_all, lambda service: service.kept(scope_of(request))))

    async def forget(self, request: Request) -> Response:
        """Drop everything that is kept of this user."""
        kept = await asyncio.to_thread(self._of_all, lambda service: service.forget(scope_of(request)))
        return JSONResponse({"forgotten": True, "kept": kept})

    def _of_all(self, ask: Callable[[Service], Any]) -> dict[str, Any]:
        loaded = {name: model.service for name, model in self._models.models.items()}
        return {name: ask(service) for name, service in loaded.items() if service is not None}

    async def dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the model that a request names answer it."""
        request = Request(scope, receive)
        if request.method == "GET" and request.url.path not in _ABOUT_ONE:  # a browser's for an icon loads no model
            raise Refusal(404, f"GET {request.url.path}: Not Found")
        body = await self._reader.read(request)
        named = request.query_params.get("model") if not body else await _named(body)
        read = False

        async def again() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async with self._models.using(self._models.find(named)) as app:
            await app({**scope, "root_path": ""}, again, send)


async def _named(body: bytes) -> Any:
    """What a body says as its model; None where it does not, or is no JSON, which the model's own answer says."""

    def read() -> Any:
        try:
            fields = pydantic_core.from_json(body)
        except ValueError:
            return None
        return fields.get("model") if isinstance(fields, dict) else None

    return read() if len(body) < SMALL_BODY else await asyncio.to_thread(read)
