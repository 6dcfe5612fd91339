"""Completion routes: a request of any dialect becomes tasks, and their results become its answer or stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from retrieve_spec.server import schemas
from retrieve_spec.server.answers import Answer, LlamaAnswer, OpenAIAnswer
from retrieve_spec.server.guard import BoundedRoute, Refusal, errors, given_key
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.models import Meant
from retrieve_spec.server.prompts import FimParts
from retrieve_spec.server.service import Caller, PreparedTask, Service

log = logging.getLogger("retrieve_spec.server")

T = TypeVar("T")

_OPENAI_TOKENS = 16
_FIM_TOKENS = 128
_CLIENT_CLOSED = 499
ANSWERS: dict[int | str, Any] = {
    200: {"content": {"text/event-stream": {}}},
    **errors(400, 401, 403, 404, 408, 413, 499, 500, 501, 503),
}
"""Describes the answers of a dialect in the OpenAPI schema."""
Write = Callable[[Service, Any, Sequence[PreparedTask]], Answer]
"""Makes the answer object of a request whose tasks have begun."""

router = APIRouter(route_class=BoundedRoute)


@router.post("/infill", responses=ANSWERS)
async def infill(body: schemas.InfillRequest, request: Request, service: Meant) -> Response:
    """Complete the text between a prefix and a suffix (llama.cpp's dialect)."""
    who = caller(request, body)
    return await respond(service, request, body, lambda: [service.infill(body, who)], LlamaAnswer)


@router.post("/completion", responses=ANSWERS)
@router.post("/completions", include_in_schema=False)
async def completion(body: schemas.CompletionRequest, request: Request, service: Meant) -> Response:
    """Complete a prompt (llama.cpp's dialect)."""
    wanted = first(body.n_predict, body.max_tokens, -1)
    prompts, who = _prompts(request, body)
    return await respond(
        service, request, body, lambda: [service.raw(prompt, body, who, wanted) for prompt in prompts], LlamaAnswer
    )


@router.post("/v1/completions", responses=ANSWERS)
async def completions(body: schemas.OpenAICompletionRequest, request: Request, service: Meant) -> Response:
    """Complete prompts (OpenAI's dialect, with `suffix`)."""
    if body.prompt is None:
        raise Refusal(400, '"prompt" is required')
    wanted = first(body.max_tokens, body.n_predict, _OPENAI_TOKENS)
    prompts, who = _prompts(request, body)

    def text_of(prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else service.codec.decode(service.known(prompt))

    def prepare(prompt: str | list[int]) -> PreparedTask:
        if body.suffix:
            return service.fill(FimParts(text_of(prompt), body.suffix), body, who, wanted)
        return service.raw(prompt, body, who, wanted)

    echoed = list(map(text_of, prompts)) if body.echo else []
    return await respond(
        service, request, body, lambda: list(map(prepare, prompts)), partial(OpenAIAnswer, echoed=echoed)
    )


def _prompts(
    request: Request, body: schemas.CompletionRequest | schemas.OpenAICompletionRequest
) -> tuple[list[str | list[int]], Caller]:
    """Return the prompts of a request, and who sent them; those of one request do not replace each other."""
    given: Any = body.prompt
    who = caller(request, body)
    if not isinstance(given, list) or not given or isinstance(given[0], int):
        return [given], who
    return given, replace(who, client=None) if len(given) > 1 else who


@router.post("/v1/fim/completions", responses=ANSWERS)
async def fim(body: schemas.OpenAICompletionRequest, request: Request, service: Meant) -> Response:
    """Complete the text between a prompt and a suffix, answered as a chat (Mistral's dialect)."""
    if not isinstance(body.prompt, str) or body.echo:
        raise Refusal(400, '"prompt" must be a string, and "echo" left out')
    wanted, who = first(body.max_tokens, body.n_predict, _FIM_TOKENS), caller(request, body)
    parts = FimParts(body.prompt, body.suffix or "")
    return await respond(service, request, body, lambda: [service.fill(parts, body, who, wanted)], CHAT)


@router.post("/v1/chat/completions", responses=ANSWERS)
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: schemas.ChatRequest, request: Request, service: Meant) -> Response:
    """Complete a chat (OpenAI's dialect), with predicted outputs."""
    return await converse(service, request, body, CHAT)


CHAT: Write = partial(OpenAIAnswer, chat=True)


async def converse(service: Service, request: Request, body: schemas.ChatRequest, write: Write) -> Response:
    """Answer a conversation in one of the dialects."""
    wanted, who = first(body.max_completion_tokens, body.max_tokens, body.n_predict, -1), caller(request, body)
    who = who if who.explicit else replace(who, client=None)
    return await respond(service, request, body, lambda: [service.chat(body, who, wanted)], write)


async def respond(
    service: Service,
    request: Request,
    body: schemas.Common,
    prepare: Callable[[], Sequence[PreparedTask]],
    write: Write,
) -> Response:
    """Answer a request of any dialect: prepare its tasks in a thread and submit them to the queue."""
    samples = body.n or 1 if isinstance(body, schemas.OpenAIOptions) else 1
    stream = await opened(service, lambda: [one for item in prepare() for one in item.samples(samples)])
    answer = write(service, body, stream.prepared)
    told = left_out_header(request, body.left_out)
    if body.stream:
        return EventStream(_events(service, stream, answer), told, answer.media_type)
    finished = await _collect(request, stream)
    if not answer.tells_superseded and any(done.outcome == "superseded" for done in finished):
        raise Refusal(_CLIENT_CLOSED, "a newer request of this client superseded this one", "superseded")
    return JSONResponse(answer.whole(finished), headers=told)


_MOST_NAMES = 2000
"""The longest value of the header that names ignored fields, in characters."""


def left_out_header(request: Request, names: Sequence[str]) -> dict[str, str]:
    """Return the header that names ignored fields, some by the client's words, and log it."""
    if not names:
        return {}
    told = ", ".join(names).encode("unicode_escape").decode("ascii")[:_MOST_NAMES]
    log.info("left out of a request to %s: %s", request.url.path, told)
    return {"x-retrieve-spec-ignored": told}


async def _events(service: Service, stream: TaskStream, answer: Answer) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events for all that is new, and comments while nothing is."""
    finished: dict[int, Completion] = {}
    left = len(stream.prepared)
    stream.ping_s = service.config.sse_ping_s or None
    try:
        if begun := b"".join(answer.encoded(one) for index in range(left) for one in answer.begin(index)):
            yield begun
        async for said in stream:
            shown: list[dict[str, Any]] = []
            for index, news in said:
                if isinstance(news, Delta):
                    shown += answer.delta(news, index)
                    continue
                left -= 1
                if news.outcome == "failed":
                    shown.append(answer.failure(news.error))
                else:
                    finished[index] = news
                    shown += answer.end(news, index)
            if not left:  # all that ends the stream is sent at once
                shown += answer.close([finished[index] for index in sorted(finished)])
            if shown or not said:
                yield b"".join(map(answer.encoded, shown)) + (b"" if left else answer.closing) or answer.ping
    finally:
        stream.close()


async def _collect(request: Request, stream: TaskStream) -> list[Completion]:
    """Return the completions of some tasks; cancel all of them if the client disconnects."""
    try:
        finished = await _while_connected(request.receive, stream.results())
    finally:
        stream.close()
    failed = next((done for done in finished if done.outcome == "failed"), None)
    if failed is not None:
        raise failed.refusal or Refusal(500, failed.error, "server_error")
    return finished


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of some work, which is cancelled if the client disconnects.

    Raises
    ------
    Refusal
        499: the client has disconnected.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal(_CLIENT_CLOSED, "the client closed the connection", "cancelled")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


def first(*values: int | None) -> int:
    """Return the first number that is not None."""
    return next(value for value in values if value is not None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_HEADERS = {"Cache-Control": "no-store", "Connection": "keep-alive", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """A response of server-sent events; its generator is closed at the end or when the client disconnects."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], media_type: str) -> None:
        super().__init__(events, headers={**_HEADERS, **headers}, media_type=media_type)
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers and every event, in half the time that Starlette's task group takes."""
        with contextlib.suppress(Refusal):  # nobody is left to be answered
            await _while_connected(receive, self._sent(send))

    async def _sent(self, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            await self.events.aclose()


Said = tuple[int, Delta | Completion]
"""Index of a task, and its new delta or completion."""


class TaskStream:
    """Deltas and completions of a request's tasks; each iteration yields all that are new.

    Attributes
    ----------
    ping_s
        Seconds without anything new after which it yields an empty list; None: never.
    prepared
        The submitted tasks.
    """

    ping_s: float | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._said = loop, asyncio.Queue[Said]()
        self._leave: list[Callable[[], None]] = []
        self.prepared: list[PreparedTask] = []

    def begin(self, service: Service, prepared: PreparedTask) -> None:
        """Submit a task to the queue."""
        number = len(self.prepared)

        def sink(*news: Delta | Completion) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._tell, [(number, each) for each in news])

        self._leave.append(service.queue.submit(prepared.task, sink))
        self.prepared.append(prepared)

    def _tell(self, said: list[Said]) -> None:
        for each in said:
            self._said.put_nowait(each)

    async def __aiter__(self) -> AsyncIterator[list[Said]]:
        left = len(self.prepared)
        while left:
            try:
                async with asyncio.timeout(self.ping_s):
                    said = [await self._said.get()]
            except TimeoutError:
                yield []
                continue
            said += [self._said.get_nowait() for _ in range(self._said.qsize())]
            left -= sum(isinstance(news, Completion) for _, news in said)
            yield said

    async def results(self) -> list[Completion]:
        """Wait for all completions and return them."""
        done = {number: news async for said in self for number, news in said if isinstance(news, Completion)}
        return [done[number] for number in range(len(self.prepared))]

    def close(self) -> None:
        """Cancel the tasks that are not done."""
        for leave in self._leave:
            leave()


async def opened(service: Service, prepare: Callable[[], Sequence[PreparedTask]]) -> TaskStream:
    """Prepare tasks and submit them in a thread, so that the event loop need not wait; return their stream.

    Raises
    ------
    Refusal
        503: the queue is full; and whatever `prepare` raises.
    """
    loop = asyncio.get_running_loop()
    stream = TaskStream(loop)

    def work() -> None:
        try:
            for item in prepare():
                stream.begin(service, item)
        except BaseException:
            stream.close()
            raise

    opening = loop.run_in_executor(None, work)
    try:
        await asyncio.shield(opening)
    except asyncio.CancelledError:  # the thread continues
        opening.add_done_callback(lambda _: stream.close())
        raise
    return stream


def scope_of(request: Request) -> str:
    """Return the user of a request: the API key, "" without one."""
    return given_key(request.headers).decode("utf-8", "backslashreplace")


def caller(request: Request, body: schemas.Common) -> Caller:
    """Return who sent a request: by the client's own id, else by address and place in the document."""
    key, arrived = scope_of(request), request.state.arrived
    user = None if isinstance(body, schemas.ChatRequest) else body.user  # a user's agents chat at the same time
    if explicit := request.headers.get("x-client-id") or user:
        return Caller(key, f"{key}\0{str(explicit)[:256]}", explicit=True, arrived=arrived)
    host = request.client.host if request.client else ""
    return Caller(key, f"{key}\0{host}\0{request.url.path}\0{body.id_slot}", arrived=arrived)
