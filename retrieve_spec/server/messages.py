"""Anthropic's messages: a translation of requests to chats, and of their answers back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrieve_spec.server.completions import CompletionHandlers
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.schemas import (
    Answer,
    ChatRequest,
    Items,
    Message,
    Number,
    Refusing,
    Share,
    Spoken,
    Text,
    TextPart,
)
from retrieve_spec.server.text import with_line_feeds

_REASONS = {"eos": "end_turn", "word": "stop_sequence"}


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

    model: Any = None
    messages: Annotated[Items[Message], Field(min_length=1, max_length=1024)]
    system: Text | Items[TextPart] | None = None

    def turns(self) -> list[dict[str, Any]]:
        """The conversation as a chat's messages.

        Raises
        ------
        Refusal
            400: an answer has been begun.
        """
        said = [{"role": message.role, "content": message.as_text()} for message in self.messages]
        if said[-1]["role"] == "assistant":
            raise Refusal(400, "the last message is the assistant's: answers that have been begun are not served here")
        system = Spoken(content=self.system).as_text()
        return [{"role": "system", "content": system}, *said] if system else said


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)]
    stop_sequences: Annotated[Items[Text], Field(max_length=256)] | None = None
    stream: StrictBool | None = None
    temperature: Number | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None

    def as_chat(self) -> ChatRequest:
        """The same as a chat."""
        fields = self.model_dump(include={"max_tokens", "stream", "temperature", "top_p", "top_k"})
        return ChatRequest.model_validate({**fields, "messages": self.turns(), "stop": self.stop_sequences})


class MessageAnswer(Answer):
    """A chat's answer in Anthropic's words; its prompt has so many tokens."""

    def __init__(self, chat: Answer, model: str, prompt_tokens: int) -> None:
        self._chat = chat
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
        text = self._chat.whole(finished, extra)["choices"][0]["message"]["content"]
        return {**self._head, "content": [{"type": "text", "text": text}], **_ended(done), "usage": _usage(done)}

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [{"type": "message_start", "message": self._head}, block]

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        texts = [chunk["choices"][0]["delta"].get("content") for chunk in self._chat.delta(delta, index)]
        return [
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
            for text in texts
            if text
        ]

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of the text."""
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": _ended(done), "usage": _usage(done)},
            {"type": "message_stop"},
        ]

    def failure(self, error: str) -> dict[str, Any]:
        """The event of a text that failed."""
        return {"type": "error", "error": {"type": "api_error", "message": error}}


def _ended(done: Completion) -> dict[str, Any]:
    """Why a completion ended."""
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
        turns = [Message.model_validate(turn) for turn in with_line_feeds(body.turns())]
        ids = await asyncio.to_thread(self._chats.service.prompts.chat, turns)
        return JSONResponse({"input_tokens": len(ids)})
