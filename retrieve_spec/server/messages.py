"""Anthropic's messages: a translation of requests to chats, and of their answers back."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrieve_spec.server.completions import CompletionHandlers
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.schemas import (
    Answer,
    ChatRequest,
    FunctionName,
    Items,
    Lenient,
    Number,
    Refusing,
    Share,
    Text,
    TextPart,
    checked,
    text_of,
)

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


class Tool(Lenient):
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
    _parts: ClassVar[tuple[str, ...]] = ("text", "tool_use", "tool_result")

    model: Any = None
    messages: Annotated[Items[Turn], Field(min_length=1, max_length=1024)]
    system: Text | Items[TextPart] | None = None
    tools: Annotated[Items[Tool], Field(max_length=256)] | None = None
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


class MessageAnswer(Answer):
    """A chat's answer in Anthropic's words; its prompt has so many tokens."""

    def __init__(self, chat: Answer, model: str, prompt_tokens: int) -> None:
        self._chat = chat
        self._open, self._index = "", -1  # of the block under way: its type, and its number
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        self._head: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def whole(self, finished: Sequence[Completion], extra: dict[str, Any]) -> dict[str, Any]:
        """The message."""
        (done,) = finished
        (choice,) = self._chat.whole(finished, extra)["choices"]
        calls, text = choice["message"].get("tool_calls", ()), choice["message"]["content"]
        content = [] if calls and not text else [{"type": "text", "text": text}]
        content += [{**_tool_use(call), "input": json.loads(call["function"]["arguments"])} for call in calls]
        return {**self._head, "content": content, **_ended(done, choice), "usage": _usage(done)}

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        self._chat.begin(index)
        return [{"type": "message_start", "message": self._head}]

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        return [event for chunk in self._chat.delta(delta, index) for event in self._said(chunk)]

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of the text."""
        chunks = self._chat.end(done, extra, index)
        rest = [event for chunk in chunks for event in self._said(chunk)]
        if self._index < 0 and not rest:
            rest = self._begun({"type": "text", "text": ""})
        return [
            *rest,
            *self._stopped(),
            {"type": "message_delta", "delta": _ended(done, chunks[-1]["choices"][0]), "usage": _usage(done)},
            {"type": "message_stop"},
        ]

    def _said(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        """Events for one of the chat's."""
        (choice,) = chunk["choices"]
        events = []
        if text := choice["delta"].get("content"):
            events += [] if self._open == "text" else self._begun({"type": "text", "text": ""})
            events.append(self._block("delta", delta={"type": "text_delta", "text": text}))
        for call in choice["delta"].get("tool_calls", ()):
            events += self._begun({**_tool_use(call), "input": {}}) if "id" in call else []
            part = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            events.append(self._block("delta", delta=part))
        return events

    def _begun(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a new block, and of the end of the one before."""
        ended, self._open = self._stopped(), block["type"]
        self._index += 1
        return [*ended, self._block("start", content_block=block)]

    def _stopped(self) -> list[dict[str, Any]]:
        return [self._block("stop")] if self._open else []

    def _block(self, what: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{what}", "index": self._index, **fields}

    def failure(self, error: str) -> dict[str, Any]:
        """The event of a text that failed."""
        return {"type": "error", "error": {"type": "api_error", "message": error}}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _ended(done: Completion, choice: dict[str, Any]) -> dict[str, Any]:
    """Why a completion ended, given a chat's choice that says whether it calls tools."""
    if choice["finish_reason"] == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": _REASONS.get(done.stop_type, "max_tokens"), "stop_sequence": done.stopping_word or None}


def _usage(done: Completion) -> dict[str, int]:
    """Token counts; what was in a cache is no input there."""
    return {
        "input_tokens": done.prompt_tokens - done.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_tokens,
        "output_tokens": done.predicted,
    }


class MessageHandlers:
    """Handlers of the dialect, over those of chats."""

    def __init__(self, chats: CompletionHandlers) -> None:
        self._chats = chats

    async def messages(self, body: MessagesRequest, request: Request) -> Response:
        """The next message of a conversation (Anthropic's dialect)."""
        model = self._chats.service.name
        return await self._chats.conversation(
            body.as_chat(), request, lambda chat, prompt_tokens: MessageAnswer(chat, model, prompt_tokens)
        )

    async def count(self, body: CountRequest) -> Response:
        """How many tokens a conversation has as a prompt."""
        chat = body.as_chat()
        ids = await asyncio.to_thread(self._chats.service.prompts.chat, chat.messages, **chat.rendering())
        return JSONResponse({"input_tokens": len(ids)})
