"""A model without weights: what it says is a function of the prompt, and its cache is the list of tokens it read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from retrieve_spec.server.backend import DraftHints, PassFigures
from retrieve_spec.server.branches import Branch
from retrieve_spec.server.samplers import Sampling


class ScriptedBackend:
    def __init__(
        self, script: Callable[[Sequence[int]], list[int]], *, n_ctx: int = 4096, run: int = 2, vocab: int = 8192
    ) -> None:
        self.script, self.n_ctx, self.run, self.vocab = script, n_ctx, run, vocab
        self.passes = 0
        self.prefilled: list[int] = []
        self.prompts: list[tuple[int, ...]] = []
        self.hints: list[DraftHints] = []
        self.gate: threading.Semaphore | None = None
        self.fail = False
        self.beside: list[Branch] = []
        self._figures = PassFigures()

    def new_cache(self) -> list[int]:
        return []

    def cache_length(self, cache: list[int]) -> int:
        return len(cache)

    def crop(self, cache: list[int], keep: int) -> bool:
        assert keep <= len(cache)
        del cache[keep:]
        return True

    def clone(self, cache: list[int]) -> list[int]:
        return list(cache)

    def cache_bytes(self, cache: list[int]) -> int:
        return 8 * len(cache)

    def _pass(self) -> None:
        if self.gate is not None:
            self.gate.acquire()
        self.passes += 1

    def prefill(self, cache: list[int], token_ids: Sequence[int]) -> None:
        self._pass()
        self.prefilled.append(len(token_ids))
        cache.extend(token_ids)

    def decode(
        self,
        cache: list[int],
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        end_ids: frozenset[int],
        sampling: Sampling,
        hints: DraftHints,
        branches: bool = False,
    ) -> Iterator[Sequence[int]]:
        assert list(prompt_ids[: len(cache)]) == cache, "the cache does not hold the beginning of the prompt"
        assert len(cache) < len(prompt_ids)
        if self.fail:
            raise RuntimeError("out of memory")
        self.prompts.append(tuple(prompt_ids))
        self.hints.append(hints)
        self._figures = PassFigures()
        said = self.script(prompt_ids)[:max_tokens]
        step = self.run if hints.enabled else 1
        cache.extend(prompt_ids[len(cache) :])
        for at in range(0, len(said), step):
            self._pass()
            run = said[at : at + step]
            if at:
                cache.append(said[at - 1])
            cache.extend(run[:-1])
            self._figures.passes += 1
            self._figures.drafted += step - 1
            self._figures.accepted_by_source["prediction"] = (
                self._figures.accepted_by_source.get("prediction", 0) + len(run) - 1
            )
            yield run

    def figures(self) -> PassFigures:
        return self._figures

    def branches(self) -> list[Branch]:
        return self.beside

    def forget(self, scope: str) -> None:
        self.forgotten = scope


class Collector:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.done = threading.Event()

    def __call__(self, event: object) -> None:
        from retrieve_spec.server.jobs import Completion

        self.events.append(event)
        if isinstance(event, Completion):
            self.done.set()

    def result(self, timeout: float = 60.0):
        assert self.done.wait(timeout), "no completion came"
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events[:-1])
