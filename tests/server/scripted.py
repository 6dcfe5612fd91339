"""A model without weights: what it says is a function of the prompt, and its cache is the list of tokens it read."""

import threading
import time
from collections.abc import Callable, Sequence

from waiting import HANG_S

from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.scheduler import Scheduler, Turn
from retrieve_spec.server.backend import DraftHints


class ScriptedBackend:
    cuts_caches = True

    def __init__(
        self, script: Callable[[Sequence[int]], list[int]], *, n_ctx: int = 4096, run: int = 2, pass_s: float = 0.0
    ) -> None:
        self.script, self.n_ctx, self.run, self.pass_s = script, n_ctx, run, pass_s
        self.passes = 0
        self.prefilled: list[int] = []
        self.prompts: list[tuple[int, ...]] = []
        self.hints: list[DraftHints] = []
        self.gate = threading.Semaphore(1 << 30)
        self.fail = False
        self.token_bytes = 8
        self.heals = False
        self.together: list[int] = []

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

    def decode(
        self,
        cache: list[int],
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        hints: DraftHints,
        turn: Turn,
        **_: object,
    ) -> "ScriptedText":
        assert list(prompt_ids[: len(cache)]) == cache, "the cache does not hold the beginning of the prompt"
        assert len(cache) < len(prompt_ids)
        self.hints.append(hints)
        return ScriptedText(self, cache, list(prompt_ids), max_tokens, self.run if hints.enabled else 1, turn)

    def schedule_with(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def step(self, texts: Sequence["ScriptedText"]) -> None:
        self.gate.acquire()
        time.sleep(self.pass_s)
        self.passes += 1
        texts = self.scheduler.next_pass(texts)
        self.together.append(len(texts))
        for text in texts:
            text.go_on()

    def forget(self, scope: str) -> None:
        pass


class ScriptedText:
    """What a scripted model says behind a prompt; the prompt is read by pieces."""

    def __init__(self, backend, cache, prompt, max_tokens, run, turn):
        self.backend, self.cache, self.prompt, self.run, self.turn = backend, cache, prompt, run, turn
        self.max_tokens, self.has_news = max_tokens, False
        self.said, self.at, self.fresh = None, 0, []
        self.report = GenerationReport()

    @property
    def unread(self):
        return len(self.prompt) - len(self.cache) if self.said is None else 0

    @property
    def over(self):
        return self.said is not None and self.at >= len(self.said)

    def go_on(self):
        assert not self.over
        self.has_news, piece = True, self.turn.most_piece
        if self.said is None:
            if self.backend.fail:
                raise RuntimeError("out of memory")
            if piece and self.unread > piece:
                self.backend.prefilled.append(piece)
                self.cache += self.prompt[len(self.cache) :][:piece]
                return
            self.backend.prompts.append(tuple(self.prompt))
            self.said = self.backend.script(self.prompt)[: self.max_tokens]
            self.cache += self.prompt[len(self.cache) :]
        run = self.said[self.at : self.at + self.run]
        if self.at:
            self.cache.append(self.said[self.at - 1])
        self.cache += run[:-1]
        self.at += self.run
        self.fresh += run
        self.report.passes += 1
        self.report.nodes += self.run - 1
        accepted = self.report.accepted_by_source
        accepted["prediction"] = accepted.get("prediction", 0) + len(run) - 1

    def take(self):
        taken, self.fresh, self.has_news = self.fresh, [], False
        return taken

    def copy_cache(self):
        return list(self.cache)

    def close(self):
        pass


class Collector:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.calls: list[int] = []  # events of each call
        self.done = threading.Event()

    def __call__(self, *news: object) -> None:
        from retrieve_spec.server.jobs import Completion

        self.events += news
        self.calls.append(len(news))
        if isinstance(news[-1], Completion):
            self.done.set()

    def result(self):
        assert self.done.wait(HANG_S), "no completion came"
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events[:-1])
