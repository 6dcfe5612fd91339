"""Request parsing: bodies as schemas, connections as callers."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from retrieve_spec.config import ServeConfig
from retrieve_spec.server import schemas
from retrieve_spec.server.guard import BodyBudget, Refusal, given_key, read_body
from retrieve_spec.server.service import Caller
from retrieve_spec.server.unserved import unserved

M = TypeVar("M", bound=BaseModel)
_INLINE = 64 << 10
"""Bytes of a body that is parsed where other requests wait; larger ones are parsed in a thread."""


class Reader:
    """Reads the requests of one server, each and all together within its bounds."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._budget = BodyBudget(config.bodies_bytes)

    async def read(self, request: Request, schema: type[M]) -> M:
        """The body of a request as a schema.

        Raises
        ------
        Refusal
            400: no JSON, or as `check`; 413: too large; 408: too slow; 503: too much is being read.
        """
        config = self._config
        data = await read_body(request, config.max_body_bytes, self._budget, config.body_s)

        def parsed() -> M:
            try:
                fields = pydantic_core.from_json(data, allow_inf_nan=False)
            except ValueError as error:
                raise Refusal(400, f"the body is not JSON: {error}") from error
            return self.check(schema, fields)

        return parsed() if len(data) < _INLINE else await asyncio.to_thread(parsed)

    def check(self, schema: type[M], fields: Any) -> M:
        """Fields as a schema.

        Raises
        ------
        Refusal
            400: a field is missing or wrong, or asks for what is not served; says which and why.
        """
        if not isinstance(fields, dict):
            raise Refusal(400, "the body must be a JSON object")
        if issubclass(schema, schemas.Common | schemas.TemplateRequest) and (
            names := unserved(fields, schema.model_fields)
        ):
            raise Refusal(400, f"not served here: {', '.join(names)}; leave it out", "unsupported_field")
        try:
            return schema.model_validate(fields)
        except ValidationError as error:
            raise Refusal(400, schemas.reason(error)) from error


def scope_of(request: Request) -> str:
    """The user who sends a request: their API key, "" without one."""
    return given_key(request.headers).decode("utf-8", "backslashreplace")


def caller(request: Request, body: schemas.Common, arrived: float) -> Caller:
    """Who sends a request; newer ones replace older ones under what the client says, else under where it sits."""
    key = scope_of(request)
    explicit = request.headers.get("x-client-id") or body.user
    if explicit:
        return Caller(key, f"{key}\0{explicit[:256]}", explicit=True, arrived=arrived)
    host = request.client.host if request.client else ""
    return Caller(key, f"{key}\0{host}\0{request.url.path}\0{body.id_slot}", arrived=arrived)
