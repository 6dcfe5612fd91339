"""The HTTP surface: routes of the dialects that editors and OpenAI clients speak, all answered by one engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrieve_spec._version import __version__
from retrieve_spec.server import schemas, wire
from retrieve_spec.server.fim import FimParts
from retrieve_spec.server.guard import Guard, Refusal, given_key, read_body
from retrieve_spec.server.jobs import Completion, Delta
from retrieve_spec.server.metrics import Metrics
from retrieve_spec.server.openapi import describe
from retrieve_spec.server.provenance import Provenance
from retrieve_spec.server.service import Caller, Prepared, Service
from retrieve_spec.server.stream import Stream

M = TypeVar("M", bound=BaseModel)
_NO_PINGS = 1 << 20
_CHAT_TOKENS = 512
_OPENAI_TOKENS = 16
_CLIENT_CLOSED = 499
_SUGGESTIONS = 256


class Handlers:
    """The request handlers of one server.

    Parameters
    ----------
    service
        The server's parts.
    metrics
        Where requests are counted.
    """

    def __init__(self, service: Service, metrics: Metrics, provenance: Provenance) -> None:
        self.service, self.metrics, self.provenance = service, metrics, provenance
        self._suggested: OrderedDict[str, tuple[Prepared, str]] = OrderedDict()

    async def infill(self, request: Request) -> Response:
        """`POST /infill`."""
        begun = perf_counter()
        body = await self._read(request, schemas.InfillRequest)
        prepared = self.service.infill(body, self._caller(request, body))
        return await self._llama(request, body, prepared, begun)

    async def completion(self, request: Request) -> Response:
        """`POST /completion`."""
        begun = perf_counter()
        body = await self._read(request, schemas.CompletionRequest)
        ids = self.service.codec.encode_prompt(body.prompt) if isinstance(body.prompt, str) else body.prompt
        wanted = body.n_predict if body.n_predict is not None else -1
        prepared = self.service.raw(ids, body, self._caller(request, body), wanted)
        return await self._llama(request, body, prepared, begun)

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`: OpenAI's dialect, and Tabby's when there are `segments`."""
        begun = perf_counter()
        fields = await self._json(request)
        if isinstance(fields, dict) and "segments" in fields:
            return await self._tabby(request, self._check(schemas.TabbyRequest, fields), begun)
        body = self._check(schemas.OpenAICompletionRequest, fields)
        if body.prompt is None:
            raise Refusal(400, '"prompt" is required')
        caller = self._caller(request, body)
        wanted = _first(body.max_tokens, body.n_predict, _OPENAI_TOKENS)
        several = isinstance(body.prompt, list) and all(isinstance(prompt, str) for prompt in body.prompt)
        prompts = body.prompt if several and body.prompt else [body.prompt]
        if len(prompts) > 1:
            caller = Caller(caller.scope)  # one request may not replace its own other half
        prepared = [self._one(prompt, body, caller, wanted) for prompt in prompts]
        answer = wire.OpenAIAnswer(self.service.name, chat=False)
        return await self._openai(request, body, prepared, answer, begun)

    def _one(self, prompt: Any, body: schemas.OpenAICompletionRequest, caller: Caller, wanted: int) -> Prepared:
        if body.suffix and isinstance(prompt, str):
            return self.service.fill(FimParts(prompt, body.suffix), body, caller, wanted)
        ids = self.service.codec.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        return self.service.raw(ids, body, caller, wanted)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        begun = perf_counter()
        body = await self._read(request, schemas.ChatRequest)
        ids = self.service.chat_prompt(body.messages)
        wanted = _first(body.max_completion_tokens, body.max_tokens, body.n_predict, _CHAT_TOKENS)
        caller = self._caller(request, body)
        prepared = self.service.raw(ids, body, caller if caller.explicit else Caller(caller.scope), wanted)
        answer = wire.OpenAIAnswer(self.service.name, chat=True)
        return await self._openai(request, body, [prepared], answer, begun)

    async def _tabby(self, request: Request, body: schemas.TabbyRequest, begun: float) -> Response:
        prepared = self.service.tabby(body, self._caller(request, body))
        (done,) = await self._collect(request, [prepared], begun)
        text = done.text if done.outcome == "done" else ""
        choices = [{"index": 0, "text": text}] if text else []
        answer = wire.OpenAIAnswer(self.service.name, chat=False).chunk("")
        out = {"id": answer["id"], "choices": choices, "mode": body.mode or "standard"}
        if text:
            self._suggested[str(answer["id"])] = (prepared, text)
            while len(self._suggested) > _SUGGESTIONS:
                self._suggested.popitem(last=False)
        return JSONResponse(out)

    async def events(self, request: Request) -> Response:
        """`POST /v1/events`: a selected Tabby suggestion is remembered as accepted."""
        body = await self._read(request, schemas.TabbyEvent)
        known = self._suggested.get(body.completion_id or "")
        if known is not None and body.type == "select":
            prepared, text = known
            prepared.memory.note_accepted(prepared.left[prepared.left.rfind("\n") + 1 :] + text)
        return JSONResponse({})

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = await self._read(request, schemas.TokenizeRequest)
        codec = self.service.codec
        if body.parse_special:
            ids = codec.encode_prompt(body.content, add_special_tokens=body.add_special)
        else:
            ids = codec.encode(body.content)
        if not body.with_pieces:
            return JSONResponse({"tokens": ids})
        pieces = [{"id": i, "piece": piece} for i, piece in zip(ids, codec.pieces(ids), strict=True)]
        return JSONResponse({"tokens": pieces})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = await self._read(request, schemas.DetokenizeRequest)
        if any(i >= self.service.backend_vocabulary for i in body.tokens):
            raise Refusal(400, f"token ids must be below {self.service.backend_vocabulary}")
        return JSONResponse({"content": self.service.codec.decode(body.tokens)})

    async def apply_template(self, request: Request) -> Response:
        """`POST /apply-template`."""
        body = await self._read(request, schemas.TemplateRequest)
        return JSONResponse({"prompt": self.service.codec.decode(self.service.chat_prompt(body.messages))})

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`: the model, and the alias under which Continue sends predictions."""
        service = self.service
        meta = {"n_ctx": service.backend.n_ctx, "n_vocab": service.backend_vocabulary, "fim": self._family()}
        names = [service.name, f"{service.name}-Fast-Apply"]
        data = [{"id": n, "object": "model", "created": 0, "owned_by": "retrieve-spec", "meta": meta} for n in names]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        """`GET /health`: what is served, and what it drafts from."""
        service, workspace = self.service, self.service.workspace
        body: dict[str, Any] = {
            "status": "ok",
            "model": service.name,
            "fim": self._family(),
            "n_ctx": service.backend.n_ctx,
            "queue": service.engine.queue_length,
        }
        if service.fim is None:
            body["fim_missing"] = service.no_fim()
        if workspace is not None:
            body["workspace"] = {"indexed": workspace.indexed.is_set(), "files": len(workspace.texts)}
        return JSONResponse(body)

    async def tabby_health(self, request: Request) -> Response:
        """`GET` or `POST /v1/health`, in the shape Tabby's clients expect."""
        version = {"build_date": "", "build_timestamp": "", "git_sha": "", "git_describe": f"v{__version__}"}
        body = {"model": self.service.name, "device": "local", "arch": "", "cpu_info": "", "cpu_count": 1}
        return JSONResponse({**body, "cuda_devices": [], "version": version, "status": "ok"})

    async def props(self, request: Request) -> Response:
        """`GET /props`."""
        service = self.service
        settings = {"n_ctx": service.backend.n_ctx, "params": {"n_predict": -1, "temperature": 0.0}}
        body = {
            "default_generation_settings": settings,
            "total_slots": service.config.slots,
            "model_path": service.name,
            "model_alias": service.name,
            "chat_template": getattr(service.tokenizer, "chat_template", None) or "",
            "build_info": f"retrieve-spec {__version__}",
            "fim": self._family(),
        }
        return JSONResponse(body)

    async def server_setting(self, request: Request) -> Response:
        """`GET /v1beta/server_setting`, asked for by Tabby's clients."""
        return JSONResponse({"disable_client_side_telemetry": True})

    async def forget(self, request: Request) -> Response:
        """`DELETE /v1/workspace`: drop everything remembered, in memory and on disk."""
        await asyncio.to_thread(self.service.forget)
        return JSONResponse({"forgotten": True})

    async def expose(self, request: Request) -> Response:
        """`GET /metrics`."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return JSONResponse(describe())

    def _family(self) -> str | None:
        return self.service.fim.fmt.family if self.service.fim else None

    def _caller(self, request: Request, body: schemas.Common) -> Caller:
        """The key under which newer requests replace older ones: what the client says, else where it sits."""
        key = given_key(request.headers).decode("utf-8", "replace")
        explicit = request.headers.get("x-client-id") or body.user
        if explicit:
            return Caller(key, f"{key}\0{explicit[:256]}", explicit=True)
        host = request.client.host if request.client else ""
        return Caller(key, f"{key}\0{host}\0{request.url.path}\0{body.id_slot}")

    async def _json(self, request: Request) -> Any:
        data = await read_body(request, self.service.config.max_body_bytes)
        try:
            return pydantic_core.from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(400, f"the body is not JSON: {error}") from error

    async def _read(self, request: Request, schema: type[M]) -> M:
        return self._check(schema, await self._json(request))

    def _check(self, schema: type[M], fields: Any) -> M:
        if not isinstance(fields, dict):
            raise Refusal(400, "the body must be a JSON object")
        try:
            return schema.model_validate(fields)
        except ValidationError as error:
            raise Refusal(400, schemas.reason(error)) from error

    async def _llama(
        self,
        request: Request,
        body: schemas.InfillRequest | schemas.CompletionRequest,
        prepared: Prepared,
        begun: float,
    ) -> Response:
        service = self.service
        named = body.response_fields
        prompt = service.codec.decode(prepared.task.prompt_ids) if named is None or "prompt" in named else ""

        def whole(done: Completion, streamed: bool = False) -> dict[str, Any]:
            out = wire.llama_body(
                done,
                body,
                model=service.name,
                n_ctx=service.backend.n_ctx,
                prompt=prompt,
                truncated=prepared.truncated,
                streamed=streamed,
            )
            return wire.project({**out, **self.provenance.of(body, done)}, named)

        if body.stream:
            stream = Stream(service, prepared)
            return _sse(self._llama_events(stream, body, whole))
        (done,) = await self._collect(request, [prepared], begun)
        self._remember(prepared, done)
        answer = whole(done)
        count = getattr(body, "n_cmpl", None) or getattr(body, "n", None) or 1
        if count > 1:
            others = [{**answer, "index": i, "content": text} for i, text in enumerate(done.alternatives, 1)]
            return JSONResponse([answer, *others])
        return JSONResponse(answer)

    async def _llama_events(
        self, stream: Stream, body: schemas.Common, whole: Callable[..., dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        try:
            async for event in stream:
                if isinstance(event, Delta):
                    yield wire.event(wire.llama_delta(event, body))
                elif event.outcome == "failed":
                    yield wire.event({"error": {"code": 500, "message": event.error, "type": "server_error"}})
                else:
                    self._remember(stream.prepared, event)
                    yield wire.event(whole(event, streamed=True))
        finally:
            stream.close()

    async def _openai(
        self,
        request: Request,
        body: schemas.OpenAIOptions,
        prepared: Sequence[Prepared],
        answer: wire.OpenAIAnswer,
        begun: float,
    ) -> Response:
        predicted = prepared[0].predicted_tokens
        if body.stream:
            if len(prepared) > 1:
                raise Refusal(400, "several prompts cannot be streamed")
            return _sse(self._openai_events(Stream(self.service, prepared[0]), body, answer, predicted))
        finished = await self._collect(request, prepared, begun)
        if body.n and body.n > 1:
            finished = [done for done in finished for _ in range(body.n)]
        for item, done in zip(prepared, finished, strict=False):
            self._remember(item, done)
        if any(done.outcome == "superseded" for done in finished):
            raise Refusal(_CLIENT_CLOSED, "a newer request of this client superseded this one", "superseded")
        extra = self.provenance.of(body, finished[0])
        return JSONResponse(wire.project(answer.whole(finished, predicted, **extra), body.response_fields))

    async def _openai_events(
        self, stream: Stream, body: schemas.OpenAIOptions, answer: wire.OpenAIAnswer, predicted: int
    ) -> AsyncIterator[bytes]:
        try:
            if answer.chat:
                yield wire.event(answer.chunk("", first=True))
            async for event in stream:
                if isinstance(event, Delta):
                    if event.text:
                        yield wire.event(answer.chunk(event.text))
                    continue
                if event.outcome == "failed":
                    yield wire.event({"error": {"code": 500, "message": event.error, "type": "server_error"}})
                    continue
                self._remember(stream.prepared, event)
                # The reason stands on a chunk of its own before [DONE]: some clients read no further than that.
                extra = self.provenance.of(body, event)
                yield wire.event({**answer.chunk("", finish=wire.finish_reason(event)), **extra})
                if body.stream_options is not None and body.stream_options.include_usage:
                    yield wire.event(answer.usage_chunk([event], predicted))
            yield wire.DONE
        finally:
            stream.close()

    async def _collect(self, request: Request, prepared: Sequence[Prepared], begun: float) -> list[Completion]:
        """Completions of some tasks; all are given up when the client goes away."""
        submitted = perf_counter()
        streams: list[Stream] = []
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request))
        try:
            for item in prepared:
                streams.append(Stream(self.service, item))
            work: asyncio.Future[Any] = asyncio.gather(*(stream.result() for stream in streams))
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                raise Refusal(_CLIENT_CLOSED, "the client closed the connection", "cancelled")
            finished = list(work.result())
        finally:
            gone.cancel()
            for stream in streams:
                stream.close()
        failed = next((done for done in finished if done.outcome == "failed"), None)
        if failed is not None:
            raise Refusal(500, failed.error, "server_error")
        request.state.parsed_s = submitted - begun
        request.state.model_s = sum(done.prompt_s + done.predict_s + done.waited_s for done in finished)
        request.state.collect_s = perf_counter() - submitted
        return finished

    def _remember(self, prepared: Prepared, done: Completion) -> None:
        if done.outcome == "done" and prepared.left:
            prepared.memory.note_answer(prepared.left, done.text)


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _sse(events: AsyncIterator[bytes]) -> Response:
    return EventSourceResponse(events, sep="\n", ping=_NO_PINGS)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(
    service: Service, metrics: Metrics, *, keys: Sequence[bytes] = (), provenance: Provenance | None = None
) -> Starlette:
    """The ASGI application of a service.

    Parameters
    ----------
    service
        The server's parts; the engine is started with the application.
    metrics
        Where requests are counted.
    keys
        Accepted API keys; none: no key is asked for.
    provenance
        Tells where accepted text stands.
    """
    handlers = Handlers(service, metrics, provenance or Provenance())

    def route(path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
        return Route(path, _counted(handler, path, metrics), methods=list(methods))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        if service.workspace is not None:
            service.workspace.start()
        yield
        if service.workspace is not None:
            service.workspace.close()
        service.engine.close()

    h = handlers
    routes = [
        route("/infill", h.infill, "POST"),
        route("/completion", h.completion, "POST"),
        route("/completions", h.completion, "POST"),
        route("/v1/completions", h.completions, "POST"),
        route("/v1/chat/completions", h.chat, "POST"),
        route("/chat/completions", h.chat, "POST"),
        route("/v1/events", h.events, "POST"),
        route("/v1/models", h.models, "GET"),
        route("/models", h.models, "GET"),
        route("/health", h.health, "GET"),
        route("/v1/health", h.tabby_health, "GET", "POST"),
        route("/v1beta/server_setting", h.server_setting, "GET"),
        route("/props", h.props, "GET"),
        route("/tokenize", h.tokenize, "POST"),
        route("/detokenize", h.detokenize, "POST"),
        route("/apply-template", h.apply_template, "POST"),
        route("/v1/workspace", h.forget, "DELETE"),
        route("/metrics", h.expose, "GET"),
        route("/openapi.json", h.openapi, "GET"),
    ]
    config = service.config
    guard = Middleware(Guard, keys=keys, origins=config.origins, host=config.host)

    async def plain(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else "internal error"
        headers = getattr(error, "headers", None) or {}
        answer = Refusal(status, f"{request.method} {request.url.path}: {detail}").response()
        answer.headers.update(headers)
        return answer

    return Starlette(
        routes=routes, middleware=[guard], lifespan=lifespan, exception_handlers={HTTPException: plain, 500: plain}
    )


def _counted(
    handler: Callable[[Request], Awaitable[Response]], path: str, metrics: Metrics
) -> Callable[[Request], Awaitable[Response]]:
    async def counted(request: Request) -> Response:
        begun = perf_counter()
        try:
            response = await handler(request)
        except Refusal as refusal:
            response = refusal.response()
        total = perf_counter() - begun
        metrics.request(path, response.status_code, total)
        model_s = getattr(request.state, "model_s", None)
        if model_s is not None:
            overhead = max(0.0, total - model_s)
            metrics.overhead(path, overhead)
            response.headers["Server-Timing"] = f"overhead;dur={1000 * overhead:.2f}, model;dur={1000 * model_s:.2f}"
        return response

    return counted
