"""A Hugging Face causal language model behind the server's door: every text is a sequence of the model's one engine.

Its caches serve the scope that filled them and no other: how much of a prompt is cached would tell what somebody else
sent.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import DynamicCache

from retrieve_spec.engine.budget import using
from retrieve_spec.engine.engine import Engine
from retrieve_spec.engine.joining import CallOptions, CopiesRows
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.scheduler import Scheduler, Turn, of_lowest_rank
from retrieve_spec.engine.sequence import Sequence as Decoded
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.errors import ServeError
from retrieve_spec.generation.request import open_sequence
from retrieve_spec.generation.streams import generate_stream
from retrieve_spec.model_layers import max_positions
from retrieve_spec.server.sampling import (
    BeginningProcessor,
    Beginnings,
    Grammars,
    PenaltyProcessor,
    Sampling,
    TokenLogProb,
    TopLogProbSampler,
)

_MEASURED = 256
_PIECE = 20
"""Tokens of a prompt that are read beside others' while it is tried out what requests need."""
_WARM_TOKENS = 4
_NOBODY = "\0"
"""A scope that is no user's."""


@dataclass(frozen=True, slots=True)
class DraftHints:
    """What to draft a completion from, besides the prompt and the stores.

    Attributes
    ----------
    enabled
        False decodes plainly.
    prediction
        Tokens expected to come next.
    context
        What the drafter reads instead of the prompt: texts to draft from, the most relevant last, then the text in
        front of the completion. Empty: the prompt.
    session
        A `retrieve_spec.sources.session.SessionMemory` to draft from and to add the completion to, None for none.
    scope
        Whose text this is: what the model said to somebody else is not drafted from.
    """

    enabled: bool = True
    prediction: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    session: Any = None
    scope: str = ""

    def options(self, sampling: Sampling) -> CallOptions:
        """Return the options of a call that decodes with these hints."""
        return CallOptions(
            draft=None if self.enabled else "off",
            context_ids=np.array(self.context, np.int32) if self.enabled and self.context else None,
            seed=None if sampling.greedy else sampling.seed,
            scope=self.scope,
            session=False if self.session is None else self.session,
        )


class SharedText:
    """A text that shares passes of the engine with others."""

    def __init__(self, sequence: Decoded, speculation: Speculation) -> None:
        self.sequence, self._speculation = sequence, speculation

    @property
    def turn(self) -> Turn:
        """What the scheduler knows of it."""
        return self.sequence.turn

    @property
    def has_news(self) -> bool:
        """Whether a pass has included it since the last `take`, or it has ended."""
        return self.sequence.has_news

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return len(self.sequence.unread)

    @property
    def over(self) -> bool:
        """Whether no pass takes it along any more."""
        return self.sequence.ended

    def take(self) -> list[int]:
        """Tokens that were accepted since the last call; raises what the text failed with."""
        taken: list[int] = []
        while self.sequence.reader.has_pieces:
            taken += self.sequence.reader.take().tolist()
        if self.sequence.error is not None:
            raise self.sequence.error
        return taken

    @property
    def noted(self) -> list[TokenLogProb]:
        """Log-probabilities of all tokens, where they were asked for."""
        sampler = self.sequence.sampler
        return sampler.noted if isinstance(sampler, TopLogProbSampler) else []

    def copy_cache(self) -> Any:
        """A copy of its cache as it is between two passes, or None."""
        verifier = self.sequence.verifier
        return verifier.copy_rows() if isinstance(verifier, CopiesRows) and not self.over else None

    @property
    def report(self) -> GenerationReport:
        """What it has cost so far."""
        return self.sequence.report

    def close(self) -> None:
        """End the text and hand its cache back."""
        self._speculation.engine.leave(self.sequence)
        self._speculation.ended(self.sequence)


class LoneText:
    """A text that the model's original `generate` decodes, all in one step."""

    unread = 0

    def __init__(self, stream: Any, turn: Turn) -> None:
        self.turn = turn
        self._stream, self._taken = stream, list[int]()
        self._error: Exception | None = None
        self.over = False

    @property
    def has_news(self) -> bool:
        """Whether it has been decoded."""
        return self.over

    def step(self) -> None:
        """Decode all of it; what it fails with is its own, as others are in the same pass."""
        try:
            for run in self._stream:
                self._taken += run.token_ids.tolist()
        except Exception as error:
            self._error = error
        self.over = True

    def take(self) -> list[int]:
        """Tokens that were accepted since the last call; raises what the text failed with."""
        if self._error is not None:
            raise self._error
        taken, self._taken = self._taken, []
        return taken

    def copy_cache(self) -> Any:
        """None."""

    @property
    def report(self) -> GenerationReport:
        """What it has cost so far."""
        return self._stream.report or GenerationReport()

    def close(self) -> None:
        """End the text."""
        self._stream.close()


Text = SharedText | LoneText


class Backend:
    """An accelerated model behind the engine's door; of its positions ``ctx_size`` are used at most, 0 for all."""

    heals = True

    def __init__(self, model: Any, tokenizer: Any, ctx_size: int = 0) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.token_bytes = int(model.speculation.bytes_per_token)
        self._infill: Any = None
        self._grammars: Grammars | None = None
        self._beginnings: Beginnings | None = None
        self.n_ctx = max_positions(model) or 4096
        if ctx_size:
            self.n_ctx = min(self.n_ctx, ctx_size)

    def guide(self, infill: Any, grammars: Grammars, beginnings: Beginnings) -> None:
        """Give what makes logits processors: of ``infill`` samplers, of grammars, of texts that were begun."""
        self._infill, self._grammars = infill, grammars
        self._beginnings = beginnings if beginnings.possible else None  # nothing is begun then, to warm up neither

    def new_cache(self) -> Any:
        """An empty key-value cache."""
        return DynamicCache(config=self.model.config)

    def cache_length(self, cache: Any) -> int:
        """Tokens whose keys and values a cache holds."""
        return int(cache.get_seq_length())

    def crop(self, cache: Any, keep: int) -> bool:
        """Keep the first tokens of a cache; False if this kind of cache cannot be cut."""
        surplus = self.cache_length(cache) - keep
        if surplus <= 0:
            return surplus == 0
        if not can_cut(cache):
            return False
        cache.crop(-surplus)
        return True

    def clone(self, cache: Any) -> Any:
        """A copy of a cache."""
        return copy.deepcopy(cache)

    def cache_bytes(self, cache: Any) -> int:
        """Bytes that a cache takes, states of recurrent layers and what its tensors are views of included."""
        held: dict[int, int] = {}
        for layer in cache.layers:
            kept = [part.values() if isinstance(part, dict) else [part] for part in vars(layer).values()]
            for tensor in chain.from_iterable(kept):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())

    def measure(self) -> float:
        """Seconds that a token of a prompt takes to read, measured after as many tokens."""
        ids, cache = self._some_ids(), self.new_cache()
        count = len(ids)
        self._read(cache, ids)
        begun = perf_counter()
        self._read(cache, ids)
        return (perf_counter() - begun) / count

    def warm_up(self, end_ids: frozenset[int]) -> None:
        """Answer requests of every kind, several at once, so that no client's is the first that needs some kernel."""
        ids, cache = self._some_ids(), self.new_cache()
        self._read(cache, ids)
        for more in (ids[:1], ids[:_PIECE]):
            texts = [
                self.decode(
                    self.clone(cache), ids + more, max_tokens=_WARM_TOKENS, end_ids=end_ids, sampling=sampling,
                    hints=DraftHints(enabled, scope=_NOBODY),
                )
                for sampling in (Sampling(), Sampling(begun=" "), Sampling(temperature=0.8, top_p=0.9))
                for enabled in (True, False)
            ]  # fmt: skip
            while under_way := [text for text in texts if not text.over]:
                self.step(under_way)
                for text in under_way:
                    text.take()  # a text waits for its reader
            for text in texts:
                text.close()
        self.forget(_NOBODY)

    def _some_ids(self) -> list[int]:
        """A prompt that says nothing."""
        count = max(1, min(_MEASURED, self.n_ctx // 4))
        return [1 + number % max(1, len(self.tokenizer) - 1) for number in range(count)]

    def _read(self, cache: Any, token_ids: Sequence[int]) -> None:
        """Read further tokens into a cache."""
        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=self.model.device)
        with using(self._engine.threads), torch.no_grad():  # what inference mode has written cannot be gone on with
            read = self.model.base_model(input_ids=ids, use_cache=True, **{self._cache_name: cache})
        read.last_hidden_state.cpu()  # an accelerator has done it then

    def decode(
        self, cache: Any, prompt_ids: Sequence[int], *, max_tokens: int, end_ids: frozenset[int], sampling: Sampling,
        hints: DraftHints, turn: Turn | None = None,
    ) -> Text:  # fmt: skip
        """Return a text that continues a prompt, whose proper beginning the cache holds; no pass is run yet."""
        turn = turn or Turn()
        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=self.model.device)
        arguments: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            self._cache_name: cache,
            "max_new_tokens": max_tokens,
            **sampling.generate_kwargs(self._infill, self._guides(sampling, len(prompt_ids))),
        }
        if end_ids:
            arguments["eos_token_id"] = sorted(end_ids)
        options = hints.options(sampling)
        prediction = list(hints.prediction) if hints.enabled and hints.prediction else None
        sequence = open_sequence(self.model, ids, options, prediction=prediction, **arguments)
        if sequence is None and sampling.logprobs is not None:
            raise ServeError("to tell log-probabilities", "this model decodes by itself", "Leave logprobs out.")
        if sequence is None:
            draft, seed, scope = options.draft, options.seed, options.scope
            return LoneText(generate_stream(self.model, ids, draft=draft, seed=seed, scope=scope, **arguments), turn)
        sequence.turn = turn
        if sampling.logprobs is not None:
            sequence.sampler = TopLogProbSampler(sequence.sampler, sampling.logprobs)
        self._engine.join(sequence)
        return SharedText(sequence, self.model.speculation)

    def _guides(self, sampling: Sampling, prompt: int) -> list[Any]:
        """The logits processors that a request asks for, for a prompt of so many tokens."""
        guides: list[Any] = []
        if sampling.presence or sampling.frequency:
            guides.append(PenaltyProcessor(sampling.presence, sampling.frequency, prompt))
        if sampling.begun and self._beginnings is not None:
            guides.append(BeginningProcessor(self._beginnings, sampling.begun, prompt))
        if sampling.grammar and self._grammars is not None:
            guides.append(self._grammars.processor(sampling.grammar))
        return guides

    @property
    def _cache_name(self) -> str:
        return str(self.model.speculation.interface.cache_name)

    @property
    def _engine(self) -> Engine:
        engine: Engine = self.model.speculation.engine
        return engine

    def step(self, texts: Sequence[Text]) -> None:
        """One pass over those of the lowest rank of texts that are not over."""
        texts = of_lowest_rank(texts)
        if shared := [text.sequence for text in texts if isinstance(text, SharedText)]:
            self._engine.advance(shared)
        for text in texts:
            if isinstance(text, LoneText):
                text.step()

    def schedule_with(self, scheduler: Scheduler) -> None:
        """Let a scheduler decide what the model's passes include."""
        self._engine.scheduler = scheduler

    def forget(self, scope: str) -> None:
        """Drop what was learned from the text of a scope, and all phrases: whose they are is not kept."""
        self.model.speculation.drafters.forget(scope)


def can_cut(cache: Any) -> bool:
    """Whether the end of a cache can be taken away; windowed and recurrent layers forget what a cut would need."""
    return all(type(layer).__name__ == "DynamicLayer" for layer in getattr(cache, "layers", ()))


COPY_FROM = 64
"""A shared beginning of at least so many tokens is copied rather than read again."""


@dataclass(slots=True, eq=False)
class Slot:
    """One cache, the (n,) int64 tokens whose keys and values it holds, and whose they are.

    While a slot is `held` by a task under way nobody else works on it, and what it holds may only be `copied`, if at
    all; one that was `dropped` is not kept any longer than that. `continuation` is what the cache held after the prompt
    that it was taken for: said there before, or part of a longer prompt. One that is `settled` is what later prompts
    are likely to go on from, and is copied for each.
    """

    cache: Any
    scope: str = ""
    token_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    used: int = 0
    size: int = 0
    held: bool = True
    dropped: bool = False
    settled: bool = False
    copied: Callable[[], Any] | None = None
    continuation: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def common_prefix(a: ArrayLike, b: ArrayLike) -> int:
    """Length of the longest common prefix of two token sequences."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class SlotPool:
    """A fixed number of caches besides those that are worked on, reused by longest common prefix."""

    def __init__(self, backend: Backend, size: int, most_bytes: int = 2 << 30) -> None:
        self._backend = backend
        self._size, self._most_bytes = size, most_bytes
        self._slots: list[Slot] = []
        self._ticks = 0

    def take(self, prompt_ids: Sequence[int], scope: str = "", *, reuse: bool = True) -> tuple[Slot, int]:
        """Hold a cache with the beginning of a prompt in it; how many tokens of it (at most all but the last)."""
        self._ticks += 1
        prompt = np.asarray(prompt_ids, np.int64)
        best, shared = None, 0
        if reuse:
            for slot in self._slots:
                usable = slot.scope == scope and not slot.dropped and (slot.copied is not None or not slot.held)
                n = common_prefix(slot.token_ids, prompt) if usable else 0
                if not can_cut(slot.cache) and (slot.held or n < len(slot.token_ids) or n == len(prompt)):
                    n = 0
                if n > shared or (n == shared and best is not None and best.held):
                    best, shared = slot, n
        keep = min(shared, len(prompt) - 1)
        continuation = best.token_ids[len(prompt) :] if best is not None and shared == len(prompt) else prompt[:0]
        slot, keep = self._prepare(best, keep, scope)
        slot.token_ids, slot.continuation = prompt[:keep], continuation
        slot.used, slot.held = self._ticks, True
        self._shrink()
        return slot, keep

    def _prepare(self, best: Slot | None, keep: int, scope: str) -> tuple[Slot, int]:
        if best is not None and keep > 0:
            best.used = self._ticks
            continues = 2 * keep >= len(best.token_ids) and not (best.held or best.settled)
            if continues:
                if self._backend.crop(best.cache, keep):
                    return best, keep
                self.drop(best)
            elif keep >= COPY_FROM:
                copied = best.copied() if best.copied is not None else self._backend.clone(best.cache)
                if copied is not None and self._backend.crop(copied, keep):
                    return self._fresh(copied, scope), keep
        return self._fresh(self._backend.new_cache(), scope), 0

    def _fresh(self, cache: Any, scope: str) -> Slot:
        slot = Slot(cache, scope)
        self._slots.append(slot)
        return slot

    def settle(self, slot: Slot, token_ids: Sequence[int]) -> None:
        """Keep a copy of a cache as it is now, which holds these tokens."""
        twin = self._fresh(self._backend.clone(slot.cache), slot.scope)
        twin.token_ids, twin.size = np.asarray(token_ids, np.int64), self._backend.cache_bytes(twin.cache)
        twin.used, twin.held, twin.settled = self._ticks, False, True
        self._shrink()

    def _shrink(self) -> None:
        """Let go of what is too much: of the scope that keeps most caches the one that was used longest ago."""
        while free := [slot for slot in self._slots if not slot.held]:
            if len(free) <= self._size and sum(slot.size for slot in free) <= self._most_bytes:
                return
            kept = Counter(slot.scope for slot in free)
            most = max(kept.values())
            self.drop(min((slot for slot in free if kept[slot.scope] == most), key=lambda slot: slot.used))

    def release(self, slot: Slot, token_ids: Sequence[int] | None) -> None:
        """Give a cache back that holds a prefix of these tokens, as long as it is; None: it is not to be kept."""
        slot.held, slot.copied = False, None
        length, most = (0, 0) if token_ids is None else (self._backend.cache_length(slot.cache), len(token_ids))
        if token_ids is None or slot.dropped or (length > most and not self._backend.crop(slot.cache, most)):
            self.drop(slot)
        else:
            slot.token_ids = np.asarray(token_ids[:length], np.int64)
            slot.size = self._backend.cache_bytes(slot.cache)
        self._shrink()

    def drop(self, slot: Slot) -> None:
        """Forget a cache, at the latest when it is given back."""
        slot.dropped = True
        slot.token_ids = slot.token_ids[:0]
        if not slot.held:
            self._slots = [other for other in self._slots if other is not slot]

    def forget(self, scope: str) -> int:
        """Forget all caches of a scope; how many there were."""
        mine = [slot for slot in self._slots if slot.scope == scope and not slot.dropped]
        for slot in mine:
            self.drop(slot)
        return len(mine)

    def count(self, scope: str) -> int:
        """Caches kept of a scope."""
        return sum(slot.scope == scope and not slot.dropped for slot in self._slots)

    def clear(self) -> None:
        """Forget all caches."""
        for slot in list(self._slots):
            self.drop(slot)
