"""OpenAI's responses: a translation of requests to chats, and of their answers back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StrictBool, Tag
from starlette.requests import Request
from starlette.responses import Response

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
    ResponseFormat,
    Share,
    Spoken,
    Text,
    TextPart,
    checked,
    finish_reason,
    text_of,
)


class InputPart(TextPart):
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

    model: Any = None
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


class ResponseAnswer(Answer):
    """A chat's answer as a response."""

    def __init__(self, chat: Answer, model: str, request: ResponsesRequest) -> None:
        self._chat, self._number = chat, 0
        self._output: list[dict[str, Any]] = []
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
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": "auto",
            "tools": [],
            **request.model_dump(include={"tool_choice", "tools"}, exclude_none=True),
            "store": False,
        }

    def whole(self, finished: Sequence[Completion], extra: dict[str, Any]) -> dict[str, Any]:
        """The response."""
        (done,) = finished
        message = self._chat.whole(finished, extra)["choices"][0]["message"]
        calls = message.get("tool_calls", ())
        self._output = [_message(message["content"])] if message["content"] or not calls else []
        self._output += [_call(call, call["function"]["arguments"]) for call in calls]
        for item in self._output:
            item["status"] = "completed"
        return self._ended(done)

    def _ended(self, done: Completion) -> dict[str, Any]:
        complete, last = finish_reason(done) == "stop", self._output[-1]
        status = "completed" if complete else "incomplete"
        last["status"] = status if last["type"] == "message" else "completed"
        return {
            **self._head,
            "status": status,
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

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        self._chat.begin(index)
        head = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return [self._event("response.created", response=head), self._event("response.in_progress", response=head)]

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        return self._said(self._chat.delta(delta, index))

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of the text."""
        events = self._said(self._chat.end(done, extra, index))
        if not self._output:
            events += self._begun(_message(""))
        response = self._ended(done)
        return [*events, *self._stopped(), self._event(f"response.{response['status']}", response=response)]

    def _said(self, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Events for some of the chat's."""
        events = []
        for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
            if text := delta.get("content"):
                if not self._output or self._output[-1]["type"] != "message":
                    events += self._begun(_message(""))
                self._output[-1]["content"][0]["text"] += text
                events.append(self._of_item("output_text.delta", content_index=0, delta=text, logprobs=[]))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    events += self._begun(_call(call, ""))
                else:
                    self._output[-1]["arguments"] = given = call["function"]["arguments"]
                    events.append(self._of_item("function_call_arguments.delta", delta=given))
        return events

    def _begun(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a new item, and of the end of the one before."""
        ended = self._stopped()
        self._output.append(item)
        shown = {**item, "content": []} if item["type"] == "message" else dict(item)
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=shown)
        if item["type"] != "message":
            return [*ended, added]
        return [*ended, added, self._of_item("content_part.added", content_index=0, part=_part(""))]

    def _stopped(self) -> list[dict[str, Any]]:
        """Events at the end of the last item."""
        if not self._output:
            return []
        item = self._output[-1]
        if item["status"] == "in_progress":
            item["status"] = "completed"
        if item["type"] == "message":
            (part,) = item["content"]
            done = [
                self._of_item("output_text.done", content_index=0, text=part["text"], logprobs=[]),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            done = [self._of_item("function_call_arguments.done", **given)]
        return [*done, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]

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
