"""Alternatives: further suggestions from branches that a verified draft left aside, each to the end of its line."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import monotonic

from retrieve_spec.server.backend import Backend, DraftHints, Text
from retrieve_spec.server.branches import Branch
from retrieve_spec.server.jobs import Completion, Task
from retrieve_spec.server.slots import Slot, SlotPool, common_prefix
from retrieve_spec.server.stopping import StopRules, StopScanner
from retrieve_spec.server.text import TextCodec

_TOKENS = 32
_SECONDS = 0.25


class Alternatives:
    """Other suggestions for one task.

    A branch that was verified up to the end of its line costs nothing; the others are decoded on from where the tree
    ended, while there is time and the task is not ``over``, nobody waiting any more or its deadline passed.
    """

    def __init__(
        self, backend: Backend, codec: TextCodec, pool: SlotPool, task: Task, over: Callable[[], bool]
    ) -> None:
        self._backend, self._codec, self._pool, self._task = backend, codec, pool, task
        self._over, self._until = over, monotonic() + _SECONDS
        rules = task.rules
        length = _TOKENS if rules.max_tokens < 0 else min(_TOKENS, rules.max_tokens)
        self._rules = StopRules(length, rules.end_ids, rules.words, rules.min_indent, -1.0, rules.begun)

    def of(
        self, branches: Sequence[Branch], slot: Slot, done: Completion, emitted: Sequence[int]
    ) -> Generator[Text, None, list[str]]:
        """Suggestions besides `done`, the likeliest first; `emitted` are the tokens that were decoded for it.

        Yields texts that are to take part in the next pass.
        """
        texts, rules = list[str](), self._rules
        for branch in branches:
            if len(texts) == self._task.alternatives:
                break
            if branch.at >= len(emitted) and branch.at > 0:
                continue
            said = [*emitted[: branch.at], *branch.token_ids]
            if not self._codec.decode(said).startswith(rules.begun):
                continue  # verification looks at what the text must begin with on its path only
            if branch.token_ids[0] in self._rules.end_ids or "\n" in self._codec.decode(emitted[: branch.at]):
                continue
            text = yield from self._finished(slot, said)
            known = [done.text, *texts]
            if text.strip() and not any(other.startswith(text) for other in known):
                texts.append(text)
        return texts

    def _late(self) -> bool:
        return monotonic() > self._until or self._over()

    def _finished(self, slot: Slot, said: list[int]) -> Generator[Text, None, str]:
        """Text of a branch to the end of its line, "" when there is no time for it."""
        scanner = StopScanner(self._codec, self._rules)
        scanner.push(said)
        if not scanner.stopped:
            prompt = [*self._task.prompt_ids, *said]
            keep = min(common_prefix(slot.token_ids, prompt), len(prompt) - 1)
            full = len(prompt) >= self._backend.n_ctx
            if full or self._late() or not self._backend.crop(slot.cache, keep):
                return ""
            yield from self._decode(slot, prompt, scanner)
            if not scanner.stopped:
                return ""
        scanner.finish()
        return scanner.text

    def _decode(self, slot: Slot, prompt: list[int], scanner: StopScanner) -> Generator[Text, None, None]:
        emitted: list[int] = []
        text = self._backend.decode(
            slot.cache,
            prompt,
            max_tokens=self._rules.max_tokens,
            end_ids=self._rules.end_ids,
            sampling=replace(self._task.sampling, begun=""),  # it has been said
            hints=DraftHints(enabled=self._task.drafting, scope=self._task.scope),
        )
        try:
            while not (text.over or scanner.stopped or (emitted and self._late())):
                yield text
                said = text.take()
                emitted += said
                scanner.push(said)
        finally:
            text.close()
            self._pool.settle(slot, [*prompt, *emitted])
