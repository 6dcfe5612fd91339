"""Completion handlers: every dialect's request becomes tasks, and their completions its answer or stream."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from retrieve_spec.server import schemas
from retrieve_spec.server.guard import Refusal, given_key
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.prompts import FimParts
from retrieve_spec.server.queueing import QueueClosedError, QueueFullError
from retrieve_spec.server.schemas import EditRequest, Prediction
from retrieve_spec.server.service import Caller, Prepared, Service

_OPENAI_TOKENS = 16
_FIM_TOKENS = 128
_CLIENT_CLOSED = 499


class CompletionHandlers:
    """Handlers of the dialects."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def infill(self, body: schemas.InfillRequest, request: Request) -> Response:
        """Text between a prefix and a suffix (llama.cpp's dialect)."""
        who = caller(request, body)
        return await self._llama(request, body, lambda: self.service.infill(body, who))

    async def completion(self, body: schemas.CompletionRequest, request: Request) -> Response:
        """Text after a prompt (llama.cpp's dialect)."""
        wanted = _first(body.n_predict, body.max_tokens, -1)
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
        echoed = [self._text_of(prompt) for prompt in prompts] if body.echo else []
        return await self._openai(
            request, body, lambda: [self._one(prompt, body, who, wanted) for prompt in prompts], echoed=echoed
        )

    def _text_of(self, prompt: str | list[int]) -> str:
        """A prompt as its client may read it."""
        return prompt if isinstance(prompt, str) else self.service.codec.decode(prompt)

    async def fim(self, body: schemas.OpenAICompletionRequest, request: Request) -> Response:
        """Text between a prompt and a suffix, answered like a chat (Mistral's dialect)."""
        if not isinstance(body.prompt, str) or body.echo:
            raise Refusal(400, '"prompt" must be a string, and "echo" left out')
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
        return await self.conversation(body, request)

    async def conversation(
        self, body: schemas.ChatRequest, request: Request, translate: Translate | None = None
    ) -> Response:
        """What a model says in a conversation; `translate` makes another dialect of the answer."""
        wanted = _first(body.max_completion_tokens, body.max_tokens, body.n_predict, -1)
        who = caller(request, body)
        who = who if who.explicit else replace(who, client=None)

        def prepare() -> list[Prepared]:
            prompt = self.service.prompts.chat(body.messages, **body.rendering())
            prepared = self.service.raw(prompt, body, who, wanted)
            return [replace(prepared, parser=self.service.call_parser(body))]

        return await self._openai(request, body, prepare, kind="chat.completion", translate=translate)

    async def edits(self, body: schemas.EditRequest, request: Request) -> Response:
        """The whole new text of a file, given what to change (OpenAI's edits)."""
        wanted, who = _first(body.max_tokens, body.n_predict, -1), caller(request, body)
        return await self._openai(request, body, lambda: [edit_task(self.service, body, who, wanted)], kind="edit")

    async def _llama(
        self,
        request: Request,
        body: schemas.InfillRequest | schemas.CompletionRequest,
        prepare: Callable[[], Prepared],
    ) -> Response:
        service = self.service
        stream = await opened(service, lambda: [prepare()])
        (prepared,) = stream.prepared
        answer = schemas.LlamaAnswer(
            body,
            model=service.name,
            n_ctx=service.backend.n_ctx,
            prompt=lambda: service.codec.decode(prepared.task.prompt_ids),
            truncated=prepared.truncated,
            seed=prepared.task.sampling.seed,
        )
        if body.stream:
            return EventStream(self._events(stream, body, answer))
        (done,) = await self._collect(request, stream)
        return JSONResponse(answer.whole(done, await self._places(body, done, prepared)))

    async def _openai(
        self,
        request: Request,
        body: schemas.OpenAIOptions,
        prepare: Callable[[], Sequence[Prepared]],
        *,
        kind: schemas.Kind = "text_completion",
        translate: Translate | None = None,
        echoed: Sequence[str] = (),
    ) -> Response:
        samples = body.n or 1
        stream = await opened(self.service, lambda: [one for item in prepare() for one in item.samples(samples)])
        answer: schemas.Answer = schemas.OpenAIAnswer(
            self.service.name,
            kind=kind,
            written=body.written,
            predicted=stream.prepared[0].predicted_tokens,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            samples=samples,
            parser=stream.prepared[0].parser,
            logprobs=None if body.wanted_logprobs() is None else self.service.logprobs,
            echoed=echoed,
        )
        if translate is not None:
            answer = translate(answer, len(stream.prepared[0].task.prompt_ids))
        if body.stream:
            return EventStream(self._events(stream, body, answer))
        finished = await self._collect(request, stream)
        if any(done.outcome == "superseded" for done in finished):
            raise Refusal(_CLIENT_CLOSED, "a newer request of this client superseded this one", "superseded")
        extra = await self._places(body, finished[0], stream.prepared[0])
        return JSONResponse(schemas.project(answer.whole(finished, extra), body.response_fields))

    async def _places(self, body: schemas.Common, done: Completion, prepared: Prepared) -> dict[str, Any]:
        """Where the lines of a completion stand, looked for in a thread, {} where that was not asked for."""
        if not body.provenance:
            return {}
        return await asyncio.to_thread(self.service.provenance.of, done, prepared.left)

    async def _events(
        self, stream: Stream, body: schemas.Common, answer: schemas.LlamaAnswer | schemas.Answer
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each pass, and comments while there is nothing to say."""
        finished: dict[int, Completion] = {}
        stream.ping_s = self.service.config.sse_ping_s or None
        try:
            for index in range(len(stream.prepared)):
                for first in answer.begin(index):
                    yield schemas.event(first)
            async for said in stream:
                shown: list[dict[str, Any]] = []
                for index, event in said:
                    if isinstance(event, Delta):
                        shown += answer.delta(event, index)
                    elif event.outcome == "failed":
                        shown.append(answer.failure(event.error))
                    else:
                        finished[index] = event
                        shown += answer.end(event, await self._places(body, event, stream.prepared[index]), index)
                if shown or not said:
                    yield b"".join(map(schemas.event, shown)) or _PING
            for last in answer.close([finished[index] for index in sorted(finished)]):
                yield schemas.event(last)
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
        return finished


Translate = Callable[[schemas.Answer, int], schemas.Answer]
"""Makes another dialect of a chat's answer, given the tokens of its prompt."""


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_HEADERS = {"Cache-Control": "no-store", "Connection": "keep-alive", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Server-sent events that a generator makes; it is closed at the end, or where the client goes away."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=_HEADERS, media_type="text/event-stream")
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head and every event."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.events.aclose()


_PING = b": ping\n\n"
"""A comment, which clients of server-sent events skip."""
Said = tuple[int, Delta | Completion]
"""What the queue says, and the number of the task that it is about."""


class Stream:
    """What the queue says about the tasks of a request: all that has come since the last look.

    Attributes
    ----------
    ping_s
        Seconds in which nothing was said of which it tells with an empty list; None for never.
    prepared
        The tasks that have begun.
    """

    ping_s: float | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._said: deque[Said] = deque()
        self._told = asyncio.Event()
        self._leave: list[Callable[[], None]] = []
        self.prepared: list[Prepared] = []

    def begin(self, service: Service, prepared: Prepared) -> None:
        """Hand a task to the queue.

        Raises
        ------
        Refusal
            503: it takes no more.
        """
        number = len(self.prepared)

        def sink(event: Delta | Completion) -> None:
            self._said.append((number, event))
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._told.set)

        try:
            self._leave.append(service.queue.submit(prepared.task, sink))
        except (QueueFullError, QueueClosedError) as error:
            raise Refusal(503, str(error), "overloaded") from error
        self.prepared.append(prepared)

    async def __aiter__(self) -> AsyncIterator[list[Said]]:
        left = len(self.prepared)
        while left:
            try:
                async with asyncio.timeout(self.ping_s):
                    await self._told.wait()
            except TimeoutError:
                yield []
                continue
            self._told.clear()
            said = [self._said.popleft() for _ in range(len(self._said))]
            left -= sum(isinstance(event, Completion) for _, event in said)
            if said:
                yield said

    async def results(self) -> list[Completion]:
        """The completions, when all are there."""
        done = {number: event async for said in self for number, event in said if isinstance(event, Completion)}
        return [done[number] for number in range(len(self.prepared))]

    def close(self) -> None:
        """Give the tasks up (no effect on those that are done)."""
        for leave in self._leave:
            leave()


async def opened(service: Service, prepare: Callable[[], Sequence[Prepared]]) -> Stream:
    """The stream of tasks that a thread prepares and hands to the queue, which need not wait for the event loop.

    Raises
    ------
    Refusal
        503: the queue takes no more of them; and whatever `prepare` raises.
    """
    stream = Stream(asyncio.get_running_loop())

    def work() -> None:
        try:
            for item in prepare():
                stream.begin(service, item)
        except BaseException:
            stream.close()
            raise

    opening = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread goes on
        opening.add_done_callback(lambda _: stream.close())
        raise
    return stream


_BACKTICKS = re.compile("`+")


def edit_task(service: Service, request: EditRequest, caller: Caller, wanted: int) -> Prepared:
    """A task whose answer is the new text of a file; with ``wanted`` below 0 there must be room for the whole text.

    The answer begins and ends with more backticks than stand together in what was given. A text without a newline at
    its end is answered without one.

    Raises
    ------
    Refusal
        400: there is nothing to change, or nothing is said of what to change; the model cannot read the text, or not
        say as much again.
    """
    text, instruction, path = request.input, request.instruction.strip(), request.path or ""
    if not text:
        raise Refusal(400, '"input" is empty: there is nothing to change; ask /v1/completions for a new text')
    if not instruction:
        raise Refusal(400, '"instruction" is empty: say what is to be changed')
    runs = _BACKTICKS.findall("\n".join((text, instruction, path)))
    fence = "`" * max(3, 1 + max(map(len, runs), default=0))
    ended = text.endswith("\n")
    question = (
        f"{instruction}\n\n{path}\n{fence}\n{text}" + ("" if ended else "\n") + f"{fence}\n\n"
        f"Answer with the whole new text between two lines of {len(fence)} backticks, and nothing else."
    )
    given = [request.stop] if isinstance(request.stop, str) else request.stop or []
    stops = [*given, *([] if ended else [f"\n{fence}"]), fence]
    asked = request.model_copy(update={"prediction": request.prediction or Prediction(content=text), "stop": stops})
    ids, expected = service.prompts.asked(question, f"{fence}\n"), service.prompts.expected(asked)
    room = service.backend.n_ctx - len(ids)
    if wanted < 0 and len(expected) > room:
        raise Refusal(
            400,
            f"the new text may need {len(expected)} tokens, and {max(0, room)} can follow the prompt of {len(ids)};"
            " send a part of the file, or say with max_tokens how much of the new text is enough",
            "exceed_context",
        )
    return service.raw(ids, asked, caller, wanted, expected)


def scope_of(request: Request) -> str:
    """The user who sends a request: their API key, "" without one."""
    return given_key(request.headers).decode("utf-8", "backslashreplace")


def caller(request: Request, body: schemas.Common) -> Caller:
    """Who sends a request; newer ones replace older ones under what the client says, else under where it sits."""
    key, arrived = scope_of(request), request.state.arrived
    explicit = request.headers.get("x-client-id") or body.user
    if explicit:
        return Caller(key, f"{key}\0{explicit[:256]}", explicit=True, arrived=arrived)
    host = request.client.host if request.client else ""
    return Caller(key, f"{key}\0{host}\0{request.url.path}\0{body.id_slot}", arrived=arrived)
