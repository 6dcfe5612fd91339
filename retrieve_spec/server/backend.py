"""The door between the server and a model: a cache that grows and shrinks, prefill by chunks, runs of accepted tokens.

`Backend` is all the engine knows of a model; `HuggingFaceBackend` fills it with `retrieve_spec.generate_stream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.server.branches import Branch, BranchCollector
from retrieve_spec.server.samplers import Sampling

_MEASURED = 256


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

    def after(self, token_ids: Sequence[int]) -> DraftHints:
        """The same, once some tokens have been said."""
        return replace(self, context=(*self.context, *token_ids)) if self.context and token_ids else self


@dataclass(slots=True)
class PassFigures:
    """What decoding cost: forward passes, draft nodes, accepted draft tokens by source."""

    passes: int = 0
    drafted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens of all sources."""
        return sum(self.accepted_by_source.values())

    def __add__(self, other: PassFigures) -> PassFigures:
        sources = dict(self.accepted_by_source)
        for source, count in other.accepted_by_source.items():
            sources[source] = sources.get(source, 0) + count
        return PassFigures(self.passes + other.passes, self.drafted + other.drafted, sources)


@dataclass(frozen=True, slots=True)
class ReadingCost:
    """What a token of a prompt costs: seconds to read it, bytes of its keys and values."""

    seconds: float
    bytes: float


class Backend(Protocol):
    """What the engine asks of a model; all calls come from one thread."""

    n_ctx: int
    """Positions of the model."""

    def new_cache(self) -> Any:
        """An empty key-value cache."""

    def cache_length(self, cache: Any) -> int:
        """Tokens whose keys and values a cache holds."""

    def crop(self, cache: Any, keep: int) -> bool:
        """Keep the first tokens of a cache; False if this kind of cache cannot be cut."""

    def clone(self, cache: Any) -> Any:
        """A copy of a cache."""

    def cache_bytes(self, cache: Any) -> int:
        """Bytes that a cache takes."""

    def prefill(self, cache: Any, token_ids: Sequence[int]) -> None:
        """Read further tokens into a cache, in one pass."""

    def decode(
        self, cache: Any, prompt_ids: Sequence[int], *, max_tokens: int, end_ids: frozenset[int], sampling: Sampling,
        hints: DraftHints, branches: bool = False,
    ) -> Iterator[Sequence[int]]:  # fmt: skip
        """Runs of accepted tokens, one per pass; the cache already holds a proper prefix of the prompt.

        With ``branches`` it is noted what verification showed beside the path that was taken.
        """

    def figures(self) -> PassFigures:
        """What the last `decode` cost."""

    def branches(self) -> list[Branch]:
        """What the last `decode` with ``branches`` noted, the likeliest first; nothing where nothing was drafted."""

    def forget(self, scope: str) -> None:
        """Drop what was learned from the text of a scope, caches and sessions aside (their owners drop those)."""


class HuggingFaceBackend:
    """A Hugging Face causal language model behind the engine's door.

    Parameters
    ----------
    model
        A model prepared by `retrieve_spec.accelerate`.
    tokenizer
        Its tokenizer.
    ctx_size
        Positions used at most; 0 for all the model has.
    """

    def __init__(self, model: Any, tokenizer: Any, ctx_size: int = 0) -> None:
        from retrieve_spec import generate_stream

        self.model = model
        self.tokenizer = tokenizer
        self._stream = generate_stream
        self._infill: Any = None
        self._scopes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._branches = BranchCollector(follow=True)
        config = model.config.get_text_config()
        self.n_ctx = int(getattr(config, "max_position_embeddings", 0) or 4096)
        if ctx_size:
            self.n_ctx = min(self.n_ctx, ctx_size)

    def set_infill(self, factory: Any) -> None:
        """Give the factory of the processor for the ``infill`` sampler (`samplers.make_infill_processor`)."""
        self._infill = factory

    def new_cache(self) -> Any:
        """An empty key-value cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def cache_length(self, cache: Any) -> int:
        """Tokens whose keys and values a cache holds."""
        return int(cache.get_seq_length())

    def crop(self, cache: Any, keep: int) -> bool:
        """Keep the first tokens of a cache; False if this kind of cache cannot be cut."""
        surplus = self.cache_length(cache) - keep
        if surplus <= 0:
            return surplus == 0
        if not all(type(layer).__name__ == "DynamicLayer" for layer in cache.layers):
            return False  # windowed and recurrent layers forget what a cut would need
        cache.crop(-surplus)
        return True

    def clone(self, cache: Any) -> Any:
        """A copy of a cache."""
        import copy

        return copy.deepcopy(cache)

    def cache_bytes(self, cache: Any) -> int:
        """Bytes that a cache takes, what its tensors are views of included."""
        held: dict[int, int] = {}
        for layer in cache.layers:
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())

    def measure(self) -> ReadingCost:
        """What reading a prompt costs, by reading one twice as long as is measured."""
        count = max(1, min(_MEASURED, self.n_ctx // 4))
        ids = [1 + number % max(1, len(self.tokenizer) - 1) for number in range(count)]
        cache = self.new_cache()
        self.prefill(cache, ids)
        begun = perf_counter()
        self.prefill(cache, ids)
        return ReadingCost((perf_counter() - begun) / count, self.cache_bytes(cache) / (2 * count))

    def prefill(self, cache: Any, token_ids: Sequence[int]) -> None:
        """Read further tokens into a cache, in one pass."""
        import torch

        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=self.model.device)
        with torch.inference_mode():
            self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def decode(
        self, cache: Any, prompt_ids: Sequence[int], *, max_tokens: int, end_ids: frozenset[int], sampling: Sampling,
        hints: DraftHints, branches: bool = False,
    ) -> Iterator[Sequence[int]]:  # fmt: skip
        """Runs of accepted tokens, one per pass; the cache already holds a proper prefix of the prompt."""
        import torch

        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=self.model.device)
        options: dict[str, Any] = {"max_new_tokens": max_tokens, **sampling.generate_kwargs(self._infill)}
        if end_ids:
            options["eos_token_id"] = sorted(end_ids)
        if hints.enabled:
            if hints.prediction:
                options["prediction"] = list(hints.prediction)
            if hints.context:
                options["context_ids"] = hints.context
        else:
            options["draft"] = "off"
        if branches:
            self._branches = BranchCollector(follow=sampling.greedy)
            options["on_pass"] = self._branches
        if not sampling.greedy:
            options["seed"] = sampling.seed
        if hints.enabled:
            self._draft_for(hints)
        stream = self._stream(self.model, ids, tokenizer=self.tokenizer, past_key_values=cache, **options)
        try:
            for run in stream:
                yield run.token_ids.tolist()
        finally:
            stream.close()

    def _draft_for(self, hints: DraftHints) -> None:
        """Let the drafter see the text of one scope only: its session, and no logits of another's text."""
        drafter: Any = self.model.speculation.drafter()
        if hasattr(drafter, "session"):
            drafter.session = hints.session
        if hasattr(drafter, "asker"):
            drafter.asker = hints.scope or None
        if drafter is not None:
            if self._scopes.get(drafter, hints.scope) != hints.scope:
                self._forget_logits(drafter)
            self._scopes[drafter] = hints.scope

    def forget(self, scope: str) -> None:
        """Drop what was learned from the text of a scope, and all phrases: whose they are is not kept."""
        for drafter, last in list(self._scopes.items()):
            if last == scope:
                self._forget_logits(drafter)
        calibration = getattr(self.model.speculation.drafter(), "calibration", None)
        if isinstance(calibration, Calibration):
            calibration.forget()

    @staticmethod
    def _forget_logits(drafter: Any) -> None:
        recycling = getattr(drafter, "recycling", None)
        if recycling is not None:
            recycling.reset()

    def figures(self) -> PassFigures:
        """What the last `decode` cost."""
        last = self.model.speculation.last
        if last is None:
            return PassFigures()
        return PassFigures(last.passes, last.nodes, dict(last.accepted_by_source))

    def branches(self) -> list[Branch]:
        """What the last `decode` with ``branches`` noted, the likeliest first."""
        return self._branches.likeliest()
