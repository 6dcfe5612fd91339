"""Turns a client's request, in whatever dialect, into a task for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.backend import Backend, DraftHints
from retrieve_spec.server.engine import Engine
from retrieve_spec.server.fim import Chunk, FimAssembler, FimParts
from retrieve_spec.server.fim_formats import find_format, missing_tokens
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Completion, Task
from retrieve_spec.server.memory import Memory
from retrieve_spec.server.samplers import Sampling, normalise_chain
from retrieve_spec.server.schemas import Common, InfillRequest, Message, TabbyRequest
from retrieve_spec.server.stopping import StopRules
from retrieve_spec.server.text import TextCodec
from retrieve_spec.server.workspace import Workspace

_FIM_TOKENS = 128
_TABBY_TOKENS = 64
_SCOPES = 64


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the memory they share, and the key under which newer requests replace older ones."""

    scope: str = ""
    client: str | None = None
    explicit: bool = False


@dataclass(slots=True)
class Prepared:
    """A task and what its answer needs."""

    task: Task
    memory: Memory
    truncated: bool = False
    left: str = ""
    predicted_tokens: int = 0


class Service:
    """The parts of one server: model, formats, memory, engine.

    Parameters
    ----------
    backend
        The model.
    tokenizer
        Its tokenizer.
    name
        How the model is called in answers.
    config
        Limits.
    workspace
        Opened folders, if any.
    on_done
        Called with every finished task.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Any,
        name: str,
        config: ServeConfig,
        workspace: Workspace | None = None,
        on_done: Callable[[Task, Completion], None] | None = None,
    ) -> None:
        self.backend, self.tokenizer, self.name, self.config = backend, tokenizer, name, config
        self.workspace = workspace
        self.codec = TextCodec(tokenizer)
        self.fim = find_format(self.codec)
        self.assembler = FimAssembler(self.codec, self.fim, backend.n_ctx, config.fim_window) if self.fim else None
        eos = tokenizer.eos_token_id
        self.end_ids = (self.fim.end if self.fim else frozenset()) | (frozenset() if eos is None else {eos})
        self.engine = Engine(
            backend,
            self.codec,
            slots=config.slots,
            max_queue=config.max_queue,
            prefill_chunk=config.prefill_chunk,
            on_done=on_done,
        )
        self._memories: dict[str, Memory] = {}

    def memory(self, scope: str) -> Memory:
        """What the editors of one user have shown; users do not draft from one another."""
        memory = self._memories.pop(scope, None)
        if memory is None:
            config = self.config
            memory = Memory(
                self.codec,
                self.workspace,
                max_chars=config.memory_chars,
                accepted_tokens=config.accepted_tokens,
            )
        self._memories[scope] = memory
        while len(self._memories) > _SCOPES:
            self._memories.pop(next(iter(self._memories)))
        return memory

    def forget(self, scope: str | None = None) -> None:
        """Drop what was remembered of one user, or of everybody and the workspace."""
        for memory in self._memories.values() if scope is None else [self.memory(scope)]:
            memory.forget()
        if scope is None and self.workspace is not None:
            self.workspace.forget()

    def infill(self, request: InfillRequest, caller: Caller) -> Prepared:
        """A task for the text between prefix and suffix.

        Raises
        ------
        Refusal
            501: the model cannot infill.
        """
        chunks = tuple(Chunk(chunk.text, chunk.filename) for chunk in request.input_extra or ())
        parts = FimParts(request.input_prefix + (request.prompt or ""), request.input_suffix, chunks)
        wanted = request.n_predict if request.n_predict is not None else _FIM_TOKENS
        return self.fill(parts, request, caller, wanted, (request.n_cmpl or request.n or 1) - 1)

    def tabby(self, request: TabbyRequest, caller: Caller) -> Prepared:
        """A task for Tabby's segments; every snippet is a chunk."""
        s = request.segments
        snippets = [
            *(s.declarations or ()),
            *(s.relevant_snippets_from_changed_files or ()),
            *(s.relevant_snippets_from_recently_opened_files or ()),
        ]
        chunks = [Chunk(snippet.body, snippet.filepath) for snippet in snippets]
        if s.clipboard:
            chunks.append(Chunk(s.clipboard, None))
        return self.fill(FimParts(s.prefix, s.suffix or "", tuple(chunks)), request, caller, _TABBY_TOKENS)

    def fill(self, parts: FimParts, request: Common, caller: Caller, wanted: int, alternatives: int = 0) -> Prepared:
        """A task for the text between two texts."""
        if self.assembler is None:
            raise Refusal(501, self.no_fim(), "not_supported_error")
        prompt = self.assembler.assemble(parts, 0 if wanted < 0 else min(wanted, self.backend.n_ctx // 8))
        memory = self.memory(caller.scope)
        memory.note_chunks([(chunk.filename, chunk.text) for chunk in parts.extra])
        memory.note_typed(parts.prefix)
        task = self._task(
            prompt.token_ids,
            request,
            wanted,
            caller,
            document=parts.prefix,
            hints=self._hints(memory, parts.prefix, parts.suffix, prompt.context_ids, request),
            alternatives=alternatives,
        )
        return Prepared(task, memory, prompt.truncated, parts.prefix, self._predicted(request))

    def raw(self, prompt_ids: Sequence[int], request: Common, caller: Caller, wanted: int) -> Prepared:
        """A task for what follows a prompt; one that spells fill-in-the-middle tokens is treated as typing."""
        ids = list(prompt_ids)
        if not ids:
            ids = [self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else next(iter(self.end_ids))]
        if max(ids) >= self.backend_vocabulary:
            raise Refusal(400, f"token id {max(ids)} is not in the vocabulary of {self.backend_vocabulary} tokens")
        room = self.backend.n_ctx - len(ids)
        if room < 1:
            limit = self.backend.n_ctx
            raise Refusal(
                400, f"the prompt has {len(ids)} tokens; the model reads at most {limit - 1}", "exceed_context"
            )
        memory = self.memory(caller.scope)
        cursor = self._split(ids)
        if cursor is None:
            left = self.codec.decode(ids[-512:], skip_special=True)
            typing = caller if caller.explicit else Caller(caller.scope)
            hints = self._hints(memory, left, "", ids, request)
            return Prepared(
                self._task(ids, request, wanted, typing, hints=hints), memory, False, "", self._predicted(request)
            )
        before, after = cursor
        left, right = self.codec.decode(before), self.codec.decode(after)
        memory.note_typed(left)
        hints = self._hints(memory, left, right, [*after, *before], request)
        task = self._task(ids, request, wanted, caller, document=left, hints=hints)
        return Prepared(task, memory, False, left, self._predicted(request))

    @property
    def backend_vocabulary(self) -> int:
        """Entries of the vocabulary."""
        return len(self.tokenizer)

    def no_fim(self) -> str:
        """Why the model cannot infill and which can."""
        return (
            f"Infill is not supported by this model: {missing_tokens(self.codec)}. Use a base code model trained on "
            "fill-in-the-middle (Qwen2.5-Coder, StarCoder2, DeepSeek-Coder, CodeLlama, CodeGemma, Codestral, Granite, "
            "Seed-Coder)."
        )

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, by the model's own template where it has one."""
        turns = [{"role": m.role, "content": m.as_text()} for m in messages]
        if getattr(self.tokenizer, "chat_template", None):
            try:
                text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # templates raise what they like
                raise Refusal(400, f"the model's chat template refuses these messages: {error}") from error
            return self.codec.encode_prompt(text, add_special_tokens=False)
        return self._plain_chat(turns)

    def _plain_chat(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """ChatML where the vocabulary has it, else turns as paragraphs."""
        start, end = self.codec.token_id("<|im_start|>"), self.codec.token_id("<|im_end|>")
        encode = self.codec.encode
        if start is None or end is None:
            return encode("".join(f"{turn['role']}: {turn['content']}\n\n" for turn in turns) + "assistant:")
        ids: list[int] = []
        for turn in turns:
            ids += [start, *encode(f"{turn['role']}\n{turn['content']}"), end, *encode("\n")]
        return [*ids, start, *encode("assistant\n")]

    def _split(self, ids: list[int]) -> tuple[list[int], list[int]] | None:
        """What stands before and after the cursor in a prompt that spells fill-in-the-middle tokens.

        Other files in front of it count as standing before.
        """
        fim = self.fim
        if fim is None or fim.prefix not in ids or fim.suffix not in ids:
            return None
        last = len(ids) - 1 if fim.middle is not None and ids[-1] == fim.middle else len(ids)
        prefix, suffix = ids.index(fim.prefix), ids.index(fim.suffix)
        if prefix < suffix:
            return [*ids[:prefix], *ids[prefix + 1 : suffix]], ids[suffix + 1 : last]
        return [*ids[:suffix], *ids[prefix + 1 : last]], ids[suffix + 1 : prefix]

    def _hints(
        self, memory: Memory, left: str, right: str, ids: Sequence[int], request: Common
    ) -> Callable[[], DraftHints]:
        expected = request.prediction.as_text() if request.prediction else None
        return lambda: memory.hints(left, right, ids, expected)

    def _predicted(self, request: Common) -> int:
        return len(self.codec.encode(request.prediction.as_text())) if request.prediction else 0

    def _task(
        self,
        ids: Sequence[int],
        request: Common,
        wanted: int,
        caller: Caller,
        *,
        hints: Callable[[], DraftHints],
        document: str | None = None,
        alternatives: int = 0,
    ) -> Task:
        config = self.config
        typing = caller.client is not None
        limit = config.max_predict if wanted < 0 else min(wanted, config.max_predict)
        deadline = config.deadline_s
        if request.deadline_ms is not None:
            deadline = min(deadline, request.deadline_ms / 1000)
        late = request.t_max_predict_ms
        words, stop_ids = self._stops(request)
        return Task(
            tuple(ids),
            StopRules(
                limit,
                self.end_ids | stop_ids,
                words,
                request.n_indent or 0,
                late / 1000 if late is not None and late > 0 else None,
            ),
            self._sampling(request),
            hints,
            client=caller.client,
            document=None if caller.explicit else document,
            deadline_s=deadline,
            stale_s=config.stale_s if typing else None,
            warm=wanted == 0,
            reuse=request.cache_prompt is not False,
            alternatives=alternatives,
            drafting=request.speculative is not False,
        )

    def _sampling(self, request: Common) -> Sampling:
        seed = request.seed if request.seed is not None and request.seed >= 0 else 0
        return Sampling(
            request.temperature if request.temperature is not None else 0.0,
            request.top_k or 0,
            request.top_p if request.top_p is not None else 1.0,
            request.min_p or 0.0,
            normalise_chain(request.samplers),
            seed,
        )

    def _stops(self, request: Common) -> tuple[tuple[str, ...], frozenset[int]]:
        """Stop strings; one that spells a control token can only be seen as a token."""
        given = [request.stop] if isinstance(request.stop, str) else request.stop or []
        words, ids = [], set()
        for stop in given:
            token_id = self.codec.token_id(stop)
            if token_id is not None and self.codec.encode(stop) != [token_id]:
                ids.add(token_id)
            elif stop:
                words.append(stop)
        return tuple(words), frozenset(ids)
