"""Ollama's dialect: translations of its requests to chats and completions, and of the answers back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrieve_spec.server.answers import Answer, Events, Shown, finish_reason
from retrieve_spec.server.completions import ANSWERS, caller, converse, respond
from retrieve_spec.server.guard import BoundedRoute, checked, errors
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.models import Known, Meant
from retrieve_spec.server.prompts import FimParts
from retrieve_spec.server.reading import Thought
from retrieve_spec.server.sampling import TokenLogProb
from retrieve_spec.server.schemas import (
    Asked,
    ChatRequest,
    Item,
    Items,
    OpenAICompletionRequest,
    SamplingOptions,
    Speculating,
    Text,
    TopTokens,
)
from retrieve_spec.server.service import PreparedTask, Service
from retrieve_spec.server.translations import as_chat

VERSION = "0.12.0"
"""The version of Ollama whose endpoints these are; some clients ask for it."""

router = APIRouter(route_class=BoundedRoute)


class Options(SamplingOptions):
    """Sampling, limit of tokens and stop strings."""

    num_predict: Annotated[int, Field(ge=-2, le=1 << 31)] | None = None

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's dialect."""
        fields = self.model_dump(exclude={"num_predict"}, exclude_none=True)
        wanted = None if self.num_predict is None else max(self.num_predict, -1)
        return {**fields, "max_tokens": wanted}


class OllamaRequest(Speculating):
    """Common fields of requests for text."""

    stream: StrictBool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: StrictBool | Text | None = None
    logprobs: StrictBool | None = None
    top_logprobs: TopTokens | None = None

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of OpenAI's dialect."""
        wanted = {"type": "json_object"} if self.format == "json" else {"type": "json_schema", "schema": self.format}
        thinks = {"enable_thinking": self.think} if isinstance(self.think, bool) else {"reasoning_effort": self.think}
        return {
            **({} if self.options is None else self.options.as_fields()),
            **thinks,
            **self.own_fields(),
            "stream": self.stream is not False,
            "response_format": wanted if self.format else None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
        }


class OllamaChatRequest(OllamaRequest):
    """`POST /api/chat`."""

    messages: Items[Item] | None = None
    tools: Items[dict[str, Any]] | None = None

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat request.

        Raises
        ------
        Refusal
            400: it is invalid.
        """
        messages = [_message(message) if isinstance(message, dict) else message for message in self.messages or ()]
        return as_chat({**self.as_fields(), "messages": messages, "tools": self.tools}, self.left_out)


class OllamaGenerateRequest(OllamaRequest):
    """`POST /api/generate`."""

    _refused: ClassVar[dict[str, tuple[Any, ...]]] = {"template": ()}
    _asks: ClassVar[dict[str, tuple[Any, ...]]] = {"context": ()}

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    raw: StrictBool | None = None
    images: Items[Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat of one question.

        Raises
        ------
        Refusal
            400: it is invalid.
        """
        head = [{"role": "system", "content": self.system}] if self.system else []
        asked = _message({"role": "user", "content": self.prompt or "", "images": self.images})
        return as_chat({**self.as_fields(), "messages": [*head, asked]}, self.left_out)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form of chats: images become parts of its content."""
    others = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
    content, images = message.get("content"), message.get("images")
    if isinstance(images, list) and images:
        others["content"] = [{"type": "text", "text": str(content or "")}, *({"type": "image"} for _ in images)]
    told = {"reasoning_content": message.get("thinking"), "name": message.get("tool_name")}
    return {**others, **{key: value for key, value in told.items() if value}}


class OllamaAnswer(Answer):
    """An answer as lines of JSON.

    Parameters
    ----------
    service, request, prepared
        The model, the request and its tasks.
    chat
        Whether the text is in a message.
    """

    media_type = "application/x-ndjson"
    ping = b""

    def __init__(self, service: Service, request: Any, prepared: Sequence[PreparedTask], chat: bool = True) -> None:
        super().__init__(service, request, prepared)
        self._model, self._chat = service.name, chat
        self._log_probabilities = service.logprobs.of_chat if request.wanted_logprobs() is not None else None

    def encoded(self, body: dict[str, Any]) -> bytes:
        """Encode one line of a stream."""
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    def _line(self, said: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return a line with `content`, `thinking` or `tool_calls`."""
        if self._chat:
            said = {"message": {"role": "assistant", "content": "", **said}}
        else:
            said = {"response": said.get("content", ""), **{key: said[key] for key in said if key != "content"}}
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat(), **said, "done": False, **fields}

    def delta(self, delta: Delta, index: int) -> Events:
        """Return the lines for the new text of one pass."""
        lines = [self._line(_said(part)) for part in self._said(delta.text)]
        if noted := self._noted(delta.logprobs):
            lines = lines or [self._line({})]
            lines[0] |= noted
        return lines

    def _noted(self, logprobs: Sequence[TokenLogProb]) -> dict[str, Any]:
        """Return the field with log-probabilities, if there are any."""
        if self._log_probabilities is None or not logprobs:
            return {}
        return {"logprobs": self._log_probabilities(logprobs)["content"]}

    def end(self, done: Completion, index: int) -> Events:
        """Return the lines at the end."""
        return [*(self._line(_said(part)) for part in self._said("", last=True)), self._line({}, **_ended(done))]

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        (done,) = finished
        thought, text, calls = self._spoken(done)
        said: dict[str, Any] = {"content": text, **({"thinking": thought} if thought else {})}
        if calls:
            said["tool_calls"] = [call for one in calls for call in _said(one)["tool_calls"]]
        return self._line(said, **_ended(done), **self._noted(done.logprobs))

    def failure(self, error: str) -> dict[str, Any]:
        """Return the line for a text that failed."""
        return {"error": error}


def _said(part: Shown) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, Thought):
        return {"thinking": part.text}
    function = part["function"]
    return {"tool_calls": [{"function": {"name": function["name"], "arguments": json.loads(function["arguments"])}}]}


def _ended(done: Completion) -> dict[str, Any]:
    """Return the reason of the end, token counts, and times in nanoseconds."""
    return {
        "done": True,
        "done_reason": finish_reason(done),
        "total_duration": round(1e9 * (done.waited_s + done.setup_s + done.prompt_s + done.predict_s)),
        "load_duration": 0,
        "prompt_eval_count": done.prompt_tokens,
        "prompt_eval_duration": round(1e9 * done.prompt_s),
        "eval_count": done.predicted,
        "eval_duration": round(1e9 * done.predict_s),
    }


_LINES: dict[int | str, Any] = {**ANSWERS, 200: {"content": {OllamaAnswer.media_type: {}}}}


@router.post("/api/chat", responses=_LINES)
async def chat(body: OllamaChatRequest, request: Request, service: Meant) -> Response:
    """Complete a chat (Ollama's dialect)."""
    if not body.messages:
        return _loaded(service, {"message": {"role": "assistant", "content": ""}})
    return await converse(service, request, body.as_chat(), OllamaAnswer)


@router.post("/api/generate", responses=_LINES)
async def generate(body: OllamaGenerateRequest, request: Request, service: Meant) -> Response:
    """Complete a prompt, with or without a suffix (Ollama's dialect)."""
    if not (body.prompt or body.suffix):
        return _loaded(service, {"response": ""})
    write = partial(OllamaAnswer, chat=False)
    if not (body.suffix or body.raw):
        return await converse(service, request, body.as_chat(), write)
    prompt = body.prompt or ""
    noted = {"logprobs": (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs": None}
    fields = {**body.as_fields(), "prompt": prompt, "suffix": body.suffix, **noted}
    asked = checked(OpenAICompletionRequest, fields)
    wanted, who = -1 if asked.max_tokens is None else asked.max_tokens, caller(request, asked)

    def prepare() -> list[PreparedTask]:
        if body.suffix:
            return [service.fill(FimParts(prompt, body.suffix), asked, who, wanted)]
        return [service.raw(prompt, asked, who, wanted)]

    return await respond(service, request, asked, prepare, write)


def _loaded(service: Service, said: dict[str, Any]) -> Response:
    """Answer a request without a question, by which clients load a model."""
    made = {"model": service.name, "created_at": datetime.now(UTC).isoformat()}
    return JSONResponse({**made, **said, "done": True, "done_reason": "load"})


def _entry(name: str) -> dict[str, Any]:
    details = {"format": "safetensors", "family": name, "families": [name], "parameter_size": "",
               "quantization_level": ""}  # fmt: skip
    return {
        "name": name,
        "model": name,
        "modified_at": "1970-01-01T00:00:00Z",
        "size": 0,
        "digest": "",
        "details": details,
    }


@router.get("/api/tags")
async def tags(models: Known) -> Response:
    """List all models."""
    return JSONResponse({"models": list(map(_entry, models.models))})


@router.get("/api/ps")
async def running(models: Known) -> Response:
    """List the loaded models."""
    return JSONResponse({"models": [_entry(name) for name, model in models.models.items() if model.service]})


@router.get("/api/version")
async def version() -> Response:
    """Return the version of Ollama."""
    return JSONResponse({"version": VERSION})


@router.post("/api/show", responses=errors(400, 404, 408, 413, 503))
async def show(body: Asked, service: Meant) -> Response:
    """Describe a model's capabilities."""
    template = service.prompts.template
    can = {"completion": True, "tools": True, "insert": service.family, "thinking": template.traits.thoughts}
    info = {
        "general.architecture": "model",
        "general.basename": service.name,  # VS Code's name of the model
        "model.context_length": service.backend.n_ctx,
    }
    return JSONResponse(
        {
            **_entry(service.name),
            "modelfile": "",
            "parameters": "",
            "template": template.text,
            "model_info": info,
            "capabilities": [name for name, able in can.items() if able],
        }
    )
