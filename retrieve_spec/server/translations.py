"""Anthropic's messages and OpenAI's responses: translations of requests to chats, and of what is said back."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Discriminator, Field, StrictBool, Tag
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrieve_spec.server.answers import Events, ItemizedAnswer, finish_reason
from retrieve_spec.server.completions import ANSWERS, converse
from retrieve_spec.server.guard import BoundedRoute, checked
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.models import Meant
from retrieve_spec.server.schemas import (
    ChatRequest,
    FunctionName,
    Items,
    Lenient,
    Number,
    Part,
    Refusing,
    ResponseFormat,
    Share,
    Spoken,
    Text,
    TextPart,
    text_of,
)
from retrieve_spec.server.service import Prepared, Service

router = APIRouter(route_class=BoundedRoute)

_REASONS = {"eos": "end_turn", "word": "stop_sequence"}


class TextBlock(TextPart):
    """A piece of text."""

    type: Literal["text"]


class ToolUse(Lenient):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]

    def as_call(self) -> dict[str, Any]:
        """The same as in a chat."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ToolResult(Lenient):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Items[TextBlock] | None = None

    def as_turn(self) -> dict[str, Any]:
        """The same as in a chat."""
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text_of(self.content)}


Block = Annotated[TextBlock | ToolUse | ToolResult, Field(discriminator="type")]


class Turn(Lenient):
    """A message."""

    role: Literal["system", "user", "assistant"]
    content: Text | Items[Block]

    def as_turns(self) -> list[dict[str, Any]]:
        """The same in a chat, where what came of each call is a turn."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [block.as_turn() for block in blocks if isinstance(block, ToolResult)]
        calls = [block.as_call() for block in blocks if isinstance(block, ToolUse)]
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        said = {"role": self.role, "content": text, **({"tool_calls": calls} if calls else {})}
        return [*results, *([said] if text or calls or not results else [])]


class MessagesTool(Lenient):
    """What a model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]

    def as_tool(self) -> dict[str, Any]:
        """The same as in a chat."""
        told = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **told, "parameters": self.input_schema}}


class ToolChoice(Lenient):
    """Which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: StrictBool | None = None

    def as_choice(self) -> str | dict[str, Any]:
        """The same as in a chat."""
        named = {"type": "function", "function": {"name": self.name or ""}}
        return named if self.type == "tool" else {"any": "required"}.get(self.type, self.type)


class CountRequest(Refusing):
    """`POST /v1/messages/count_tokens`."""

    _also: ClassVar[dict[str, tuple[Any, ...]]] = {
        "thinking": ({"type": "disabled"},),
        "mcp_servers": (),
        "container": (),
        "context_management": (),
        "output_format": (),
        "output_config": (),
    }

    messages: Annotated[Items[Turn], Field(min_length=1, max_length=1024)]
    system: Text | Items[TextPart] | None = None
    tools: Annotated[Items[MessagesTool], Field(max_length=256)] | None = None
    tool_choice: ToolChoice | None = None

    def as_chat(self, **fields: Any) -> ChatRequest:
        """The same as a chat, with further fields of its own.

        Raises
        ------
        Refusal
            400: it is none.
        """
        system, choice = text_of(self.system), self.tool_choice
        head = [{"role": "system", "content": system}] if system else []
        fields |= {
            "messages": [*head, *(turn for message in self.messages for turn in message.as_turns())],
            "tools": [tool.as_tool() for tool in self.tools or ()],
        }
        if choice is not None:
            fields |= {
                "tool_choice": choice.as_choice(),
                "parallel_tool_calls": not choice.disable_parallel_tool_use,
            }
        return checked(ChatRequest, fields)


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)]
    stop_sequences: Annotated[Items[Text], Field(max_length=256)] | None = None
    stream: StrictBool | None = None
    temperature: Number | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None

    def as_chat(self, **fields: Any) -> ChatRequest:
        """As above."""
        own = self.model_dump(include={"max_tokens", "stream", "temperature", "top_p", "top_k"})
        return super().as_chat(**own, stop=self.stop_sequences, **fields)


class MessageAnswer(ItemizedAnswer):
    """A message; its items are blocks."""

    def __init__(self, service: Service, request: ChatRequest, prepared: Sequence[Prepared]) -> None:
        super().__init__(service, request, prepared)
        self._number = -1  # of the block under way
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": service.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(prepared[0].task.prompt_ids), "output_tokens": 0},
        }

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """The message."""
        (done,) = finished
        text, calls = self._spoken(done)
        content = [] if calls and not text else [{"type": "text", "text": text}]
        content += [_tool_use(call, json.loads(call["function"]["arguments"])) for call in calls]
        return {**self._head, "content": content, **self._ended(done), "usage": _usage(done)}

    def begin(self, index: int) -> Events:
        """Events before any text."""
        return [{"type": "message_start", "message": self._head}]

    def _opened(self, part: str | dict[str, Any]) -> Events:
        self._number += 1
        if isinstance(part, str):
            return [self._block("start", content_block={"type": "text", "text": ""})]
        return [self._block("start", content_block=_tool_use(part, {})), self._given("")]

    def _added(self, part: str | dict[str, Any]) -> dict[str, Any]:
        if isinstance(part, str):
            return self._block("delta", delta={"type": "text_delta", "text": part})
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
        """Why a completion ended."""
        if finish_reason(done, called=bool(self._calls[0])) == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": _REASONS.get(done.stop_type, "max_tokens"), "stop_sequence": done.stopping_word or None}

    def failure(self, error: str) -> dict[str, Any]:
        """The event of a text that failed."""
        return {"type": "error", "error": {"type": "api_error", "message": error}}


def _tool_use(call: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}


def _usage(done: Completion) -> dict[str, int]:
    """Token counts; what was in a cache is no input there."""
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": done.predicted,
    }


@router.post("/v1/messages", responses=ANSWERS)
async def messages(body: MessagesRequest, request: Request, service: Meant) -> Response:
    """The next message of a conversation (Anthropic's dialect)."""
    return await converse(service, request, body.as_chat(), MessageAnswer)


@router.post("/v1/messages/count_tokens", responses=ANSWERS)
async def count(body: CountRequest, service: Meant) -> Response:
    """How many tokens a conversation has as a prompt."""
    chat = body.as_chat()
    ids = await asyncio.to_thread(service.prompts.chat, chat.messages, **chat.rendering())
    return JSONResponse({"input_tokens": len(ids)})


class InputPart(Part):
    """A piece of text."""

    type: Literal["input_text", "output_text"]


class MessageItem(Lenient):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Items[InputPart]

    def as_turn(self) -> dict[str, Any]:
        """The same in a chat."""
        return {"role": self.role, "content": text_of(self.content)}


class CallItem(Lenient):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text

    def as_turn(self) -> dict[str, Any]:
        """The same in a chat."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class OutputItem(Lenient):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Items[InputPart]

    def as_turn(self) -> dict[str, Any]:
        """The same in a chat."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}


def _kind(item: Any) -> Any:
    return (item.get("type") or "message") if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="input_item",
        custom_error_message="only items of type message, function_call and function_call_output are served",
    ),
]


class FunctionTool(Lenient):
    """A function that may be called."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None

    def as_tool(self) -> dict[str, Any]:
        """The same in a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class NamedTool(Lenient):
    """The function that is to be called."""

    type: Literal["function"]
    name: Text


class TextOptions(Spoken):
    """What the text is to be."""

    format: ResponseFormat | None = None


class ResponsesRequest(Refusing):
    """`POST /v1/responses`."""

    _also: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "background": (False,),
        "truncation": ("disabled",),
        "include": (["reasoning.encrypted_content"],),
    }

    input: Text | Annotated[Items[InputItem], Field(min_length=1, max_length=1024)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    stream: StrictBool | None = None
    temperature: Number | None = None
    top_p: Share | None = None
    text: TextOptions | None = None
    tools: Annotated[Items[FunctionTool], Field(max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None

    def as_chat(self) -> ChatRequest:
        """The same as a chat.

        Raises
        ------
        Refusal
            400: it is none.
        """
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        wanted = None if self.text is None or self.text.format is None else self.text.format.model_dump(by_alias=True)
        fields = {
            **self.model_dump(include={"stream", "temperature", "top_p", "parallel_tool_calls"}),
            "messages": self._turns(),
            "max_tokens": self.max_output_tokens,
            "response_format": wanted,
            "tools": [tool.as_tool() for tool in self.tools or ()],
            "tool_choice": choice,
        }
        return checked(ChatRequest, fields)

    def _turns(self) -> list[dict[str, Any]]:
        """The conversation as a chat's messages; calls stand in the turn whose text they follow."""
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for item in self.input:
            turn, last = item.as_turn(), turns[-1] if turns else {}
            if isinstance(item, CallItem) and last.get("role") == "assistant":
                turns[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *turn["tool_calls"]]}
            else:
                turns.append(turn)
        return turns


class ResponseAnswer(ItemizedAnswer):
    """A response; its items are messages and calls."""

    def __init__(
        self, service: Service, chat: ChatRequest, prepared: Sequence[Prepared], request: ResponsesRequest
    ) -> None:
        super().__init__(service, chat, prepared)
        self._number = 0
        self._output: Events = []
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
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

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """The response: that of its stream's last event."""
        (done,) = finished
        self.delta(Delta(done.text, ()), 0)
        response: dict[str, Any] = self.end(done, 0)[-1]["response"]
        return response

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
        """Events before any text."""
        head = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return [self._event("response.created", response=head), self._event("response.in_progress", response=head)]

    def _opened(self, part: str | dict[str, Any]) -> Events:
        item = _message("") if isinstance(part, str) else _call(part, "")
        self._output.append(item)
        shown = {**item, "content": []} if isinstance(part, str) else dict(item)
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=shown)
        begun = [self._of_item("content_part.added", content_index=0, part=_part(""))] if isinstance(part, str) else []
        return [added, *begun]

    def _added(self, part: str | dict[str, Any]) -> dict[str, Any]:
        if isinstance(part, str):
            self._output[-1]["content"][0]["text"] += part
            return self._of_item("output_text.delta", content_index=0, delta=part, logprobs=[])
        self._output[-1]["arguments"] = given = part["function"]["arguments"]
        return self._of_item("function_call_arguments.delta", delta=given)

    def _closed(self, done: Completion | None = None) -> Events:
        item = self._output[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            if done is not None and finish_reason(done) != "stop":  # with it the answer was cut off
                item["status"] = "incomplete"
            (part,) = item["content"]
            ended = [
                self._of_item("output_text.done", content_index=0, text=part["text"], logprobs=[]),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            ended = [self._of_item("function_call_arguments.done", **given)]
        return [*ended, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]

    def _last(self, done: Completion) -> Events:
        response = self._ended(done)
        return [self._event(f"response.{response['status']}", response=response)]

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the last item."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(f"response.{kind}", **place, **fields)

    def failure(self, error: str) -> dict[str, Any]:
        """The event of a text that failed."""
        return self._event("error", code="server_error", message=error, param=None)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message(text: str) -> dict[str, Any]:
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
    return {**head, "status": "in_progress", "content": [_part(text)]}


def _call(call: dict[str, Any], arguments: str) -> dict[str, Any]:
    told = {"call_id": call["id"], "name": call["function"]["name"], "arguments": arguments}
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress", **told}


@router.post("/v1/responses", responses=ANSWERS)
async def responses(body: ResponsesRequest, request: Request, service: Meant) -> Response:
    """What the model answers (OpenAI's responses)."""
    return await converse(service, request, body.as_chat(), partial(ResponseAnswer, request=body))
