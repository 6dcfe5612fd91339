"""Wire format: completions as the JSON bodies that each dialect's clients read."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.schemas import Common, CompletionRequest, InfillRequest


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event on one line, without blanks after the colons (clients match on that)."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


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
        "draft_n": done.figures.drafted,
        "draft_n_accepted": done.figures.accepted,
        "passes": done.figures.passes,
        "accepted_by_source": done.figures.accepted_by_source,
        "waited_ms": 1000 * done.waited_s,
        "setup_ms": 1000 * done.setup_s,
    }


def generation_settings(request: Common, n_ctx: int, seed: int) -> dict[str, Any]:
    """The settings a completion ran with; the editors' status bars need `n_ctx`."""
    return {
        "n_ctx": n_ctx,
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


class LlamaAnswer:
    """Bodies of one answer of `/infill` or `/completion`; ``prompt`` gives its text, where the client wants it."""

    closing = b""

    def __init__(
        self,
        request: InfillRequest | CompletionRequest,
        *,
        model: str,
        n_ctx: int,
        prompt: Callable[[], str],
        truncated: bool,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self._request, self._model, self._n_ctx, self._truncated = request, model, n_ctx, truncated
        named = request.response_fields
        self._prompt = prompt() if named is None or "prompt" in named else ""
        self._slot = request.id_slot if request.id_slot is not None else -1

    def whole(self, done: Completion, extra: dict[str, Any], *, streamed: bool = False) -> dict[str, Any]:
        """The answer, or the last event of its stream."""
        body = {
            "index": 0,
            "content": "" if streamed or done.outcome != "done" else self._request.written(done.text),
            "tokens": done.token_ids if self._request.return_tokens and not streamed else [],
            "id_slot": self._slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": done.predicted,
            "tokens_evaluated": done.prompt_tokens,
            "generation_settings": generation_settings(self._request, self._n_ctx, self._seed),
            "prompt": self._prompt,
            "has_new_line": "\n" in done.text,
            "truncated": self._truncated,
            "stop_type": done.stop_type,
            "stopping_word": done.stopping_word,
            "tokens_cached": done.prompt_tokens + max(0, len(done.token_ids) - 1),
            "timings": timings(done),
            **({"superseded": True} if done.outcome == "superseded" else {}),
            **({"deadline": True} if done.deadline_hit else {}),
            **extra,
        }
        return project(body, self._request.response_fields)

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        return []

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        tokens = list(delta.token_ids) if self._request.return_tokens else []
        return [
            {
                "index": index,
                "content": self._request.written(delta.text),
                "tokens": tokens,
                "stop": False,
                "id_slot": self._slot,
            }
        ]

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of a text."""
        return [self.whole(done, extra, streamed=True)]

    def close(self, finished: Sequence[Completion]) -> list[dict[str, Any]]:
        """Events at the end of a stream."""
        return []


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


def finish_reason(done: Completion) -> str:
    """OpenAI's word for why a completion ended."""
    return "stop" if done.stop_type in ("eos", "word") else "length"


Kind = Literal["chat.completion", "text_completion", "edit"]
_ID_OF: dict[Kind, str] = {"chat.completion": "chatcmpl", "text_completion": "cmpl", "edit": "edit"}


class OpenAIAnswer:
    """The bodies of one OpenAI answer, streamed or whole; they share an id.

    Parameters
    ----------
    model
        Name of the model.
    kind
        Chat completions, text completions or edits.
    written
        Gives a text, or a part of one, the line ends of the document.
    predicted
        Tokens of the prediction that came with the request.
    include_usage
        End a stream with an event that carries usage; it has no choices, so clients must have asked for it.
    samples
        Choices for each prompt.
    """

    closing = DONE

    def __init__(
        self,
        model: str,
        *,
        kind: Kind = "text_completion",
        predicted: int = 0,
        include_usage: bool = False,
        samples: int = 1,
        written: Callable[[str], str] = str,
    ) -> None:
        self.chat = kind == "chat.completion"
        self._predicted, self._include_usage, self._samples = predicted, include_usage, samples
        self._written = written
        self._head = {
            "id": f"{_ID_OF[kind]}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, finished: Sequence[Completion], extra: dict[str, Any]) -> dict[str, Any]:
        """The answer without streaming."""
        choices = []
        for index, done in enumerate(finished):
            body: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish_reason(done)}
            if self.chat:
                body["message"] = {"role": "assistant", "content": self._written(done.text), "refusal": None}
            else:
                body["text"] = self._written(done.text)
            choices.append(body)
        marks = {"superseded": True} if any(done.outcome == "superseded" for done in finished) else {}
        if any(done.deadline_hit for done in finished):
            marks["deadline"] = True
        return {
            **self._head,
            "choices": choices,
            "usage": usage(finished, self._predicted, self._samples),
            "timings": timings(finished[0]),
            **marks,
            **extra,
        }

    def chunk(self, text: str, index: int = 0, finish: str | None = None, *, first: bool = False) -> dict[str, Any]:
        """One event of a stream."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            choice["delta"] = {**delta, "content": text} if text or first else delta
        else:
            choice["text"] = text
        head = {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head
        return {**head, "choices": [choice]}

    def begin(self, index: int = 0) -> list[dict[str, Any]]:
        """Events before any text."""
        return [self.chunk("", index, first=True)] if self.chat else []

    def delta(self, delta: Delta, index: int = 0) -> list[dict[str, Any]]:
        """Events for what one pass made certain."""
        return [self.chunk(self._written(delta.text), index)] if delta.text else []

    def end(self, done: Completion, extra: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
        """Events at the end of a text: the reason stands on a chunk before ``[DONE]``, where some clients stop."""
        marks = {"deadline": True} if done.deadline_hit else {}
        return [{**self.chunk("", index, finish=finish_reason(done)), **marks, **extra}]

    def close(self, finished: Sequence[Completion]) -> list[dict[str, Any]]:
        """Events at the end of a stream."""
        if not (self._include_usage and finished):
            return []
        head = {**self._head, "object": "chat.completion.chunk"} if self.chat else self._head
        counts = usage(finished, self._predicted, self._samples)
        return [{**head, "choices": [], "usage": counts, "timings": timings(finished[0])}]


def usage(finished: Sequence[Completion], predicted: int, samples: int = 1) -> dict[str, Any]:
    """Token counts, each prompt once; of a prediction, what was accepted and what was not."""
    prompt = sum(done.prompt_tokens for done in finished[::samples])
    completion = sum(done.predicted for done in finished)
    accepted = sum(done.figures.accepted_by_source.get("prediction", 0) for done in finished) if predicted else 0
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
