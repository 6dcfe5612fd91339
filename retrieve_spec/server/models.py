"""The models of a server: the first is loaded at the start, each other one at its first request."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import JSONResponse

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError, in_a_line
from retrieve_spec.server.early import loading
from retrieve_spec.server.editors import display_name
from retrieve_spec.server.guard import Metrics, Refusal
from retrieve_spec.server.service import Service

log = logging.getLogger("retrieve_spec.server")

DEFAULT = "default"
"""Another name of the first model."""


def named(given: Sequence[str]) -> dict[str, str]:
    """Return models by name, from `NAME=PATH`, or a path or hub id (named by `display_name`).

    Raises
    ------
    ServeError
        Two models have one name.
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


class Model:
    """One of a server's models.

    Parameters
    ----------
    load
        Returns its service; may take minutes.

    Attributes
    ----------
    state
        `"unloaded"`, `"loading"`, `"loaded"` or `"failed"`, as in llama.cpp's server.
    service
        The service, None until it is loaded.
    """

    def __init__(self, load: Callable[[], Service]) -> None:
        self.load = load
        self.state = "unloaded"
        self.service: Service | None = None

    async def begin(self, are_idle: Callable[[], bool]) -> None:
        """Load it in a daemon thread, and serve with it; it may learn while `are_idle`."""
        made: Future[Service] = Future()
        made.set_running_or_notify_cancel()

        def run() -> None:
            try:
                made.set_result(self.load())
            except BaseException as error:
                made.set_exception(error)

        self.state = "loading"
        threading.Thread(target=run, name="retrieve-spec-loading", daemon=True).start()
        try:
            service = await asyncio.wrap_future(made)
        except Exception:
            self.state = "failed"
            raise
        service.start(are_idle)
        self.service, self.state = service, "loaded"


class Models:
    """The models of a server, by name; for use in the event loop's thread.

    Parameters
    ----------
    models
        A request without a name selects the first; if there is only one, every name selects it.
    config
        Limits.
    metrics
        Counters of all models.
    on_failure
        Called if the first cannot be loaded; `error` has the reason.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        config: ServeConfig,
        metrics: Metrics,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.models, self.config, self.metrics = dict(models), config, metrics
        self.first, self.several = next(iter(self.models)), len(self.models) > 1
        self.error: Exception | None = None
        self._on_failure = on_failure
        self._changing = asyncio.Lock()
        self._waiting = 0
        self._ready, self._stage, self._since = False, "starting", monotonic()
        self._compiled = 0  # kernels, in this stage

    @classmethod
    def of(cls, service: Service) -> Models:
        """Return the models of a server whose only model is loaded."""
        return cls({service.name: Model(lambda: service)}, service.config, service.metrics)

    def set_stage(self, stage: str) -> None:
        """Set and log what loading the first model does at present."""
        self._stage, self._compiled = stage, 0
        log.info("%s …", stage)

    def count_kernel(self, name: str) -> None:
        """Count a kernel that is compiled, as a sign that the stage goes on."""
        self._compiled += 1

    def unready(self) -> JSONResponse | None:
        """Return the answer to all requests until the first model is loaded, then None."""
        if self._ready:
            return None
        stage = f"{self._stage} ({self._compiled} so far)" if self._compiled else self._stage
        return JSONResponse(loading(stage, monotonic() - self._since), 503, {"Retry-After": "1"})

    async def start(self) -> None:
        """Load the first model."""
        try:
            await self.models[self.first].begin(self.are_idle)
        except Exception as error:
            self.error = error
            self._on_failure()
        else:
            self._ready = True
            log.info("ready after %.0f seconds", monotonic() - self._since)

    def find(self, name: Any) -> str:
        """Return the name of the model that a request selects.

        Raises
        ------
        Refusal
            404: no model has that name.
        """
        for known in self.models:
            if name in (known, f"{known}-Fast-Apply", f"{known}:latest"):
                return known
        if name in (None, "", DEFAULT) or not self.several:
            return self.first
        raise Refusal(404, f"no model {name!r} is served here; there are {', '.join(self.models)}")

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the list entry of each model, by name and by the alias under which Continue sends predictions."""
        return {
            known: {"id": known, "object": "model", "created": 0, "owned_by": "retrieve-spec",
                    "status": {"value": model.state}, **({"meta": model.service.meta()} if model.service else {}),
                    **({} if known == name else {"parent": name})}
            for name, model in self.models.items()
            for known in (name, f"{name}-Fast-Apply")
        }  # fmt: skip

    def of_all(self, ask: Callable[[Service], Any]) -> Any:
        """Return a result for each loaded model, by name; with one model, just its result."""
        loaded = {name: model.service for name, model in self.models.items()}
        said = {name: ask(service) for name, service in loaded.items() if service is not None}
        return said if self.several else said[self.first]

    async def service(self, name: str) -> Service:
        """Return the service of a model; a request waits while it is loaded.

        Raises
        ------
        Refusal
            500: it cannot be loaded; 503: too many requests wait for it.
        """
        model = self.models[name]
        if model.service is None:
            await self._wait_for(name, model)
        assert model.service is not None
        return model.service

    async def _wait_for(self, name: str, model: Model) -> None:
        if self._waiting >= self.config.max_queue:
            raise Refusal(
                503, f"{self._waiting} requests wait for models to be loaded, which is the limit", "overloaded"
            )
        self._waiting += 1
        try:
            async with self._changing:  # one at a time, in order of the requests
                if model.service is None:
                    await self._load(name, model)
        finally:
            self._waiting -= 1

    async def _load(self, name: str, model: Model) -> None:
        try:
            await model.begin(self.are_idle)
        except Exception as error:
            log.exception("%s could not be loaded", name)
            kind = in_a_line(error).partition(":")[0]
            message = f"the model {name!r} could not be loaded ({kind}); the server's log says why"
            raise Refusal(500, message, "server_error") from error
        log.info("%s is loaded", name)

    def are_idle(self) -> bool:
        """Whether no model has work; any thread may ask."""
        return all(model.service is None or model.service.queue.is_idle() for model in self.models.values())

    def close(self) -> None:
        """Unload all models; their requests must have ended."""
        for model in self.models.values():
            if model.service is not None:
                model.service.close()


async def _known(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


Known = Annotated[Models, Depends(_known)]
"""Dependency of handlers about all models."""


async def _meant(request: Request) -> Service:
    models = await _known(request)
    named = getattr(request.state, "model", None) or request.query_params.get("model")
    return await models.service(models.find(named))


Meant = Annotated[Service, Depends(_meant)]
"""Dependency of handlers about the request's model."""
