"""OpenAPI 3.1 description of the HTTP surface, from the same models that check requests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from retrieve_spec._version import __version__
from retrieve_spec.server import schemas

_POSTS: dict[str, tuple[str, tuple[type[BaseModel], ...], tuple[int, ...]]] = {
    "/infill": ("Text between a prefix and a suffix (llama.cpp's dialect).", (schemas.InfillRequest,), (501,)),
    "/completion": ("Text after a prompt (llama.cpp's dialect).", (schemas.CompletionRequest,), ()),
    "/v1/completions": (
        "Text completions (OpenAI's dialect, with `suffix`).",
        (schemas.OpenAICompletionRequest,),
        (501,),
    ),
    "/v1/fim/completions": (
        "Text between a prompt and a suffix, answered like a chat (Mistral's dialect).",
        (schemas.OpenAICompletionRequest,),
        (501,),
    ),
    "/v1/chat/completions": ("Chat completions, with predicted outputs.", (schemas.ChatRequest,), ()),
    "/v1/edits": ("The whole new text of a file, given what to change.", (schemas.EditRequest,), ()),
    "/tokenize": ("Text as token ids.", (schemas.TokenizeRequest,), ()),
    "/detokenize": ("Token ids as text.", (schemas.DetokenizeRequest,), ()),
    "/apply-template": ("The prompt of a conversation.", (schemas.TemplateRequest,), ()),
}
_GETS = {
    "/health": "What is served, and what it drafts from.",
    "/v1/health": "The same.",
    "/v1/models": "The model, and the alias under which some editors send predictions.",
    "/props": "Context length and defaults.",
}
_WORKING = ("/infill", "/completion", "/v1/completions", "/v1/fim/completions", "/v1/chat/completions", "/v1/edits")


@lru_cache(maxsize=1)
def describe() -> dict[str, Any]:
    """The OpenAPI document."""
    models = sorted({model for _, bodies, _ in _POSTS.values() for model in bodies}, key=lambda model: model.__name__)
    _, defined = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for path, (summary, bodies, more) in _POSTS.items():
        paths[path] = {"post": _post(path, summary, bodies, more)}
    for path, summary in _GETS.items():
        paths.setdefault(path, {})["get"] = {"summary": summary, "responses": {"200": _json("The answer.")}}
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus metrics.",
            "responses": {
                "200": {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
            },
        }
    }
    paths["/v1/workspace"] = {
        "get": {"summary": "What is kept of the caller.", "responses": {"200": _json("How much of each kind.")}},
        "delete": {"summary": "Forget what is kept of the caller.", "responses": {"200": _json("What there was.")}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "retrieve-spec", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**defined.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
            },
        }
    },
}


def _json(description: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema or {}}}}


def _error(description: str) -> dict[str, Any]:
    return _json(description, {"$ref": "#/components/schemas/Error"})


def _post(path: str, summary: str, bodies: tuple[type[BaseModel], ...], more: tuple[int, ...]) -> dict[str, Any]:
    references = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    answer = _json("The answer.")
    if path in _WORKING:
        answer["content"]["text/event-stream"] = {}
    responses = {"200": answer, "400": _error("The request is not right; the message says why.")}
    responses["413"] = _error("The body is too large.")
    responses["408"] = _error("The body did not come in time.")
    responses["403"] = _error("Browser pages of other origins are refused.")
    responses["401"] = _error("A key is required.")
    if path in _WORKING:
        responses["499"] = _error("A newer request of the client superseded this one.")
        responses["503"] = _error("Too many requests wait, or the model is being loaded.")
    if 501 in more:
        responses["501"] = _error("The model has no fill-in-the-middle tokens.")
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": responses}
