"""Completion handlers: every dialect's request becomes tasks, and their completions its answer or stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrieve_spec.server import schemas, wire
from retrieve_spec.server.edits import Edit
from retrieve_spec.server.fim import FimParts
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.provenance import Provenance
from retrieve_spec.server.reading import caller
from retrieve_spec.server.service import Caller, Prepared, Service
from retrieve_spec.server.stream import EventStream, Stream, opened

_CHAT_TOKENS = 512
_OPENAI_TOKENS = 16
_FIM_TOKENS = 128
_CLIENT_CLOSED = 499


class CompletionHandlers:
    """Handlers of the dialects."""

    def __init__(self, service: Service, provenance: Provenance) -> None:
        self.service, self.provenance = service, provenance

    async def infill(self, body: schemas.InfillRequest, request: Request) -> Response:
        """Text between a prefix and a suffix (llama.cpp's dialect)."""
        who = caller(request, body)
        return await self._llama(request, body, lambda: self.service.infill(body, who))

    async def completion(self, body: schemas.CompletionRequest, request: Request) -> Response:
        """Text after a prompt (llama.cpp's dialect)."""
        wanted = body.n_predict if body.n_predict is not None else -1
        who = caller(request, body)
        return await self._llama(request, body, lambda: self._one(body.prompt, body, who, wanted))

    async def completions(self, body: schemas.OpenAICompletionRequest, request: Request) -> Response:
        """Text completions (OpenAI's dialect, with `suffix`)."""
        if body.prompt is None:
            raise Refusal(400, '"prompt" is required')
        who = caller(request, body)
        wanted = _first(body.max_tokens, body.n_predict, _OPENAI_TOKENS)
        several = isinstance(body.prompt, list) and all(isinstance(prompt, str) for prompt in body.prompt)
        prompts: Any = body.prompt if several and body.prompt else [body.prompt]
        if len(prompts) > 1:
            who = replace(who, client=None)  # one request may not replace its own other half
        return await self._openai(request, body, lambda: [self._one(prompt, body, who, wanted) for prompt in prompts])

    async def fim(self, body: schemas.OpenAICompletionRequest, request: Request) -> Response:
        """Text between a prompt and a suffix, answered like a chat (Mistral's dialect)."""
        if not isinstance(body.prompt, str):
            raise Refusal(400, '"prompt" must be a string')
        wanted = _first(body.max_tokens, body.n_predict, _FIM_TOKENS)
        parts, who = FimParts(body.prompt, body.suffix or ""), caller(request, body)
        return await self._openai(
            request, body, lambda: [self.service.fill(parts, body, who, wanted)], kind="chat.completion"
        )

    def _one(self, prompt: Any, body: schemas.Common, who: Caller, wanted: int) -> Prepared:
        suffix = getattr(body, "suffix", None)
        if suffix and isinstance(prompt, str):
            return self.service.fill(FimParts(prompt, suffix), body, who, wanted)
        return self.service.raw(prompt, body, who, wanted)

    async def chat(self, body: schemas.ChatRequest, request: Request) -> Response:
        """Chat completions (OpenAI's dialect), with predicted outputs."""
        wanted = _first(body.max_completion_tokens, body.max_tokens, body.n_predict, _CHAT_TOKENS)
        who = caller(request, body)
        who = who if who.explicit else replace(who, client=None)

        def prepare() -> list[Prepared]:
            return [self.service.raw(self.service.prompts.chat(body.messages), body, who, wanted)]

        return await self._openai(request, body, prepare, kind="chat.completion")

    async def edits(self, body: schemas.EditRequest, request: Request) -> Response:
        """The whole new text of a file, given what to change (OpenAI's edits)."""
        edit, wanted = await asyncio.to_thread(Edit.of, body), _first(body.max_tokens, body.n_predict, -1)
        who = caller(request, body)

        def prepare() -> list[Prepared]:
            return [edit.prepare(self.service, body, who, wanted)]

        return await self._openai(request, body, prepare, kind="edit")

    async def _llama(
        self,
        request: Request,
        body: schemas.InfillRequest | schemas.CompletionRequest,
        prepare: Callable[[], Prepared],
    ) -> Response:
        service, answers = self.service, list[wire.LlamaAnswer]()

        def begin(prepared: Prepared) -> None:
            answers.append(
                wire.LlamaAnswer(
                    body,
                    model=service.name,
                    n_ctx=service.backend.n_ctx,
                    prompt=lambda: service.codec.decode(prepared.task.prompt_ids),
                    truncated=prepared.truncated,
                    seed=prepared.task.sampling.seed,
                )
            )

        stream = await opened(service, lambda: [prepare()], begin)
        (prepared,), (answer,) = stream.prepared, answers
        if body.stream:
            return EventStream(self._events(stream, body, answer))
        (done,) = await self._collect(request, stream)
        prepared.remember(done)
        return JSONResponse(answer.whole(done, self.provenance.of(body, done, prepared.left)))

    async def _openai(
        self,
        request: Request,
        body: schemas.OpenAIOptions,
        prepare: Callable[[], Sequence[Prepared]],
        *,
        kind: wire.Kind = "text_completion",
    ) -> Response:
        samples = body.n or 1
        stream = await opened(self.service, lambda: [one for item in prepare() for one in item.samples(samples)])
        answer = wire.OpenAIAnswer(
            self.service.name,
            kind=kind,
            written=body.written,
            predicted=stream.prepared[0].predicted_tokens,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            samples=samples,
        )
        if body.stream:
            return EventStream(self._events(stream, body, answer))
        finished = await self._collect(request, stream)
        for item, done in zip(stream.prepared, finished, strict=True):
            item.remember(done)
        if any(done.outcome == "superseded" for done in finished):
            raise Refusal(_CLIENT_CLOSED, "a newer request of this client superseded this one", "superseded")
        extra = self.provenance.of(body, finished[0], stream.prepared[0].left)
        return JSONResponse(wire.project(answer.whole(finished, extra), body.response_fields))

    async def _events(
        self, stream: Stream, body: schemas.Common, answer: wire.LlamaAnswer | wire.OpenAIAnswer
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each pass; nothing in between, since some clients take pings for an end."""
        finished: dict[int, Completion] = {}
        try:
            for index in range(len(stream.prepared)):
                for first in answer.begin(index):
                    yield wire.event(first)
            async for said in stream:
                shown: list[dict[str, Any]] = []
                for index, event in said:
                    item = stream.prepared[index]
                    if isinstance(event, Delta):
                        shown += answer.delta(event, index)
                    elif event.outcome == "failed":
                        shown.append({"error": {"code": 500, "message": event.error, "type": "server_error"}})
                    else:
                        finished[index] = event
                        item.remember(event)
                        shown += answer.end(event, self.provenance.of(body, event, item.left), index)
                if shown:
                    yield b"".join(map(wire.event, shown))
            for last in answer.close([finished[index] for index in sorted(finished)]):
                yield wire.event(last)
            if answer.closing:
                yield answer.closing
        finally:
            stream.close()

    async def _collect(self, request: Request, stream: Stream) -> list[Completion]:
        """Completions of some tasks; all are given up when the client goes away."""
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            work: asyncio.Future[Any] = asyncio.ensure_future(stream.results())
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                raise Refusal(_CLIENT_CLOSED, "the client closed the connection", "cancelled")
            finished = list(work.result())
        finally:
            gone.cancel()
            stream.close()
        failed = next((done for done in finished if done.outcome == "failed"), None)
        if failed is not None:
            raise Refusal(500, failed.error, "server_error")
        request.state.model_s = sum(done.prompt_s + done.predict_s + done.waited_s for done in finished)
        return finished


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
