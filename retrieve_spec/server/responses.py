"""OpenAI's responses: a translation of requests to chats, and of their answers back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from retrieve_spec.server.completions import CompletionHandlers
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.schemas import (
    UNSUPPORTED,
    Answer,
    ChatRequest,
    Items,
    Message,
    Number,
    Refusing,
    ResponseFormat,
    Share,
    Spoken,
    Text,
    TextPart,
    finish_reason,
)

_PLACE = {"output_index": 0, "content_index": 0}


class InputPart(TextPart):
    """A piece of text."""

    type: Literal["input_text", "output_text"]


class InputItem(Message):
    """A message."""

    content: Text | Items[InputPart]  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _is_served(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("type", "message") != "message":
            given = {"kind": str(fields["type"])[:40]}
            raise PydanticCustomError(UNSUPPORTED, "not served here: input of type {kind}; leave it out", given)
        return fields


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

    model: Any = None
    input: Text | Annotated[Items[InputItem], Field(min_length=1, max_length=1024)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    stream: StrictBool | None = None
    temperature: Number | None = None
    top_p: Share | None = None
    text: TextOptions | None = None

    def as_chat(self) -> ChatRequest:
        """The same as a chat."""
        said = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        turns = [{"role": message.role, "content": message.as_text()} for message in said]
        if self.instructions:
            turns.insert(0, {"role": "system", "content": self.instructions})
        fields = self.model_dump(include={"stream", "temperature", "top_p"})
        wanted = None if self.text is None or self.text.format is None else self.text.format.model_dump(by_alias=True)
        return ChatRequest.model_validate(
            {**fields, "messages": turns, "max_tokens": self.max_output_tokens, "response_format": wanted}
        )


class ResponseAnswer(Answer):
    """A chat's answer as a response."""

    def __init__(self, chat: Answer, model: str, request: ResponsesRequest) -> None:
        self._chat, self._text, self._number = chat, "", 0
        self._item: dict[str, Any] = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {**self._item, "status": status, "content": [_part(text)]}

    def whole(self, finished: Sequence[Completion], extra: dict[str, Any]) -> dict[str, Any]:
        """The response."""
        (done,) = finished
        return self._ended(done, self._chat.whole(finished, extra)["choices"][0]["message"]["content"])

    def _ended(self, done: Completion, text: str) -> dict[str, Any]:
        complete = finish_reason(done) == "stop"
        status = "completed" if complete else "incomplete"
        return {
            **self._head,
            "status": status,
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": [self._message(text, status)],
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

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        head = {**self._head, "status": "in_progress", "output": [], "usage": None}
        item = {**self._item, "status": "in_progress", "content": []}
        return [
            self._event("response.created", response=head),
            self._event("response.in_progress", response=head),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", item_id=item["id"], **_PLACE, part=_part("")),
        ]

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        texts = [chunk["choices"][0]["delta"].get("content") for chunk in self._chat.delta(delta, index)]
        said = "".join(text for text in texts if text)
        self._text += said
        place = {"item_id": self._item["id"], **_PLACE}
        return [self._event("response.output_text.delta", **place, delta=said, logprobs=[])] if said else []

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of the text."""
        place, response = {"item_id": self._item["id"], **_PLACE}, self._ended(done, self._text)
        return [
            self._event("response.output_text.done", **place, text=self._text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_part(self._text)),
            self._event("response.output_item.done", output_index=0, item=response["output"][0]),
            self._event(f"response.{response['status']}", response=response),
        ]

    def failure(self, error: str) -> dict[str, Any]:
        """The event of a text that failed."""
        return self._event("error", code="server_error", message=error, param=None)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseHandlers:
    """The handler of the dialect, over those of chats."""

    def __init__(self, chats: CompletionHandlers) -> None:
        self._chats = chats

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """What the model answers (OpenAI's responses)."""
        model = self._chats.service.name
        return await self._chats.conversation(
            body.as_chat(), request, lambda chat, _: ResponseAnswer(chat, model, body)
        )
