"""Anthropic's messages and OpenAI's responses: translations of requests to chats, and of the answers back."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, PrivateAttr, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrieve_spec.server.answers import Events, ItemizedAnswer, Shown, event, finish_reason
from retrieve_spec.server.completions import ANSWERS, EventStream, converse, left_out_header
from retrieve_spec.server.guard import BoundedRoute, ResponseNotFound, ThreadNotFound, TooLong, checked
from retrieve_spec.server.history import Names, message_tools, message_turns, response_tools, response_turns
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.models import Meant
from retrieve_spec.server.reading import Thought
from retrieve_spec.server.schemas import (
    ChatRequest,
    Count,
    Item,
    Items,
    Lenient,
    ResponseFormat,
    Text,
    Translated,
    is_tool,
)
from retrieve_spec.server.service import PreparedTask, Service

router = APIRouter(route_class=BoundedRoute)

_REASONS = {"eos": "end_turn", "word": "stop_sequence"}


class ToolChoice(Lenient):
    """Which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: StrictBool | None = None

    def as_choice(self) -> str | dict[str, Any]:
        """Return the `tool_choice` of a chat request."""
        named = {"type": "function", "function": {"name": self.name or ""}}
        return named if self.type == "tool" else {"any": "required"}.get(self.type, self.type)


class ThinkingOptions(Lenient):
    """Whether the model thinks first."""

    type: Text


class OutputFormat(Lenient):
    """Format of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(Lenient):
    """Format of the answer, and effort."""

    format: OutputFormat | None = None
    effort: Text | None = None


class ThreadOptions(Lenient):
    """Whether the server keeps the conversation, or continues one that it keeps."""

    type: Text


class CountRequest(Translated):
    """`POST /v1/messages/count_tokens`."""

    _refused: ClassVar[dict[str, tuple[Any, ...]]] = {"compaction": ()}
    _asks: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mcp_servers": (),
        "container": (),
        "context_management": (),
        "thread": (),
    }

    messages: Annotated[Items[Item], Field(min_length=1)]
    system: Text | Items[Item] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: OutputFormat | None = None
    thread: ThreadOptions | None = None

    def as_chat(self, **fields: Any) -> ChatRequest:
        """Return the request as a chat request with further fields.

        Raises
        ------
        Refusal
            400: it is invalid; 404: it continues an earlier request, of which nothing is kept.
        """
        if self.thread is not None and self.thread.type == "continue":
            raise ThreadNotFound
        left_out, choice, output = list(self.left_out), self.tool_choice, self.output_config or OutputOptions()
        head = [{"role": "system", "content": self.system}] if self.system else []
        wanted = self.output_format or output.format
        tools, found = message_tools(self.tools or (), self.messages, left_out)
        fields |= {
            **self.own_fields(),
            "messages": [*head, *message_turns(self.messages, found, left_out)],
            "tools": tools,
            "reasoning_effort": output.effort,
            "enable_thinking": None if self.thinking is None else self.thinking.type != "disabled",
            "response_format": None if wanted is None else {"type": "json_schema", "schema": wanted.schema_},
        }
        if choice is not None:
            fields |= {
                "tool_choice": choice.as_choice(),
                "parallel_tool_calls": not choice.disable_parallel_tool_use,
            }
        chat = as_chat(fields, left_out)
        chat.leave_to_messages(found)
        return chat


def as_chat(fields: dict[str, Any], left_out: list[str]) -> ChatRequest:
    """Return a chat that also names the fields ignored in its translation.

    Raises
    ------
    Refusal
        400: it is invalid.
    """
    chat = checked(ChatRequest, fields)
    chat.left_out[:0] = left_out
    return chat


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[Count, Field(ge=0)]
    stop_sequences: Annotated[Items[Text], Field(max_length=256)] | None = None
    stream: StrictBool | None = None

    def as_chat(self, **fields: Any) -> ChatRequest:
        """Return the request as a chat request."""
        own = self.model_dump(include={"max_tokens", "stream"})
        return super().as_chat(**own, stop=self.stop_sequences, **fields)


class MessageAnswer(ItemizedAnswer):
    """A message; its items are blocks."""

    def __init__(self, service: Service, request: ChatRequest, prepared: Sequence[PreparedTask]) -> None:
        super().__init__(service, request, prepared)
        self._number = -1  # of the open block
        self._prompt_tokens = len(prepared[0].task.prompt_ids)
        self._begun = False
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """Return the message."""
        (done,) = finished
        thought, text, calls = self._spoken(done)
        content: Events = [_thinking(thought)] if thought else []
        content += [] if calls and not text else [{"type": "text", "text": text}]
        content += [_tool_use(call, json.loads(call["function"]["arguments"])) for call in calls]
        return {**self._head, "content": content, **self._ended(done), "usage": _usage(done)}

    def delta(self, delta: Delta, index: int) -> Events:
        """Return the events for the new text of one pass; the first has the number of cached tokens."""
        return [*self._start(delta.cached_tokens), *super().delta(delta, index)]

    def end(self, done: Completion, index: int) -> Events:
        """Return the events at the end."""
        return [*self._start(done.cached_tokens), *super().end(done, index)]

    def _start(self, cached: int) -> Events:
        if self._begun:
            return []
        self._begun = True
        usage = _usage(Completion(prompt_tokens=self._prompt_tokens, cached_tokens=cached))
        return [{"type": "message_start", "message": {**self._head, "usage": usage}}]

    def _opened(self, part: Shown) -> Events:
        self._number += 1
        if isinstance(part, str):
            return [self._block("start", content_block={"type": "text", "text": ""})]
        if isinstance(part, Thought):
            return [self._block("start", content_block=_thinking(""))]
        return [self._block("start", content_block=_tool_use(part, {})), self._given("")]

    def _added(self, part: Shown) -> dict[str, Any]:
        if isinstance(part, str):
            return self._block("delta", delta={"type": "text_delta", "text": part})
        if isinstance(part, Thought):
            return self._block("delta", delta={"type": "thinking_delta", "thinking": part.text})
        return self._given(part["function"]["arguments"])

    def _given(self, arguments: str) -> dict[str, Any]:
        return self._block("delta", delta={"type": "input_json_delta", "partial_json": arguments})

    def _closed(self, done: Completion | None = None) -> Events:
        return [self._block("stop")]

    def _last(self, done: Completion) -> Events:
        last = {"type": "message_delta", "delta": self._ended(done), "usage": _usage(done)}
        return [last, {"type": "message_stop"}]

    def _block(self, what: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{what}", "index": self._number, **fields}

    def _ended(self, done: Completion) -> dict[str, Any]:
        """Return the `stop_reason` of a completion."""
        if finish_reason(done, called=bool(self._calls[0])) == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": _REASONS.get(done.stop_type, "max_tokens"), "stop_sequence": done.stopping_word or None}

    def failure(self, error: str) -> dict[str, Any]:
        """Return the event for a text that failed."""
        return {"type": "error", "error": {"type": "api_error", "message": error}}


def _tool_use(call: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _thinking(text: str) -> dict[str, Any]:
    """Return a thought, without Anthropic's signature."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _usage(done: Completion) -> dict[str, int]:
    """Count tokens; cached tokens are not input tokens in this dialect."""
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": done.predicted,
    }


@router.post("/v1/messages", responses=ANSWERS)
async def messages(body: MessagesRequest, request: Request, service: Meant) -> Response:
    """Complete a conversation (Anthropic's dialect)."""
    return await converse(service, request, body.as_chat(), MessageAnswer)


@router.post("/v1/messages/count_tokens", responses=ANSWERS)
async def count(body: CountRequest, request: Request, service: Meant) -> Response:
    """Count the tokens of a conversation's prompt."""
    chat = body.as_chat()
    prompt = await asyncio.to_thread(service.prompts.chat, chat)
    told = left_out_header(request, chat.left_out)
    return JSONResponse({"input_tokens": len(prompt.token_ids)}, headers=told)


class TextOptions(Lenient):
    """Format of the text."""

    format: ResponseFormat | None = None


class ReasoningOptions(Lenient):
    """How much the model thinks."""

    effort: Text | None = None


_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What may be included in a response; encrypted thoughts are never there."""


class ResponsesRequest(Translated):
    """`POST /v1/responses`."""

    _refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        "conversation": (),
        "prompt": (),
        "background": (False,),
    }
    _asks: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncation": ("disabled",),
    }

    input: Text | Annotated[Items[Item], Field(min_length=1)]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    max_output_tokens: Count | None = None
    stream: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    include: Items[Text] | None = None
    top_logprobs: Count | None = Field(None, description=f"Of effect with {_LOGPROBS!r} in `include`.")
    _names: Names = PrivateAttr(default_factory=dict)

    def as_chat(self) -> ChatRequest:
        """Return the request as a chat request.

        Raises
        ------
        Refusal
            400: it is invalid, or continues an earlier response, of which nothing is kept.
        """
        if self.previous_response_id:
            raise ResponseNotFound(self.previous_response_id)
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        asked = self.include or ()
        left_out = [*self.left_out, *(f"include ({name})" for name in asked if name not in (_LOGPROBS, _ENCRYPTED))]
        tools, self._names = response_tools(self.tools or (), items, left_out, is_tool)
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        wanted = None if self.text is None or self.text.format is None else self.text.format.model_dump(by_alias=True)
        fields = {
            **self.own_fields(),
            **self.model_dump(include={"stream", "parallel_tool_calls"}),
            "messages": [*head, *response_turns(items, self._names, left_out)],
            "max_tokens": self.max_output_tokens,
            "response_format": wanted,
            "logprobs": _LOGPROBS in asked,
            "top_logprobs": self.top_logprobs if _LOGPROBS in asked else None,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "tools": tools,
            "tool_choice": self._choice(),
        }
        return as_chat(fields, left_out)

    def _choice(self) -> Any:
        """Return the tool choice in the form of chats."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            return {"type": "function", "function": {"name": self._offered(choice)}}
        if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
            named = [{"name": self._offered(one)} for one in choice["tools"] if isinstance(one, dict)]
            return {**choice, "tools": named}
        return choice

    def _offered(self, tool: dict[str, Any]) -> str:
        """Return the name under which a function is offered."""
        namespace, name = tool.get("namespace"), str(tool.get("name"))
        return self._names.get((namespace if isinstance(namespace, str) else None, name), name)

    def named(self, offered: str) -> dict[str, str]:
        """Return a function's own name, with the namespace in which the client knows it."""
        found = next((place for place, name in self._names.items() if name == offered), (None, offered))
        return {"name": found[1], **({} if found[0] is None else {"namespace": found[0]})}


class ResponseAnswer(ItemizedAnswer):
    """A response; its items are messages, thoughts and calls."""

    def __init__(
        self, service: Service, chat: ChatRequest, prepared: Sequence[PreparedTask], request: ResponsesRequest
    ) -> None:
        super().__init__(service, chat, prepared)
        self._number, self._named = 0, request.named
        self._output: Events = []
        self._head = _head(service, request)
        self._log_probabilities, self._noted = service.logprobs.of_chat, list[dict[str, Any]]()

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """Return the response, which is also in the last event of its stream."""
        (done,) = finished
        self.delta(Delta(done.text, (), done.logprobs), 0)
        response: dict[str, Any] = self.end(done, 0)[-1]["response"]
        return response

    def delta(self, delta: Delta, index: int) -> Events:
        """Return the events for the new text of one pass; log-probabilities go with the next piece of text."""
        self._noted += self._log_probabilities(delta.logprobs)["content"]
        return super().delta(delta, index)

    def _ended(self, done: Completion) -> dict[str, Any]:
        complete = finish_reason(done) == "stop"
        return {
            **self._head,
            "status": "completed" if complete else "incomplete",
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": self._output,
            "usage": {
                "input_tokens": done.prompt_tokens,
                "input_tokens_details": {"cached_tokens": done.cached_tokens},
                "output_tokens": done.predicted,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": done.prompt_tokens + done.predicted,
            },
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def begin(self, index: int) -> Events:
        """Return the events before any text."""
        return [
            self._event("response.created", response=self._head),
            self._event("response.in_progress", response=self._head),
        ]

    def _opened(self, part: Shown) -> Events:
        if isinstance(part, dict):
            self._output.append(self._call_item(part))
            return [self._item_event("added", dict(self._output[-1]))]
        item = _reasoning() if isinstance(part, Thought) else _message()
        self._output.append(item)
        return [
            self._item_event("added", {**item, "content": []}),
            self._of_item("content_part.added", content_index=0, part=dict(item["content"][0])),
        ]

    def _call_item(self, call: dict[str, Any]) -> dict[str, Any]:
        told = {"call_id": call["id"], **self._named(call["function"]["name"]), "arguments": ""}
        return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress", **told}

    def _added(self, part: Shown) -> dict[str, Any]:
        item = self._output[-1]
        if isinstance(part, dict):
            item["arguments"] = part["function"]["arguments"]
            return self._of_item("function_call_arguments.delta", delta=item["arguments"])
        if isinstance(part, Thought):
            item["content"][0]["text"] += part.text
            return self._of_item("reasoning_text.delta", content_index=0, delta=part.text)
        content, noted, self._noted = item["content"][0], self._noted, []
        content["text"] += part
        content["logprobs"] += noted
        return self._of_item("output_text.delta", content_index=0, delta=part, logprobs=noted)

    def _closed(self, done: Completion | None = None) -> Events:
        item = self._output[-1]
        item["status"] = "completed"
        if item["type"] == "function_call":
            given = {"name": item["name"], "arguments": item["arguments"]}
            return [self._of_item("function_call_arguments.done", **given), self._item_event("done", item)]
        if done is not None and finish_reason(done) != "stop":  # the answer was cut off
            item["status"] = "incomplete"
        (part,) = item["content"]
        told: dict[str, Any] = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        return [
            self._of_item(f"{part['type']}.done", content_index=0, text=part["text"], **told),
            self._of_item("content_part.done", content_index=0, part=part),
            self._item_event("done", item),
        ]

    def _last(self, done: Completion) -> Events:
        response = self._ended(done)
        return [self._event(f"response.{response['status']}", response=response)]

    def _item_event(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"response.output_item.{what}", output_index=len(self._output) - 1, item=item)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the last item."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def failure(self, error: str) -> dict[str, Any]:
        """Return the event for a text that failed."""
        return self._event("response.failed", response=_failed(self._head, "server_error", error))


def _head(service: Service, request: ResponsesRequest) -> dict[str, Any]:
    """Return a response that has just begun."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": service.name,
        "output": [],
        "usage": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "error": None,
        "incomplete_details": None,
        "metadata": {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": "auto",
        "tools": [],
        **request.model_dump(include={"tool_choice", "tools"}, exclude_none=True),
        "store": False,
    }


def _failed(head: dict[str, Any], code: str, message: str) -> dict[str, Any]:
    """Return a response that failed."""
    return {**head, "status": "failed", "error": {"code": code, "message": message}}


async def _too_long(head: dict[str, Any], refusal: TooLong) -> AsyncGenerator[bytes, None]:
    """Yield the stream for a prompt that does not fit; clients shorten the prompt only after this event."""
    yield event({"type": "response.created", "sequence_number": 0, "response": head})
    failed = _failed(head, TooLong.code, refusal.told)
    yield event({"type": "response.failed", "sequence_number": 1, "response": failed})


def _message() -> dict[str, Any]:
    """Return a message that has just begun."""
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
    return {**head, "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]}


def _reasoning() -> dict[str, Any]:
    """Return a thought that has just begun."""
    head = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "status": "in_progress", "summary": []}
    return {**head, "content": [{"type": "reasoning_text", "text": ""}], "encrypted_content": None}


@router.post("/v1/responses", responses=ANSWERS)
async def responses(body: ResponsesRequest, request: Request, service: Meant) -> Response:
    """Complete a conversation (OpenAI's responses)."""
    try:
        return await converse(service, request, body.as_chat(), partial(ResponseAnswer, request=body))
    except TooLong as refusal:
        if not body.stream:
            raise
        return EventStream(_too_long(_head(service, body), refusal), {}, ResponseAnswer.media_type)
