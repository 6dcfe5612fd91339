"""Answers in the dialects of llama.cpp and OpenAI, as one body or as the events of a stream."""

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
"""Parts of an answer: thoughts, text, and tool calls as in chats."""


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event on one line, without blanks after colons (clients match on that)."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return name.encode() + b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def project(body: dict[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Return only the named fields; a path such as ``timings/prompt_n`` remains the key of its value."""
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
    """Return OpenAI's `finish_reason` of a completion."""
    ended = "tool_calls" if called else "stop"
    return ended if done.stop_type in ("eos", "word") else "length"


def marks(*finished: Completion) -> dict[str, bool]:
    """Return the fields that mark a superseded answer, or one that a deadline ended."""
    superseded = {"superseded": True} if any(done.outcome == "superseded" for done in finished) else {}
    return superseded | ({"deadline": True} if any(done.deadline_hit for done in finished) else {})


def timings(done: Completion) -> dict[str, Any]:
    """Return the counters of one completion under llama.cpp's names, and our own."""
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
    """How an answer with one or several texts is written.

    Attributes
    ----------
    closing
        End of a stream.
    ping
        Sent while nothing is new: a comment, which clients of server-sent events ignore.
    media_type
        Content type of a stream.
    tells_superseded
        Whether the body reports that a request was superseded; otherwise that is an error.
    """

    closing, ping, media_type = b"", b": ping\n\n", "text/event-stream"
    tells_superseded = False

    def __init__(self, service: Service, request: Common, prepared: Sequence[PreparedTask]) -> None:
        self._written, self._make_reader = request.written, prepared[0].reader
        self._readers: dict[int, AnswerReader] = {}
        self._calls = Counter[int]()  # by text

    def encoded(self, body: dict[str, Any]) -> bytes:
        """Encode one event of a stream."""
        return event(body)

    def begin(self, index: int) -> Events:
        """Return the events before any text."""
        return []

    @abstractmethod
    def delta(self, delta: Delta, index: int) -> Events:
        """Return the events for the new text of one pass."""

    @abstractmethod
    def end(self, done: Completion, index: int) -> Events:
        """Return the events at the end of a text."""

    def close(self, finished: Sequence[Completion]) -> Events:
        """Return the events at the end of a stream."""
        return []

    @abstractmethod
    def whole(self, finished: Sequence[Completion]) -> dict[str, Any] | Events:
        """Return the body of an answer that is not streamed."""

    def failure(self, error: str) -> dict[str, Any]:
        """Return the event for a text that failed."""
        return {"error": {"code": 500, "message": error, "type": "server_error"}}

    def _said(self, text: str, index: int = 0, *, last: bool = False) -> list[Shown]:
        """Return the parts (thoughts, text, calls) of further characters of a text."""
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
        """Return all thoughts, all text and all calls of an answer."""
        said = self._said(done.text, index, last=True)
        calls = [part for part in said if isinstance(part, dict)]
        thought = "".join(part.text for part in said if isinstance(part, Thought))
        return thought, "".join(part for part in said if isinstance(part, str)), calls

    def _call(self, call: ToolCall, index: int) -> dict[str, Any]:
        """Return a call with an id of nine letters and digits, the only form that Mistral's templates accept."""
        self._calls[index] += 1
        arguments = json.dumps(with_texts(call.arguments, self._written), ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


class ItemizedAnswer(Answer):
    """An answer that is a list of items: thoughts, texts and calls."""

    _under_way = ""

    def delta(self, delta: Delta, index: int) -> Events:
        """Return the events for the new text of one pass."""
        return self._told(self._said(delta.text))

    def end(self, done: Completion, index: int) -> Events:
        """Return the events at the end of the text; an answer has at least one text or call."""
        rest = self._told(self._said("", last=True))
        if self._under_way in ("", "thought"):
            rest += [*(self._closed() if self._under_way else ()), *self._opened("")]
        return [*rest, *self._closed(done), *self._last(done)]

    def _told(self, said: Sequence[Shown]) -> Events:
        """Return the events for thoughts, texts and calls."""
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
        """Return the events that begin an item: a thought, a text or a call."""

    @abstractmethod
    def _added(self, part: Shown) -> dict[str, Any]:
        """Return the event that extends a thought, a text or the arguments of a call."""

    @abstractmethod
    def _closed(self, done: Completion | None = None) -> Events:
        """Return the events that end the current item."""

    @abstractmethod
    def _last(self, done: Completion) -> Events:
        """Return the events after all items."""


class LlamaAnswer(Answer):
    """An answer of `/infill` or `/completion`."""

    tells_superseded = True

    def __init__(self, service: Service, request: Common, prepared: Sequence[PreparedTask]) -> None:
        super().__init__(service, request, prepared)
        self._request, self._model, self._n_ctx = request, service.name, service.backend.n_ctx
        fields, self._prepared = request.response_fields, prepared
        shown = fields is None or "prompt" in fields
        self._prompts = [service.codec.decode(one.task.prompt_ids) if shown else "" for one in prepared]
        self._slot = request.id_slot if request.id_slot is not None else -1

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any] | Events:
        """Return the body; of several prompts, a list."""
        bodies = [self._body(done, index) for index, done in enumerate(finished)]
        return bodies if len(bodies) > 1 else bodies[0]

    def _body(self, done: Completion, index: int, *, streamed: bool = False) -> dict[str, Any]:
        """Return the body of one text, or the last event of its stream."""
        body = {
            "index": index,
            "content": "" if streamed or done.outcome != "done" else self._written(done.text),
            "tokens": done.token_ids if self._request.return_tokens and not streamed else [],
            "id_slot": self._slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": done.predicted,
            "tokens_evaluated": done.prompt_tokens,
            "generation_settings": self._settings(self._prepared[index].task.sampling.seed),
            "prompt": self._prompts[index],
            "has_new_line": "\n" in done.text,
            "truncated": self._prepared[index].truncated,
            "stop_type": done.stop_type,
            "stopping_word": done.stopping_word,
            "tokens_cached": done.prompt_tokens + max(0, len(done.token_ids) - 1),
            "timings": timings(done),
            **marks(done),
        }
        return project(body, self._request.response_fields)

    def _settings(self, seed: int) -> dict[str, Any]:
        """Return the settings of the completion; status bars of editors need `n_ctx`."""
        request = self._request
        return {
            "n_ctx": self._n_ctx,
            "n_predict": request.n_predict if request.n_predict is not None else -1,
            "temperature": request.temperature if request.temperature is not None else 0.0,
            "top_k": request.top_k or 0,
            "top_p": request.top_p if request.top_p is not None else 1.0,
            "min_p": request.min_p or 0.0,
            "seed": seed,
            "samplers": request.samplers or [],
            "stop": request.stop or [],
            "n_indent": request.n_indent or 0,
            "t_max_predict_ms": request.t_max_predict_ms or 0,
            "stream": bool(request.stream),
            "speculative": request.speculative is not False,
        }

    def delta(self, delta: Delta, index: int) -> Events:
        """Return the events for the new text of one pass."""
        tokens = list(delta.token_ids) if self._request.return_tokens else []
        text = self._written(delta.text)
        return [{"index": index, "content": text, "tokens": tokens, "stop": False, "id_slot": self._slot}]

    def end(self, done: Completion, index: int) -> Events:
        """Return the events at the end of a text."""
        return [self._body(done, index, streamed=True)]


class OpenAIAnswer(Answer):
    """An answer of OpenAI's dialect; all its bodies or events have one id.

    Parameters
    ----------
    service, request, prepared
        The model, the request and its tasks.
    chat
        Whether it answers a chat.
    echoed
        Text before the answers of each prompt.
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
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._echoed = [text for text in echoed for _ in range(self._samples)] or [""] * len(prepared)
        self._lengths = Counter[int]()  # by choice: characters sent with log-probabilities
        kind, id_ = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        self._head = {
            "id": f"{id_}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
        }

    def whole(self, finished: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
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
        """Return the log-probabilities of further tokens of a choice."""
        if self._logprobs is None:
            return None
        if self._chat:
            return self._logprobs.of_chat(noted, self._as_ids)
        body = self._logprobs.of_text(noted, self._lengths[index], self._as_ids)
        self._lengths[index] += self._logprobs.length(noted)
        return body

    def _event(self, **fields: Any) -> dict[str, Any]:
        return {**self._head, **({"object": "chat.completion.chunk"} if self._chat else {}), **fields}

    def _chunk(self, part: dict[str, Any], index: int, **fields: Any) -> dict[str, Any]:
        """Return one event of a choice."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        return self._event(choices=[choice | ({"delta": part} if self._chat else part)])

    def begin(self, index: int) -> Events:
        """Return the events before any text."""
        if self._chat:
            return [self._chunk({"role": "assistant", "content": self._begins_with}, index)]
        return [self._chunk({"text": self._echoed[index]}, index)] if self._echoed[index] else []

    def delta(self, delta: Delta, index: int) -> Events:
        """Return the events for the new text of one pass."""
        chunks = self._chunks(delta.text, index)
        if self._logprobs is not None and delta.logprobs:
            chunks = chunks or [self._chunk({"content": ""} if self._chat else {"text": ""}, index)]
            chunks[0]["choices"][0]["logprobs"] = self._log_probabilities(delta.logprobs, index)
        return chunks

    def _chunks(self, text: str, index: int, *, last: bool = False) -> Events:
        """Return the events for thoughts, texts and calls; a call has one for its name, then one for its arguments."""
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
        """Return the events at the end; the reason is in a chunk before ``[DONE]``, where some clients stop reading."""
        rest = self._chunks("", index, last=True)
        reason = finish_reason(done, called=self._calls[index] > 0)
        last = self._chunk({} if self._chat else {"text": ""}, index, finish_reason=reason)
        return [*rest, {**last, **({"deadline": True} if done.deadline_hit else {})}]

    def close(self, finished: Sequence[Completion]) -> Events:
        """Return the events at the end of a stream."""
        if not (self._include_usage and finished):
            return []
        counts = usage(finished, self._predicted, self._samples)
        return [self._event(choices=[], usage=counts, timings=timings(finished[0]))]


def usage(finished: Sequence[Completion], predicted: int, samples: int = 1) -> dict[str, Any]:
    """Count tokens, each prompt once, and how many tokens of a prediction were accepted and rejected."""
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
