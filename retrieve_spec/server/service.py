"""Service of a model: turns requests of any dialect into tasks of the queue, and remembers what editors send."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import Lock
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import GenerationConfig

from retrieve_spec.config import TOOL_FORMATS, ServeConfig
from retrieve_spec.engine.drafters import Drafters
from retrieve_spec.errors import RetrieveSpecError, in_a_line
from retrieve_spec.server.backend import Backend, DraftHints, common_prefix
from retrieve_spec.server.call_formats import HERMES, ToolFormat, find_tool_format
from retrieve_spec.server.edits import Edit, find_edit
from retrieve_spec.server.guard import Metrics, Refusal, TooLong
from retrieve_spec.server.jobs import Task
from retrieve_spec.server.prompts import (
    FimAssembler,
    FimParts,
    Prompts,
    find_format,
    unknown_format,
)
from retrieve_spec.server.queueing import RequestQueue
from retrieve_spec.server.reading import NO_THOUGHTS, AnswerReader, Thinking
from retrieve_spec.server.sampling import (
    DEFAULT_CHAIN,
    GREEDY,
    Beginnings,
    Grammars,
    LogProbWriter,
    Sampling,
    sampling_of,
)
from retrieve_spec.server.schemas import ChatRequest, Common, InfillRequest
from retrieve_spec.server.text import StopRules, TextCodec
from retrieve_spec.server.tools import CallParser
from retrieve_spec.server.workspace import Workspace
from retrieve_spec.sources.session import SessionMemory

log = logging.getLogger("retrieve_spec.server")

_USERS = 64
_FIM_TOKENS = 128
_FIM_WINDOW = 2048
_REPEAT_LAST_N = 64
_MAX_SEED = (1 << 63) - 1
_SETTLED_EVERY = 1024
"""Tokens after which a cache that cannot be cut is copied, for a prompt with few such places."""
_NEXT_SEED = 0x9E3779B97F4A7C15
"""Distance between the seeds of samples, so that samples of neighbouring seeds differ."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, and when.

    Attributes
    ----------
    scope
        The user, by API key; what is kept for one user is never used for another.
    client
        Newer requests of a client replace older ones.
    explicit
        Whether the client sent an id itself.
    arrived
        Time of the request.
    """

    scope: str = ""
    client: str | None = None
    explicit: bool = False
    arrived: float = field(default_factory=monotonic)


@dataclass(slots=True)
class PreparedTask:
    """A task, and what its answer needs."""

    task: Task
    truncated: bool = False
    predicted_tokens: int = 0
    reader: Callable[[], AnswerReader] | None = None

    def samples(self, count: int) -> list[PreparedTask]:
        """Return the task `count` times, each with its own seed; none replaces another."""
        if count == 1:
            return [self]
        task, sampling = self.task, self.task.sampling
        seeds = [0 if sampling.greedy else (sampling.seed + number * _NEXT_SEED) % _MAX_SEED for number in range(count)]
        return [replace(self, task=replace(task, client=None, sampling=replace(sampling, seed=seed))) for seed in seeds]


_READ_TEXTS = 20_000
_ENCODED_AT_ONCE = 200_000
"""The most characters encoded for the drafter's memory with one request."""


class Memory:
    """Texts that one user's editors have sent.

    Parameters
    ----------
    codec
        Text codec of the model, with a cache of the user's own texts.
    assembler
        Makes fill-in-the-middle prompts, None for a model that cannot infill.
    scope
        The user.
    session_tokens
        Limit of the drafter's memory of excerpts, buffers and completions.
    open_session
        Opens that memory in the session's file; None: it is in this process.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        assembler: FimAssembler | None = None,
        scope: str = "",
        session_tokens: int = 1_000_000,
        open_session: Callable[[], SessionMemory | None] | None = None,
    ) -> None:
        self.codec = codec
        self.assembler, self.scope = assembler, scope
        self._session = SessionMemory(session_tokens)
        self._opened = open_session
        self._lock = Lock()
        self._begin()

    def _begin(self) -> None:
        self._encoded, self._read = deque[NDArray[np.int32]](), set[int]()

    def note(self, texts: Iterable[str]) -> None:
        """Encode texts for the drafter's memory, each once: open files, and excerpts in a request.

        Not for the model's thread. Of very many texts only some are encoded, the others when they are sent again.
        """
        room, read, encoded = _ENCODED_AT_ONCE, self._read, self._encoded  # `forget` replaces these objects
        for text in (text[:_ENCODED_AT_ONCE] for text in texts):
            if not text or hash(text) in read:
                continue
            room -= len(text)
            if room < 0:
                return
            if len(read) >= _READ_TEXTS:
                read.clear()  # the drafter's memory has dropped most of them, too
            read.add(hash(text))
            encoded.append(np.asarray(self.codec.encode_cached(text), np.int32))

    def forget(self) -> None:
        """Drop everything."""
        with self._lock:
            self._session = SessionMemory(self._session.max_tokens)
            self._begin()
        self.codec.forget()

    def contents(self) -> dict[str, int]:
        """Return how much of each kind of text is kept."""
        with self._lock:
            return {"session_tokens": len(self._drafted()), "encodings": self.codec.cached}

    def hints(self, context_ids: Sequence[int], expected: Sequence[int] = ()) -> Callable[[], DraftHints]:
        """Return sources of drafts for a completion; the result is called in the model's thread when the work begins.

        ``context_ids`` are the texts in the prompt, the text before the cursor last.
        """
        return lambda: DraftHints(True, tuple(expected), tuple(context_ids), self._session_now(), self.scope)

    def _drafted(self) -> SessionMemory:
        """The drafter's memory, in this process or in the session's file."""
        opened = None if self._opened is None else self._opened()
        return self._session if opened is None else opened

    def _session_now(self) -> SessionMemory:
        """Return the drafter's memory with all noted texts; for the model's thread only."""
        with self._lock:
            encoded, session = self._encoded, self._drafted()
        while encoded:
            session.read(encoded.popleft())
        return session


def _counted_tokens(request: Common) -> int | None:
    """Return how many of the latest tokens the penalty for repetition counts, None for all: llama.cpp's has a limit."""
    if request.repetition_penalty is not None or request.repeat_penalty is None:
        return None
    last = _REPEAT_LAST_N if request.repeat_last_n is None else request.repeat_last_n
    return last if last >= 0 else None


def settled_before(end: int) -> range:
    """Return where a prompt is likely to differ from others: at most eight places, the same for similar lengths."""
    every = _SETTLED_EVERY << (end // (8 * _SETTLED_EVERY)).bit_length()
    return range(every, end, every)


class Service:
    """A model with everything that serves it: formats, memory, queue.

    Parameters
    ----------
    backend
        The model.
    tokenizer
        Its tokenizer.
    name
        Name of the model in answers.
    config
        Limits.
    workspace
        Open folders, or None.
    shared
        Whether users with API keys share the server: then none may fill the queue or delete the workspace.
    drafters
        The model's drafters, if their sessions are kept in a file.
    metrics
        Counters that several models share; None makes new ones.
    generation_config
        The model's: further tokens that end an answer, and the default sampling of chats. None for a model without
        one.
    clock
        Clock of the queue, in seconds.

    Attributes
    ----------
    backend_vocabulary
        Entries of the vocabulary.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Any,
        name: str,
        config: ServeConfig,
        workspace: Workspace | None = None,
        *,
        shared: bool = False,
        drafters: Drafters | None = None,
        metrics: Metrics | None = None,
        generation_config: GenerationConfig | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.backend, self.tokenizer, self.name, self.config = backend, tokenizer, name, config
        self.workspace = workspace
        self.chat_sampling = GREEDY if generation_config is None else sampling_of(generation_config)
        self.codec, self.backend_vocabulary = TextCodec(tokenizer), len(tokenizer)
        self.fim = find_format(self.codec)
        own = None if generation_config is None else generation_config.eos_token_id
        ends = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
        self.end_ids = (self.fim.end if self.fim else frozenset()) | {end for end in ends if end is not None}
        self.metrics = Metrics() if metrics is None else metrics
        self.queue = RequestQueue(
            backend,
            self.codec,
            slots=config.slots,
            cache_bytes=config.cache_bytes,
            max_queue=config.max_queue,
            max_begun=config.chats,
            share=max(1, config.max_queue // 2) if shared else None,
            prefill_chunk=config.prefill_chunk,
            on_done=self.metrics.completion,
            clock=clock,
        )
        self.grammars = Grammars(tokenizer, self.end_ids)
        self.beginnings = Beginnings(self.codec)
        self.logprobs = LogProbWriter(self.codec, self.beginnings.spelled)
        self._shared, self._drafters = shared, drafters
        self.metrics.queues.add(self.queue)
        self.memory = lru_cache(_USERS)(self._open_memory)
        """Texts of each user's editors, kept apart; only those of the latest users."""
        self.prompts = Prompts(self.codec, self.fim, backend.n_ctx)

    def _open_memory(self, scope: str) -> Memory:
        config, codec = self.config, self.codec.apart()
        assembler = None
        if self.fim:
            window, beginnings = config.fim_window or _FIM_WINDOW, self.beginnings if self.backend.heals else None
            assembler = FimAssembler(codec, self.fim, self.backend.n_ctx, window, config.prefix_share, beginnings)
        return Memory(
            codec,
            assembler=assembler,
            scope=scope,
            open_session=None if self._drafters is None else partial(self._drafters.sessions.get, scope),
        )

    def start(self, are_idle: Callable[[], bool]) -> None:
        """Start the queue, and read the workspace; the model may learn while no model of the server has work."""
        if self.config.learn_idle:
            self.queue.on_idle = partial(self.backend.learn, are_idle)
        self.queue.start()
        if self.workspace is not None:
            self.workspace.start()

    def close(self) -> None:
        """Close the workspace and the queue; write the session's file, if there is one."""
        if self.workspace is not None:
            self.workspace.close()
        self.queue.close()
        if self._drafters is not None:
            self._drafters.keep(at_once=True)

    @property
    def family(self) -> str | None:
        """Name of the model's fill-in-the-middle format, None if it has none."""
        return self.fim.fmt.family if self.fim else None

    def meta(self) -> dict[str, Any]:
        """Return what lists of models say of this one."""
        return {"n_ctx": self.backend.n_ctx, "n_vocab": self.backend_vocabulary, "fim": self.family}

    def state(self) -> dict[str, Any]:
        """Return the model's status, and what it drafts from."""
        body = {
            "status": "ok",
            "model": self.name,
            "fim": self.family,
            "n_ctx": self.backend.n_ctx,
            "queue": self.queue.queue_length,
            **({} if self.fim else {"fim_missing": self.no_fim()}),
        }
        return body if self.workspace is None else {**body, "workspace": self.workspace.state()}

    def kept(self, scope: str) -> dict[str, Any]:
        """Return what is kept for one user, and the workspace."""
        kept: dict[str, Any] = {**self.memory(scope).contents(), "caches": self.queue.caches(scope)}
        if self.workspace is not None:
            kept["workspace"] = {
                "folders": [str(root) for root in self.workspace.roots],
                "files": self.workspace.files,
                "forgettable": not self._shared,
            }
        return kept

    def forget(self, scope: str = "") -> dict[str, Any]:
        """Delete all that is kept for one user, and the workspace unless keys share it; return what there was.

        Raises
        ------
        Refusal
            500: the session's file cannot be written, so it still has the answers.
        """
        kept = self.kept(scope)
        self.memory(scope).forget()
        self.beginnings.forget()  # of all users, since owners are not recorded
        if self.workspace is not None and not self._shared:
            self.workspace.forget()
        try:
            self.queue.forget(scope)
        except (OSError, RetrieveSpecError) as error:
            log.warning("not forgotten in a file: %s", in_a_line(error))
            raise Refusal(
                500,
                "forgotten by the server, but its file of answers could not be written, and still holds them until it"
                " can be; the server's log says why",
                "server_error",
            ) from error
        return kept

    def infill(self, request: InfillRequest, caller: Caller) -> PreparedTask:
        """Return the task for the text between prefix and suffix.

        Raises
        ------
        Refusal
            501: the model cannot infill.
        """
        parts = FimParts(
            request.input_prefix + (request.prompt or ""), request.input_suffix, tuple(request.input_extra or ())
        )
        wanted = next(n for n in (request.n_predict, request.max_tokens, _FIM_TOKENS) if n is not None)
        return self.fill(parts, request, caller, wanted)

    def fill(self, parts: FimParts, request: Common, caller: Caller, wanted: int) -> PreparedTask:
        """Return the task for the text between two texts."""
        memory = self.memory(caller.scope)
        if memory.assembler is None:
            raise Refusal(501, self.no_fim(), "not_supported_error")
        most = 0 if wanted < 0 else min(wanted, self.backend.n_ctx // 8)
        # A grammar determines the beginning itself, and log-probabilities cover the whole answer.
        held = request.wanted_json()[0] is not None or request.wanted_pattern() is not None
        free = not held and request.wanted_logprobs() is None
        prompt = memory.assembler.assemble(parts, most, heal=free)
        expected = self.prompts.expected(request, prompt.begun)
        memory.note(chunk.text for chunk in parts.extra)
        task = self._task(
            prompt.token_ids,
            request,
            wanted,
            caller,
            document=parts.prefix,
            hints=memory.hints(prompt.context_ids, expected),
            begun=prompt.begun,
        )
        return PreparedTask(task, prompt.truncated, len(expected))

    def chat(self, request: ChatRequest, caller: Caller, wanted: int) -> PreparedTask:
        """Return the task for the model's next turn in a conversation."""
        prompt = self.prompts.chat(request)
        edit = find_edit(request.messages[-1]["content"])
        prepared = self.raw(prompt.token_ids, request, caller, wanted, prompt.thinking, edit)
        schemas = request.argument_schemas
        fmt = self._tool_format() if schemas else None
        if schemas and fmt is None:
            request.left_out.append("tools (how the model writes calls is not known: they stay text)")

        def reader() -> AnswerReader:
            return AnswerReader(prompt.thinking.begun, CallParser(fmt, schemas) if fmt else None)

        if not self.backend.cuts_caches:
            end = len(prompt.token_ids) - max(1, len(self.prompts.opening(request)))
            shared = common_prefix(self.prompts.instructions(request), prompt.token_ids)
            places = {*settled_before(end), shared - 1, end}  # the last token may change when a question follows
            prepared.task = replace(prepared.task, settled=tuple(sorted(places)))
        return replace(prepared, reader=reader)

    def known(self, token_ids: Sequence[int]) -> list[int]:
        """Return some token ids.

        Raises
        ------
        Refusal
            400: one is not in the vocabulary.
        """
        if (most := max(token_ids, default=0)) >= self.backend_vocabulary:
            raise Refusal(400, f"token id {most} is not in the vocabulary of {self.backend_vocabulary} tokens")
        return list(token_ids)

    def raw(
        self,
        prompt: str | Sequence[int],
        request: Common,
        caller: Caller,
        wanted: int,
        thinking: Thinking = NO_THOUGHTS,
        edit: Edit | None = None,
    ) -> PreparedTask:
        """Return the task for the continuation of a prompt; one with a cursor in it counts as typing.

        If the prompt asks to edit an excerpt and the request has no prediction, the excerpt becomes the prediction.

        Raises
        ------
        Refusal
            501: it has a fill-in-the-middle format that the model does not know; 400: it does not fit.
        """
        if isinstance(prompt, str) and unknown_format(self.codec, prompt):
            own = f"Its own is {self.fim.fmt.family}'s: ask with a suffix." if self.fim else self.no_fim()
            unknown = f"The prompt is in a fill-in-the-middle format that this model does not know. {own}"
            raise Refusal(501, unknown, "not_supported_error")
        ids = self.known(self.prompts.encode(prompt) if isinstance(prompt, str) else prompt)
        if not ids:
            ids = [self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else next(iter(self.end_ids))]
        room = self.backend.n_ctx - len(ids)
        if room < 1:
            raise TooLong(len(ids), self.backend.n_ctx)
        memory, cursor = self.memory(caller.scope), self.prompts.cursor(ids)
        expected = self.prompts.expected(request)
        if isinstance(prompt, str):
            edit = find_edit(prompt)
        if edit is not None and not expected:
            expected = self.codec.encode(edit.expected)
        if cursor is None and edit is not None and isinstance(prompt, str):
            document, shown, who = edit.before, ids, caller
        elif cursor is None:
            document, shown, who = None, ids, caller if caller.explicit else replace(caller, client=None)
        else:
            before, after = cursor
            document, shown, who = self.codec.decode(before), [*after, *before], caller
        hints = memory.hints(shown, expected)
        task = self._task(ids, request, wanted, who, document=document, hints=hints, thinking=thinking)
        return PreparedTask(task, predicted_tokens=len(expected))

    def no_fim(self) -> str:
        """Return why the model cannot infill, and which models can."""
        return (
            "Infill is not supported by this model: its vocabulary lacks fill-in-the-middle tokens of a known family. "
            "Use a base code model trained on fill-in-the-middle (Qwen2.5-Coder, StarCoder2, DeepSeek-Coder, "
            "CodeLlama, CodeGemma, Codestral, Granite, Seed-Coder)."
        )

    def _task(
        self,
        ids: Sequence[int],
        request: Common,
        wanted: int,
        caller: Caller,
        *,
        hints: Callable[[], DraftHints],
        document: str | None,
        begun: str = "",
        thinking: Thinking = NO_THOUGHTS,
    ) -> Task:
        """Return the task; ``document`` is the text before the cursor, None if the request is not about typing."""
        late, typing = request.t_max_predict_ms, document is not None
        words, stop_ids = self._stops(request)
        return Task(
            tuple(ids),
            StopRules(
                wanted,
                self.end_ids | stop_ids,
                words,
                request.n_indent or 0,
                late / 1000 if late is not None and late > 0 else None,
                begun,
            ),
            replace(self._sampling(request, thinking), begun=begun),
            hints,
            scope=caller.scope,
            typing=typing,
            arrived=caller.arrived,
            client=caller.client,
            document=None if caller.explicit else document,
            deadline_s=self._deadline(request),
            stale_s=self.config.stale_s if typing and caller.client is not None else None,
            warm=wanted == 0,
            reuse=request.cache_prompt is not False,
            drafting=request.speculative is not False,
        )

    def _deadline(self, request: Common) -> float | None:
        """Return the seconds of work after which an answer ends, None for no limit."""
        if request.deadline_ms is not None:
            return request.deadline_ms / 1000
        typed = self.config.infill_deadline_s if isinstance(request, InfillRequest) else None
        return self.config.deadline_s or typed

    def _sampling(self, request: Common, thinking: Thinking) -> Sampling:
        """Return the sampling of a request; without a seed every answer is another sample."""
        unsaid = isinstance(request, ChatRequest) and request.temperature is None and request.samplers is None
        default = self.chat_sampling if unsaid else GREEDY
        seed = request.seed if request.seed is not None and request.seed >= 0 else secrets.randbelow(_MAX_SEED)
        bias = tuple(sorted((request.logit_bias or {}).items()))
        if bias and bias[-1][0] >= self.backend_vocabulary:
            raise Refusal(400, f'"logit_bias": token ids must be below {self.backend_vocabulary}')
        sampling = Sampling(
            default.temperature if request.temperature is None else request.temperature,
            default.top_k if request.top_k is None else request.top_k,
            default.top_p if request.top_p is None else request.top_p,
            default.min_p if request.min_p is None else request.min_p,
            DEFAULT_CHAIN if request.samplers is None else tuple(request.samplers),
            seed,
            self._grammar(request, thinking),
            presence=request.presence_penalty or 0.0,
            frequency=request.frequency_penalty or 0.0,
            repetition=request.repetition_penalty or request.repeat_penalty or default.repetition,
            recent=_counted_tokens(request),
            bias=bias,
            logprobs=request.wanted_logprobs(),
        )
        return replace(sampling, seed=0) if sampling.greedy else sampling

    def _grammar(self, request: Common, thinking: Thinking) -> str:
        """Return the grammar of the answer after its thoughts: JSON or calls; empty for any text."""
        if not isinstance(request, ChatRequest) or not request.offered:
            return self.grammars.of(request, thinking)
        schemas, fmt = request.argument_schemas, self._tool_format()
        required, (wanted, _) = request.named or request.tool_choice == "required", request.wanted_json()
        if not required and (wanted is None or fmt is None):
            return self.grammars.of(request, thinking)
        if fmt is None:
            raise Refusal(
                400,
                "not served with this model: a call that is required; its chat template does not tell how it writes"
                f" calls. Ask with tool_choice auto, or start the server with --tool-format {'|'.join(TOOL_FORMATS)}",
                "unsupported_field",
            )
        if request.named:
            schemas = {request.named: schemas[request.named]}
        return self.grammars.of_calls(
            fmt,
            schemas,
            thinking,
            several=not request.named and request.parallel_tool_calls is not False,
            otherwise=None if required else wanted,
            left_out=request.left_out,
        )

    def _tool_format(self) -> ToolFormat | None:
        """Return the model's call format, None if it is unknown."""
        if not self.prompts.template.traits.tools:
            return HERMES
        return find_tool_format(self.prompts.template.text, self.config.tool_format)

    def _stops(self, request: Common) -> tuple[tuple[str, ...], frozenset[int]]:
        """Return stop strings and stop tokens; a stop string that is a control token becomes its id."""
        given = [request.stop] if isinstance(request.stop, str) else request.stop or []
        words, ids = [], set()
        for stop in given:
            token_id = self.codec.token_id(stop)
            if token_id is not None and self.codec.encode(stop) != [token_id]:
                ids.add(token_id)
            elif stop:
                words.append(stop)
        return tuple(words), frozenset(ids)
