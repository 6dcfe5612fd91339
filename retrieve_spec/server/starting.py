"""Starting up: while the model is being loaded, requests get 503 with what is going on and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("retrieve_spec.server")

Progress = Callable[[str], None]
"""Told what is going on."""


class Starting:
    """An ASGI application that makes another one in a thread and answers for it until it is there.

    Where that fails ``on_failure`` is called, and `error` says why.
    """

    def __init__(self, make: Callable[[Progress], FastAPI], on_failure: Callable[[], None]) -> None:
        self._make, self._on_failure = make, on_failure
        self._app: ASGIApp | None = None
        self._lifespan = contextlib.AsyncExitStack()
        self._stage, self._since = "starting", monotonic()
        self.error: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer()(scope, receive, send)

    def _answer(self) -> JSONResponse:
        """As llama.cpp's server answers while it loads, and how far it is."""
        loading = {"stage": self._stage, "seconds": round(monotonic() - self._since, 1)}
        error = {"code": 503, "message": f"Loading model: {self._stage}", "type": "unavailable_error"}
        return JSONResponse({"error": error, "status": "loading", "loading": loading}, 503, {"Retry-After": "1"})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        loop = asyncio.get_running_loop()
        made: asyncio.Future[FastAPI] = loop.create_future()

        def work() -> None:
            try:
                app = self._make(self._tell)
            except BaseException as error:
                self._hand_over(loop, made.set_exception, error)
            else:
                self._hand_over(loop, made.set_result, app)

        threading.Thread(target=work, name="retrieve-spec-loading", daemon=True).start()
        opening = asyncio.ensure_future(self._open(made))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
        await self._lifespan.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    @staticmethod
    def _hand_over(loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], what: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(take, what)

    async def _open(self, made: asyncio.Future[FastAPI]) -> None:
        try:
            app = await made
            await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        except Exception as error:
            self.error = error
            self._on_failure()
            return
        self._app = app
        log.info("ready after %.0f seconds", monotonic() - self._since)

    def _tell(self, stage: str) -> None:
        self._stage = stage
        log.info("%s …", stage)
