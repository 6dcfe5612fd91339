"""The model as the server uses it: every text is a sequence of the model's one engine.

A cache is reused within its scope only, because the number of cached tokens would reveal another user's prompts.
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
from retrieve_spec.engine.first_passes import learn_bigrams
from retrieve_spec.engine.joining import CallOptions, CopiesRows
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.scheduler import Scheduler, Turn, of_lowest_rank
from retrieve_spec.engine.sequence import Sequence as Decoded
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.generation.streams import generate_stream
from retrieve_spec.generation.templates import Templates
from retrieve_spec.model_layers import max_positions
from retrieve_spec.server.guard import UNSUPPORTED, Refusal
from retrieve_spec.server.sampling import (
    BeginningProcessor,
    Beginnings,
    Grammars,
    PenaltyProcessor,
    RecentPenaltyProcessor,
    Sampling,
    TokenLogProb,
    TopLogProbSampler,
)
from retrieve_spec.verify.interface import input_device

_MEASURED = 256
_PIECE = 20
"""Tokens of a prompt that is read beside others, while requests of every kind are tried."""
_WARM_TOKENS = 4
_NOBODY = "\0"
"""A scope of no user."""


@dataclass(frozen=True, slots=True)
class DraftHints:
    """Sources of drafts for one completion, besides the prompt and the stores.

    Attributes
    ----------
    enabled
        False turns drafting off.
    prediction
        Tokens expected to come next.
    context
        Tokens that the drafter reads instead of the prompt: texts to draft from, the most relevant last, then the
        text before the completion. Empty: the prompt.
    session
        A `retrieve_spec.sources.session.SessionMemory` to draft from, to which the completion is added, or None.
    scope
        The user; answers to other users are not drafted from.
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
            prediction=list(self.prediction) if self.enabled and self.prediction else None,
            seed=None if sampling.greedy else sampling.seed,
            scope=self.scope,
            session=False if self.session is None else self.session,
        )


class SharedText:
    """A text that shares the engine's passes with others."""

    def __init__(self, sequence: Decoded, speculation: Speculation) -> None:
        self.sequence, self._speculation = sequence, speculation

    @property
    def turn(self) -> Turn:
        """Its record in the scheduler."""
        return self.sequence.turn

    @property
    def has_news(self) -> bool:
        """Whether a pass included it, or it ended, since the last `take`."""
        return self.sequence.has_news

    @property
    def unread(self) -> int:
        """Number of prompt tokens still to be read."""
        return len(self.sequence.unread)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.sequence.ended

    def take(self) -> list[int]:
        """Return the tokens accepted since the last call, or raise the text's error."""
        taken: list[int] = []
        while self.sequence.reader.has_pieces:
            taken += self.sequence.reader.take().tolist()
        if self.sequence.error is not None:
            raise self.sequence.error
        return taken

    @property
    def noted(self) -> list[TokenLogProb]:
        """Log-probabilities of all tokens; empty unless requested."""
        sampler = self.sequence.sampler
        return sampler.noted if isinstance(sampler, TopLogProbSampler) else []

    def copy_cache(self) -> Any:
        """Return a copy of its cache as of the last pass, or None."""
        verifier = self.sequence.verifier
        return verifier.copy_rows() if isinstance(verifier, CopiesRows) and not self.over else None

    @property
    def report(self) -> GenerationReport:
        """Passes, drafts and times so far."""
        return self.sequence.report

    def close(self) -> None:
        """End the text and return its cache."""
        self._speculation.engine.leave(self.sequence)
        self._speculation.ended(self.sequence)


class LoneText:
    """A text that the model's original `generate` decodes in one step."""

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
        """Decode all of it; an error is kept for `take`, because other texts share the step."""
        try:
            for run in self._stream:
                self._taken += run.token_ids.tolist()
        except Exception as error:
            self._error = error
        self.over = True

    def take(self) -> list[int]:
        """Return the tokens accepted since the last call, or raise the text's error."""
        if self._error is not None:
            raise self._error
        taken, self._taken = self._taken, []
        return taken

    def copy_cache(self) -> Any:
        """Return None: its cache is not accessible."""

    @property
    def report(self) -> GenerationReport:
        """Passes, drafts and times so far."""
        return self._stream.report or GenerationReport()

    def close(self) -> None:
        """End the text."""
        self._stream.close()


Text = SharedText | LoneText


class Backend:
    """An accelerated model, its caches and limits; ``ctx_size`` limits the positions that are used (0: all).

    Attributes
    ----------
    cuts_caches
        Whether the model's caches can be cut.
    """

    heals = True

    def __init__(self, model: Any, tokenizer: Any, ctx_size: int = 0) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.token_bytes = int(model.speculation.bytes_per_token)
        self._infill: Any = None
        self._grammars: Grammars | None = None
        self._beginnings: Beginnings | None = None
        self._templates = Templates(model)
        self._device = input_device(model)
        self.cuts_caches = can_cut(self.new_cache())
        self.n_ctx = max_positions(model) or 4096
        if ctx_size:
            self.n_ctx = min(self.n_ctx, ctx_size)

    def guide(self, infill: Any, grammars: Grammars, beginnings: Beginnings) -> None:
        """Set what makes logits processors: for ``infill`` samplers, grammars and begun words."""
        self._infill, self._grammars = infill, grammars
        self._beginnings = beginnings if beginnings.possible else None  # not used otherwise

    def new_cache(self) -> Any:
        """Return an empty key-value cache."""
        return DynamicCache(config=self.model.config)

    def cache_length(self, cache: Any) -> int:
        """Return the number of tokens in a cache."""
        return int(cache.get_seq_length())

    def crop(self, cache: Any, keep: int) -> bool:
        """Keep the first tokens of a cache; return False if this kind of cache cannot be cut."""
        surplus = self.cache_length(cache) - keep
        if surplus <= 0:
            return surplus == 0
        if not self.cuts_caches:
            return False
        cache.crop(-surplus)
        return True

    def clone(self, cache: Any) -> Any:
        """Return a copy of a cache."""
        return copy.deepcopy(cache)

    def cache_bytes(self, cache: Any) -> int:
        """Return the bytes of a cache, with recurrent states and the storage behind views."""
        held: dict[int, int] = {}
        for layer in cache.layers:
            kept = [part.values() if isinstance(part, dict) else [part] for part in vars(layer).values()]
            for tensor in chain.from_iterable(kept):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())

    def measure(self) -> float:
        """Measure the seconds per token of reading a prompt."""
        ids, cache = self._some_ids(), self.new_cache()
        count = len(ids)
        self._read(cache, ids)
        begun = perf_counter()
        self._read(cache, ids)
        return (perf_counter() - begun) / count

    def warm_up(self, end_ids: frozenset[int]) -> None:
        """Answer requests of every kind, several at once, so that no client waits for a kernel to compile."""
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
                    text.take()  # the text waits for its reader
            for text in texts:
                text.close()
        self.forget(_NOBODY)

    def _some_ids(self) -> list[int]:
        """Return an arbitrary prompt."""
        count = max(1, min(_MEASURED, self.n_ctx // 4))
        return [1 + number % max(1, len(self.tokenizer) - 1) for number in range(count)]

    def _read(self, cache: Any, token_ids: Sequence[int]) -> None:
        """Read further tokens into a cache."""
        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=self.model.device)
        with using(self._engine.threads), torch.no_grad():  # caches written in inference mode cannot be continued
            read = self.model.base_model(input_ids=ids, use_cache=True, **{self._cache_name: cache})
        read.last_hidden_state.cpu()  # waits for the device

    def decode(
        self, cache: Any, prompt_ids: ArrayLike, *, max_tokens: int, end_ids: frozenset[int], sampling: Sampling,
        hints: DraftHints, turn: Turn | None = None,
    ) -> Text:  # fmt: skip
        """Return a text that continues a prompt; the cache contains a proper prefix of it. No pass is run yet."""
        turn = turn or Turn()
        ids = torch.tensor(np.asarray(prompt_ids, np.int64)[None], device=self._device)
        arguments: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "attention_mask": torch.ones_like(ids),  # else `generate` takes padding tokens in a text for padding
            self._cache_name: cache,
            "max_new_tokens": max_tokens,
            **sampling.generate_kwargs(self._infill, self._guides(sampling, ids.shape[1])),
        }
        if end_ids:
            arguments["eos_token_id"] = sorted(end_ids)
        options = hints.options(sampling)
        sequence = self._templates.open(ids, options, **arguments)
        if sequence is None and sampling.logprobs is not None:
            told = "a text that the model's own `generate` writes has no log-probabilities here; leave logprobs out"
            raise Refusal(400, told, UNSUPPORTED)
        if sequence is None:
            draft, seed, scope = options.draft, options.seed, options.scope
            return LoneText(generate_stream(self.model, ids, draft=draft, seed=seed, scope=scope, **arguments), turn)
        sequence.turn = turn
        if sampling.logprobs is not None:
            sequence.sampler = TopLogProbSampler(sequence.sampler, sampling.logprobs)
        self._engine.join(sequence)
        return SharedText(sequence, self.model.speculation)

    def _guides(self, sampling: Sampling, prompt: int) -> list[Any]:
        """Return the logits processors of a request whose prompt has that many tokens."""
        guides: list[Any] = []
        if sampling.recent and sampling.repetition != 1.0:
            guides.append(RecentPenaltyProcessor(sampling.repetition, sampling.recent))
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
        """Run one pass over the texts of the lowest rank."""
        texts = of_lowest_rank(texts)
        if shared := [text.sequence for text in texts if isinstance(text, SharedText)]:
            self._engine.advance(shared)
        for text in texts:
            if isinstance(text, LoneText):
                text.step()

    def learn(self, goes_on: Callable[[], bool]) -> None:
        """Ask the model what follows each token, for later drafts, until `goes_on` is false."""
        learn_bigrams(self.model.speculation, goes_on)

    def schedule_with(self, scheduler: Scheduler) -> None:
        """Set the scheduler of the engine."""
        self._engine.scheduler = scheduler

    def forget(self, scope: str) -> None:
        """Drop what was learned from texts of a scope, and all phrases, which are not kept by scope."""
        self.model.speculation.drafters.forget(scope)


def can_cut(cache: Any) -> bool:
    """Whether a cache can be cut; windowed and recurrent layers cannot restore an earlier state."""
    return all(type(layer).__name__ == "DynamicLayer" for layer in getattr(cache, "layers", ()))


COPY_FROM = 64
"""The shortest common prefix, in tokens, that is copied instead of read again."""


@dataclass(slots=True, eq=False)
class Slot:
    """A cache, the (n,) int64 tokens in it, and the scope that it belongs to.

    Attributes
    ----------
    used, size
        Tick of its last use, and bytes.
    held
        Whether a running task uses it; then others can at most copy it, by `copied`.
    dropped
        Whether it is deleted as soon as it is not held.
    copied
        Returns a copy of a held cache.
    continuation
        Tokens after the prompt that it was taken for: an earlier answer, or the rest of a longer prompt.
    settled
        Whether later prompts are likely to continue it; it is copied for each of them.
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
    """Return the length of the longest common prefix of two token sequences."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class SlotPool:
    """A fixed number of idle caches, reused by longest common prefix."""

    def __init__(self, backend: Backend, size: int, most_bytes: int = 2 << 30) -> None:
        self._backend = backend
        self._size, self._most_bytes = size, most_bytes
        self._slots: list[Slot] = []
        self._ticks = 0

    def take(self, prompt_ids: ArrayLike, scope: str = "", *, reuse: bool = True) -> tuple[Slot, int]:
        """Take a cache with a prefix of the prompt; return it and the prefix's length (less than the prompt's)."""
        self._ticks += 1
        prompt = np.asarray(prompt_ids, np.int64)
        best, shared = None, 0
        if reuse:
            for slot in self._slots:
                usable = slot.scope == scope and not slot.dropped and (slot.copied is not None or not slot.held)
                n = common_prefix(slot.token_ids, prompt) if usable else 0
                if not self._backend.cuts_caches and (slot.held or n < len(slot.token_ids) or n == len(prompt)):
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

    def settle(self, slot: Slot, token_ids: ArrayLike) -> None:
        """Keep a copy of a cache in its current state, with the tokens in it."""
        twin = self._fresh(self._backend.clone(slot.cache), slot.scope)
        twin.token_ids, twin.size = np.asarray(token_ids, np.int64), self._backend.cache_bytes(twin.cache)
        twin.used, twin.held, twin.settled = self._ticks, False, True
        self._shrink()

    def _shrink(self) -> None:
        """Drop caches beyond the limits: the least recently used one of the scope with most caches."""
        while free := [slot for slot in self._slots if not slot.held]:
            if len(free) <= self._size and sum(slot.size for slot in free) <= self._most_bytes:
                return
            kept = Counter(slot.scope for slot in free)
            most = max(kept.values())
            self.drop(min((slot for slot in free if kept[slot.scope] == most), key=lambda slot: slot.used))

    def release(self, slot: Slot, token_ids: NDArray[np.int64] | None) -> None:
        """Take back a cache that contains a prefix of the tokens (of its length); None: do not keep it."""
        slot.held, slot.copied = False, None
        length, most = (0, 0) if token_ids is None else (self._backend.cache_length(slot.cache), len(token_ids))
        if token_ids is None or slot.dropped or (length > most and not self._backend.crop(slot.cache, most)):
            self.drop(slot)
        else:
            slot.token_ids = token_ids[:length]
            slot.size = self._backend.cache_bytes(slot.cache)
        self._shrink()

    def drop(self, slot: Slot) -> None:
        """Drop a cache, or mark it to be dropped when it is returned."""
        slot.dropped = True
        slot.token_ids = slot.token_ids[:0]
        if not slot.held:
            self._slots = [other for other in self._slots if other is not slot]

    def forget(self, scope: str) -> int:
        """Drop all caches of a scope; return their number."""
        mine = [slot for slot in self._slots if slot.scope == scope and not slot.dropped]
        for slot in mine:
            self.drop(slot)
        return len(mine)

    def count(self, scope: str) -> int:
        """Return the number of caches kept for a scope."""
        return sum(slot.scope == scope and not slot.dropped for slot in self._slots)

    def clear(self) -> None:
        """Drop all caches."""
        for slot in list(self._slots):
            self.drop(slot)
