"""Hierarchy Drafting's rule: short guesses from the context, then from model outputs, then from a corpus."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.published.base import CONTEXT, COPY_P, EXACT, SESSION, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.published.corpus import Corpus, Places, need_store
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

CHOICES = 64
"""Prefixes looked at per database, as in REST."""
Gram = tuple[int, ...]
Follow = Callable[[Any], list[tuple[int, int, Any]]]
"""State → (token, count, state behind it) of its continuations."""


def frequent_grams(follow: Follow, start: Any, length: int) -> Iterator[tuple[Gram, int]]:
    """Continuations of up to `length` tokens with their counts, most frequent first, of equals the smaller tokens.

    The `CHOICES` most frequent prefixes are looked at. A continuation is shorter than `length` where nothing follows
    it, or where none of its prolongations is among them; these come last.
    """
    front: list[tuple[int, Gram, Any]] = [(0, (), start)]
    cut: dict[Gram, int] = {}
    for _ in range(CHOICES + 1):
        if not front:
            break
        count, gram, state = heapq.heappop(front)
        cut.pop(gram[:-1], None)
        below = follow(state) if len(gram) < length else []
        if gram and not below:
            yield gram, -count
        elif gram:
            cut[gram] = -count
        for token, n, behind in below:
            heapq.heappush(front, (-n, (*gram, token), behind))
    yield from sorted(cut.items(), key=lambda item: (-item[1], item[0]))


class Hierarchy(PublishedDrafter):
    """Preset `hierarchy`: guesses of four tokens from three databases, the most local first, until there are seven.

    Follows Hierarchy Drafting (Cho et al. 2025). Context database: the newest seven 4-grams that followed the last
    token in the prompt and the output. Model database: the seven most frequent 4-grams that followed it in the model's
    own answers. Statistics database: a store, looked up with the last two tokens, most frequent 4-grams first.

    The model's answers are those of the session, when one is given, then the first store, when two or more are given;
    the other stores are the statistics database.

    Differs: no Jacobi window fills the context database; guesses that begin alike share nodes; a guess is not padded
    with random tokens where a document ends; all of a store is looked up instead of the 100,000 most frequent 5-grams.
    """

    guesses = 7
    length = 4
    previous = 2
    reads = 64

    def __init__(self, datastores: Sequence[Datastore], session: SessionMemory | None = None) -> None:
        super().__init__(session)
        need_store(datastores, "hierarchy")
        split = 1 if len(datastores) > 1 else 0
        self._answers = Corpus(datastores[:split])
        self._statistics = Corpus(datastores[split:])

    def _reset(self) -> None:
        self._newest: dict[int, dict[Gram, None]] = {}

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        lead = max(0, len(self.text) - len(token_ids) - self.length)
        tokens = self.text.ids[lead:].tolist()
        for i in range(len(tokens) - self.length):
            known = self._newest.setdefault(tokens[i], {})
            gram = tuple(tokens[i + 1 : i + 1 + self.length])
            known.pop(gram, None)
            known[gram] = None
            if len(known) > self.guesses:
                del known[next(iter(known))]

    def _draft(self, builder: TreeBuilder) -> None:
        taken: dict[Gram, None] = {}
        for grams, source in ((self._local, CONTEXT), (self._session, SESSION), (self._stored, EXACT)):
            for gram, p in grams():
                if len(taken) == self.guesses:
                    return
                if gram not in taken:
                    taken[gram] = None
                    builder.add_run(ROOT, gram, source, p / COPY_P)  # p is the chance of the first token

    def _local(self) -> Iterator[tuple[Gram, float]]:
        known = self._newest.get(int(self.text.ids[-1]), {})
        for gram in reversed(known):
            yield gram, 1 / (len(known) + 1)

    def _session(self) -> Iterator[tuple[Gram, float]]:
        if self.session is None:
            return
        token = int(self.text.ids[-1])
        found = [pair for a in self.session.automata for pair in self._of(a, token)]
        yield from self._shares(iter(sorted(found, key=lambda pair: -pair[1])))

    def _of(self, automaton: SuffixAutomaton, token: int) -> list[tuple[Gram, int]]:
        """The most frequent continuations of a token in an automaton, with their counts."""
        state, matched = automaton.advance(0, 0, token)
        if not matched:
            return []

        def follow(at: int) -> list[tuple[int, int, Any]]:
            tokens, counts, _ = automaton.successors(at)
            pairs = zip(tokens.tolist(), counts.tolist(), strict=True)
            return [(t, n, automaton.advance(at, 1, t)[0]) for t, n in pairs]

        return self._top(frequent_grams(follow, state, self.length))

    def _stored(self) -> Iterator[tuple[Gram, float]]:
        ids = self.text.ids
        for corpus, context in ((self._answers, 1), (self._statistics, self.previous)):
            places, depth = corpus.longest(ids, context)
            if depth == context:
                yield from self._shares(iter(self._top(self._of_store(corpus, places, depth))))

    def _of_store(self, corpus: Corpus, places: Places, depth: int) -> Iterator[tuple[Gram, int]]:
        """Continuations of a match in a store with their counts, most frequent first."""

        def follow(at: tuple[Places, int, int]) -> list[tuple[int, int, Any]]:
            above, d, token = at
            here = corpus.narrow(above, d - 1, token) if token >= 0 else above
            return [(t, n, (here, d + 1, t)) for t, n in corpus.next_counts(here, d, self.reads).items()]

        return frequent_grams(follow, (places, depth, -1), self.length)

    def _top(self, grams: Iterator[tuple[Gram, int]]) -> list[tuple[Gram, int]]:
        return [pair for pair, _ in zip(grams, range(self.guesses), strict=False)]

    def _shares(self, grams: Iterator[tuple[Gram, int]]) -> Iterator[tuple[Gram, float]]:
        found = list(grams)[: self.guesses]
        total = sum(count for _, count in found) + 1
        for gram, count in found:
            yield gram, count / total
