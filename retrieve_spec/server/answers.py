"""Answers as the clients of llama.cpp's and OpenAI's dialects read them, whole or as the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.reading import AnswerReader, Thought
from retrieve_spec.server.sampling import TokenLogProb
from retrieve_spec.server.schemas import ChatRequest, Common, OpenAIOptions
from retrieve_spec.server.service import PreparedTask, Service
from retrieve_spec.server.text import with_texts
from retrieve_spec.server.tools import ToolCall

Events = list[dict[str, Any]]
Shown = Thought | str | dict[str, Any]
"""What an answer is made of: thoughts, text, and calls of tools as chats have them."""


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event on one line, without blanks after the colons (clients match on that), named by its type."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return name.encode() + b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def project(body: dict[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Only the named fields; a path such as ``timings/prompt_n`` stays the key of its value."""
    if fields is None:
        return body
    out: dict[str, Any] = {}
    for path in fields:
        value: Any = body
        for part in path.split("/"):
            if not isinstance(value, dict) or part not in value:
                break
            value = value[part]
        else:
            out[path] = value
    return out


def finish_reason(done: Completion, *, called: bool = False) -> str:
    """OpenAI's word for why a completion ended, given whether it calls tools."""
    ended = "tool_calls" if called else "stop"
    return ended if done.stop_type in ("eos", "word") else "length"


def marks(*finished: Completion) -> dict[str, bool]:
    """What is said of texts that were given up, or ended by a deadline."""
    superseded = {"superseded": True} if any(done.outcome == "superseded" for done in finished) else {}
    return superseded | ({"deadline": True} if any(done.deadline_hit for done in finished) else {})


def timings(done: Completion) -> dict[str, Any]:
    """Counters of one completion under llama.cpp's names, and ours."""
    evaluated = max(0, done.prompt_tokens - done.cached_tokens)
    predicted = done.predicted
    prompt_ms, predicted_ms = 1000 * done.prompt_s, 1000 * done.predict_s
    return {
        "cache_n": done.cached_tokens,
        "prompt_n": evaluated,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / evaluated if evaluated else 0.0,
        "prompt_per_second": 1000 * evaluated / prompt_ms if prompt_ms else 0.0,
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / predicted if predicted else 0.0,
        "predicted_per_second": 1000 * predicted / predicted_ms if predicted_ms else 0.0,
        "draft_n": done.report.nodes,
        "draft_n_accepted": sum(done.report.accepted_by_source.values()),
        "passes": done.report.passes,
        "accepted_by_source": done.report.accepted_by_source,
        "waited_ms": 1000 * done.waited_s,
        "setup_ms": 1000 * done.setup_s,
    }


class Answer(ABC):
    """How an answer of one or several texts is written.

    Attributes
    ----------
    closing
        What a stream ends with.
    ping
        What a stream has while there is nothing to say: a comment, which clients of server-sent events skip.
    media_type
        What a stream is.
    tells_superseded
        Whether the body says so of a request that was replaced, which is an error otherwise.
    """

    closing, ping, media_type = b"", b": ping\n\n", "text/event-stream"
    tells_superseded = False

    def __init__(self, service: Service, request: Common, prepared: Sequence[PreparedTask]) -> None:
        self._written, self._make_reader = request.written, prepared[0].reader
        self._readers: dict[int, AnswerReader] = {}
        self._calls = Counter[int]()  # by text

    def encoded(self, body: dict[str, Any]) -> bytes:
        """One event of a stream."""
        return event(body)

    def begin(self, index: int) -> Events:
        """Events before any text."""
        return []

    @abstractmethod
    def delta(self, delta: Delta, index: int) -> Events:
        """Events for what one pass made certain."""

    @abstractmethod
    def end(self, done: Completion, index: int) -> Events:
        """Events at the end of a text."""

    def close(self, finished: Sequence[Completion]) -> Events:
        """Events at the end of a stream."""
        return []

    @abstractmethod
    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """The answer without streaming."""

    def failure(self, error: str) -> dict[str, Any]:
        """The event of a text that failed."""
        return {"error": {"code": 500, "message": error, "type": "server_error"}}

    def _said(self, text: str, index: int = 0, *, last: bool = False) -> list[Shown]:
        """What further characters of a text come to."""
        if self._make_reader is None:
            return [self._written(text)] if text else []
        if index not in self._readers:
            self._readers[index] = self._make_reader()
        reader = self._readers[index]
        return [self._shown(part, index) for part in [*reader.feed(text), *(reader.finish() if last else ())]]

    def _shown(self, part: Thought | str | ToolCall, index: int) -> Shown:
        if isinstance(part, ToolCall):
            return self._call(part, index)
        return Thought(self._written(part.text)) if isinstance(part, Thought) else self._written(part)

    def _spoken(self, done: Completion, index: int = 0) -> tuple[str, str, Events]:
        """All that a text thinks, all that it says, and all calls in it."""
        said = self._said(done.text, index, last=True)
        calls = [part for part in said if isinstance(part, dict)]
        thought = "".join(part.text for part in said if isinstance(part, Thought))
        return thought, "".join(part for part in said if isinstance(part, str)), calls

    def _call(self, call: ToolCall, index: int) -> dict[str, Any]:
        """A call, with an id of nine letters and digits: templates of Mistral's models take no other."""
        self._calls[index] += 1
        arguments = json.dumps(with_texts(call.arguments, self._written), ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


class ItemizedAnswer(Answer):
    """An answer that is a row of items, each a thought, text or a call, which follow one another in a stream, too."""

    _under_way = ""

    def delta(self, delta: Delta, index: int) -> Events:
        """Events for what one pass made certain."""
        return self._told(self._said(delta.text))

    def end(self, done: Completion, index: int) -> Events:
        """Events at the end of the text, which is one item of text or a call at least."""
        rest = self._told(self._said("", last=True))
        if self._under_way in ("", "thought"):
            rest += [*(self._closed() if self._under_way else ()), *self._opened("")]
        return [*rest, *self._closed(done), *self._last(done)]

    def _told(self, said: Sequence[Shown]) -> Events:
        """Events for thoughts, texts and calls."""
        events = Events()
        for part in said:
            kind = "text" if isinstance(part, str) else "thought" if isinstance(part, Thought) else "call"
            if kind == "call" or self._under_way != kind:
                events += self._closed() if self._under_way else []
                events += self._opened(part)
            self._under_way = kind
            events.append(self._added(part))
        return events

    @abstractmethod
    def _opened(self, part: Shown) -> Events:
        """Events of an item that begins with a thought or a text, or is a call."""

    @abstractmethod
    def _added(self, part: Shown) -> dict[str, Any]:
        """The event of what a thought or a text goes on with, or of what a call is given."""

    @abstractmethod
    def _closed(self, done: Completion | None = None) -> Events:
        """Events at the end of the item under way, with which the whole text may be done."""

    @abstractmethod
    def _last(self, done: Completion) -> Events:
        """Events after all items."""


class LlamaAnswer(Answer):
    """Bodies of one answer of `/infill` or `/completion`."""

    tells_superseded = True

    def __init__(self, service: Service, request: Common, prepared: Sequence[PreparedTask]) -> None:
        super().__init__(service, request, prepared)
        (self._prepared,) = prepared
        self._request, self._model, self._n_ctx = request, service.name, service.backend.n_ctx
        fields, ids = request.response_fields, self._prepared.task.prompt_ids
        self._prompt = service.codec.decode(ids) if fields is None or "prompt" in fields else ""
        self._slot = request.id_slot if request.id_slot is not None else -1

    def whole(self, finished: Sequence[Completion], *, streamed: bool = False) -> dict[str, Any]:
        """The answer, or the last event of its stream."""
        (done,) = finished
        body = {
            "index": 0,
            "content": "" if streamed or done.outcome != "done" else self._written(done.text),
            "tokens": done.token_ids if self._request.return_tokens and not streamed else [],
            "id_slot": self._slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": done.predicted,
            "tokens_evaluated": done.prompt_tokens,
            "generation_settings": self._settings(),
            "prompt": self._prompt,
            "has_new_line": "\n" in done.text,
            "truncated": self._prepared.truncated,
            "stop_type": done.stop_type,
            "stopping_word": done.stopping_word,
            "tokens_cached": done.prompt_tokens + max(0, len(done.token_ids) - 1),
            "timings": timings(done),
            **marks(done),
        }
        return project(body, self._request.response_fields)

    def _settings(self) -> dict[str, Any]:
        """The settings that the completion ran with; the editors' status bars need `n_ctx`."""
        request = self._request
        return {
            "n_ctx": self._n_ctx,
            "n_predict": request.n_predict if request.n_predict is not None else -1,
            "temperature": request.temperature if request.temperature is not None else 0.0,
            "top_k": request.top_k or 0,
            "top_p": request.top_p if request.top_p is not None else 1.0,
            "min_p": request.min_p or 0.0,
            "seed": self._prepared.task.sampling.seed,
            "samplers": request.samplers or [],
            "stop": request.stop or [],
            "n_indent": request.n_indent or 0,
            "t_max_predict_ms": request.t_max_predict_ms or 0,
            "stream": bool(request.stream),
            "speculative": request.speculative is not False,
        }

    def delta(self, delta: Delta, index: int) -> Events:
        """Events for what one pass made certain."""
        tokens = list(delta.token_ids) if self._request.return_tokens else []
        text = self._written(delta.text)
        return [{"index": index, "content": text, "tokens": tokens, "stop": False, "id_slot": self._slot}]

    def end(self, done: Completion, index: int) -> Events:
        """Events at the end of a text."""
        return [self.whole([done], streamed=True)]


class OpenAIAnswer(Answer):
    """The bodies of one OpenAI answer, streamed or whole; they share an id.

    Parameters
    ----------
    service, request, prepared
        The model, and what is answered.
    chat
        Whether it is a chat's.
    echoed
        What stands in front of the texts, by prompt.
    """

    closing = b"data: [DONE]\n\n"

    def __init__(
        self, service: Service, request: OpenAIOptions, prepared: Sequence[PreparedTask],
        chat: bool = False, echoed: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(service, request, prepared)
        self._chat, self._samples, self._fields = chat, request.n or 1, request.response_fields
        self._predicted = prepared[0].predicted_tokens
        self._begins_with = None if isinstance(request, ChatRequest) and request.offered else ""
        self._include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._logprobs = None if request.wanted_logprobs() is None else service.logprobs
        self._echoed = [text for text in echoed for _ in range(self._samples)] or [""] * len(prepared)
        self._lengths = Counter[int]()  # by choice: characters that were told with log-probabilities
        kind, id_ = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self._head = {
            "id": f"{id_}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
        }

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """The answer without streaming."""
        choices = []
        for index, done in enumerate(finished):
            thought, text, calls = self._spoken(done, index)
            body: dict[str, Any] = {"index": index}
            body["logprobs"] = self._log_probabilities(done.logprobs, index)
            body["finish_reason"] = finish_reason(done, called=bool(calls))
            if self._chat:
                body["message"] = {"role": "assistant", "content": (text or None) if calls else text, "refusal": None}
                body["message"] |= {"reasoning_content": thought} if thought else {}
                body["message"] |= {"tool_calls": calls} if calls else {}
            else:
                body["text"] = self._echoed[index] + text
            choices.append(body)
        counts, spent = usage(finished, self._predicted, self._samples), timings(finished[0])
        answer = {**self._head, "choices": choices, "usage": counts, "timings": spent, **marks(*finished)}
        return project(answer, self._fields)

    def _log_probabilities(self, noted: Sequence[TokenLogProb], index: int) -> dict[str, Any] | None:
        """What was noted of further tokens of a choice."""
        if self._logprobs is None:
            return None
        if self._chat:
            return self._logprobs.of_chat(noted)
        body = self._logprobs.of_text(noted, self._lengths[index])
        self._lengths[index] += sum(map(len, body["tokens"]))
        return body

    def _event(self, **fields: Any) -> dict[str, Any]:
        return {**self._head, **({"object": "chat.completion.chunk"} if self._chat else {}), **fields}

    def _chunk(self, part: dict[str, Any], index: int, **fields: Any) -> dict[str, Any]:
        """One event about a choice."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        return self._event(choices=[choice | ({"delta": part} if self._chat else part)])

    def begin(self, index: int) -> Events:
        """Events before any text."""
        if self._chat:
            return [self._chunk({"role": "assistant", "content": self._begins_with}, index)]
        return [self._chunk({"text": self._echoed[index]}, index)] if self._echoed[index] else []

    def delta(self, delta: Delta, index: int) -> Events:
        """Events for what one pass made certain."""
        chunks = self._chunks(delta.text, index)
        if self._logprobs is not None and delta.logprobs:
            chunks = chunks or [self._chunk({"content": ""} if self._chat else {"text": ""}, index)]
            chunks[0]["choices"][0]["logprobs"] = self._log_probabilities(delta.logprobs, index)
        return chunks

    def _chunks(self, text: str, index: int, *, last: bool = False) -> Events:
        """Events for thoughts, texts and calls: of a call its name first, then its arguments."""
        first, parts = self._calls[index], list[dict[str, Any]]()
        for said in self._said(text, index, last=last):
            if isinstance(said, str):
                parts.append({"content" if self._chat else "text": said})
            elif isinstance(said, Thought):
                parts.append({"reasoning_content": said.text})
            else:
                name, arguments = said["function"]["name"], said["function"]["arguments"]
                parts.append({"tool_calls": [{"index": first, **said, "function": {"name": name, "arguments": ""}}]})
                parts.append({"tool_calls": [{"index": first, "function": {"arguments": arguments}}]})
                first += 1
        return [self._chunk(part, index) for part in parts]

    def end(self, done: Completion, index: int) -> Events:
        """Events at the end of a text: the reason stands on a chunk before ``[DONE]``, where some clients stop."""
        rest = self._chunks("", index, last=True)
        reason = finish_reason(done, called=self._calls[index] > 0)
        last = self._chunk({} if self._chat else {"text": ""}, index, finish_reason=reason)
        return [*rest, {**last, **({"deadline": True} if done.deadline_hit else {})}]

    def close(self, finished: Sequence[Completion]) -> Events:
        """Events at the end of a stream."""
        if not (self._include_usage and finished):
            return []
        counts = usage(finished, self._predicted, self._samples)
        return [self._event(choices=[], usage=counts, timings=timings(finished[0]))]


def usage(finished: Sequence[Completion], predicted: int, samples: int = 1) -> dict[str, Any]:
    """Token counts, each prompt once; of a prediction, what was accepted and what was not."""
    prompt = sum(done.prompt_tokens for done in finished[::samples])
    completion = sum(done.predicted for done in finished)
    accepted = sum(done.report.accepted_by_source.get("prediction", 0) for done in finished) if predicted else 0
    predicted *= len(finished)
    accepted = min(accepted, predicted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in finished[::samples])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, predicted - accepted),
        },
    }
