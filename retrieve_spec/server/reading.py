"""Request reading: bodies in bounds of bytes and time, checked by their schema; connections as callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from retrieve_spec.config import ServeConfig
from retrieve_spec.server import schemas
from retrieve_spec.server.guard import Refusal, given_key
from retrieve_spec.server.service import Caller

_DRAINED = 16 << 20
_SMALL = 64 << 10
_INLINE = 64 << 10
"""Bytes of a body that is parsed where other requests wait; larger ones are parsed in a thread."""


class BodyBudget:
    """Bytes of bodies that are being read, over all connections.

    The first `_SMALL` of every body are not counted, so that ordinary requests always come through.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, size: int) -> bool:
        """Whether there is room for so many bytes more; they are taken then."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give_back(self, size: int) -> None:
        """The bytes are not being read any more."""
        self._left += size


async def read_body(request: Request, limit: int, budget: BodyBudget, seconds: float) -> bytes:
    """The body of a request.

    Raises
    ------
    Refusal
        The body is larger than the limit (413). A little more is read and dropped, since a client that is still
        sending when the connection closes never sees the answer. It takes too long (408), too many others are being
        read (503), or the client goes away.
    """
    parts: list[bytes] = []
    size = held = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    parts.clear()
                elif size > _SMALL:
                    if not budget.take(len(part)):
                        raise Refusal(503, "too many large requests are being read", "overloaded")
                    held += len(part)
                if size > limit + _DRAINED:
                    break
                if size <= limit:
                    parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {seconds:g} seconds", "timeout") from None
    except ClientDisconnect:
        raise Refusal(499, "the client closed the connection", "cancelled") from None
    finally:
        budget.give_back(held)
    if size > limit:
        raise Refusal(413, f"the body has more than {limit} bytes")
    return b"".join(parts)


class BodyReader:
    """Reads the requests of one server, each and all together within its bounds."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._budget = BodyBudget(config.bodies_bytes)

    async def read(self, request: Request, schema: type[BaseModel]) -> BaseModel:
        """The body of a request as a schema.

        Raises
        ------
        Refusal
            400: no JSON, or as `check`; 413: too large; 408: too slow; 503: too much is being read.
        """
        config = self._config
        data = await read_body(request, config.max_body_bytes, self._budget, config.body_s)

        def parsed() -> BaseModel:
            try:
                fields = pydantic_core.from_json(data, allow_inf_nan=False)
            except ValueError as error:
                raise Refusal(400, f"the body is not JSON: {error}") from error
            return self.check(schema, fields)

        return parsed() if len(data) < _INLINE else await asyncio.to_thread(parsed)

    def check(self, schema: type[BaseModel], fields: Any) -> BaseModel:
        """Fields as a schema.

        Raises
        ------
        Refusal
            400: a field is missing or wrong, or asks for what is not served; says which and why.
        """
        if not isinstance(fields, dict):
            raise Refusal(400, "the body must be a JSON object")
        try:
            return schema.model_validate(fields)
        except ValidationError as error:
            raise Refusal(400, schemas.reason(error), schemas.kind(error)) from error


class _CheckedRequest(Request):
    """A request whose body has been read and checked."""

    def __init__(self, request: Request, body: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._checked = body

    @property
    def headers(self) -> Headers:
        """The headers; a body is JSON whatever its client called it."""
        return Headers(raw=[*super().headers.raw, (b"content-type", b"application/json")])

    async def body(self) -> bytes:
        """Something; what was sent has been read."""
        return b"read"

    async def json(self) -> Any:
        """The body as its schema."""
        return self._checked


class ReadingRoute(APIRoute):
    """A route whose body is read by the `BodyReader` at `app.state.reader`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        answer, field = super().get_route_handler(), self.body_field
        if field is None:
            return answer
        schema = field.field_info.annotation

        async def read_and_answer(request: Request) -> Response:
            request.state.arrived = monotonic()
            try:
                body = await request.app.state.reader.read(request, schema)
                return await answer(_CheckedRequest(request, body))
            except asyncio.CancelledError:  # only an ending server cancels a request that is not done in time
                return Refusal(503, "the server is stopping", "overloaded").response()

        return read_and_answer


def scope_of(request: Request) -> str:
    """The user who sends a request: their API key, "" without one."""
    return given_key(request.headers).decode("utf-8", "backslashreplace")


def caller(request: Request, body: schemas.Common) -> Caller:
    """Who sends a request; newer ones replace older ones under what the client says, else under where it sits."""
    key, arrived = scope_of(request), request.state.arrived
    explicit = request.headers.get("x-client-id") or body.user
    if explicit:
        return Caller(key, f"{key}\0{explicit[:256]}", explicit=True, arrived=arrived)
    host = request.client.host if request.client else ""
    return Caller(key, f"{key}\0{host}\0{request.url.path}\0{body.id_slot}", arrived=arrived)
