"""A Hugging Face causal language model behind the server's door: every text is a sequence of the model's one engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from retrieve_spec.engine.engine import Engine
from retrieve_spec.engine.rows import CopiesRows
from retrieve_spec.engine.sequence import Sequence as Decoded
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.engine.threads import using
from retrieve_spec.generation.streams import generate_stream, open_sequence
from retrieve_spec.server.jobs import DraftHints, PassFigures
from retrieve_spec.server.sampling import Beginnings, Grammars, Sampling

_MEASURED = 256
_PIECE = 20
"""Tokens of a prompt that are read beside others' while it is tried out what requests need."""
_WARM_TOKENS = 4
_NOBODY = "\0"
"""A scope that is no user's."""


class SharedText:
    """A text that shares passes of the engine with others."""

    def __init__(self, sequence: Decoded, speculation: Speculation) -> None:
        self.sequence, self._speculation = sequence, speculation

    def bound(self, *, piece: int, nodes: int) -> None:
        """Read so many tokens of the prompt, and draft so many nodes, in the next pass at most."""
        self.sequence.limits.prefill_chunk, self.sequence.limits.most_nodes = piece, nodes

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

    def copy_cache(self) -> Any:
        """A copy of its cache as it is between two passes, or None."""
        verifier = self.sequence.verifier
        return verifier.copy_rows() if isinstance(verifier, CopiesRows) and not self.over else None

    @property
    def figures(self) -> PassFigures:
        """What it has cost so far."""
        report = self.sequence.log.summary()
        return PassFigures(report.passes, report.nodes, dict(report.accepted_by_source))

    def close(self) -> None:
        """End the text and hand its cache back."""
        self._speculation.engine.leave(self.sequence)
        self._speculation.ended(self.sequence)


class LoneText:
    """A text that the model's original `generate` decodes, all in one step."""

    unread = 0

    def __init__(self, stream: Any) -> None:
        self._stream, self._taken = stream, list[int]()
        self._error: Exception | None = None
        self.over = False

    def bound(self, *, piece: int, nodes: int) -> None:
        """Nothing: its one step is the original's."""

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
    def figures(self) -> PassFigures:
        """What it has cost so far."""
        report = self._stream.report
        return PassFigures() if report is None else PassFigures(report.passes, report.nodes)

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
        config = model.config.get_text_config()
        self.n_ctx = int(getattr(config, "max_position_embeddings", 0) or 4096)
        if ctx_size:
            self.n_ctx = min(self.n_ctx, ctx_size)

    def guide(self, infill: Any, grammars: Grammars, beginnings: Beginnings) -> None:
        """Give what makes logits processors: of ``infill`` samplers, of grammars, of texts that were begun."""
        self._infill, self._grammars = infill, grammars
        self._beginnings = beginnings if beginnings.possible else None  # nothing is begun then, to warm up neither

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

    def measure(self) -> float:
        """Seconds that a token of a prompt takes to read, measured behind as many tokens."""
        ids, cache = self._some_ids(), self.new_cache()
        count = len(ids)
        with using(self._engine.threads):
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
        """Read further tokens into a cache, in one pass."""
        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=self.model.device)
        with torch.no_grad():  # a state that was written in inference mode could not go on outside of it
            self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})

    def decode(
        self, cache: Any, prompt_ids: Sequence[int], *, max_tokens: int, end_ids: frozenset[int], sampling: Sampling,
        hints: DraftHints,
    ) -> Text:  # fmt: skip
        """A text that goes on behind a prompt, of which the cache holds a proper beginning; no pass is run yet."""
        ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=self.model.device)
        guides = []
        if sampling.begun and self._beginnings is not None:
            guides.append(self._beginnings.processor(sampling.begun, len(prompt_ids)))
        if sampling.grammar and self._grammars is not None:
            guides.append(self._grammars.processor(sampling.grammar, len(prompt_ids)))
        options: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            self._cache_name: cache,
            "max_new_tokens": max_tokens,
            "scope": hints.scope,
            **sampling.generate_kwargs(self._infill, guides),
        }
        if end_ids:
            options["eos_token_id"] = sorted(end_ids)
        if hints.enabled:
            options |= {"prediction": list(hints.prediction) or None, "context_ids": hints.context or None}
        else:
            options["draft"] = "off"
        if not sampling.greedy:
            options["seed"] = sampling.seed
        sequence = open_sequence(self.model, ids, on_loan=partial(self._draft_for, hints), **options)
        if sequence is None:
            return LoneText(generate_stream(self.model, ids, **options))
        self._engine.join(sequence)
        return SharedText(sequence, self.model.speculation)

    @property
    def _cache_name(self) -> str:
        return str(self.model.speculation.interface.cache_name)

    @property
    def _engine(self) -> Engine:
        engine: Engine = self.model.speculation.engine
        return engine

    def step(self, texts: Sequence[Text]) -> None:
        """One pass over texts that are not over."""
        if shared := [text.sequence for text in texts if isinstance(text, SharedText)]:
            self._engine.advance(shared)
        for text in texts:
            if isinstance(text, LoneText):
                text.step()

    def _draft_for(self, hints: DraftHints, drafter: Any) -> None:
        """Let a drafter draft from all that the editors of its scope have shown."""
        if hasattr(drafter, "session"):
            drafter.session = hints.session

    def forget(self, scope: str) -> None:
        """Drop what was learned from the text of a scope, and all phrases: whose they are is not kept."""
        self.model.speculation.drafters.forget_scope(scope)
