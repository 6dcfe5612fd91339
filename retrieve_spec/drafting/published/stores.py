"""Rules that copy from stores: REST, SAM-Decoding, Hierarchy Drafting, DReSD."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import (
    COPY_P,
    FULL,
    ContextDrafter,
    Gram,
    PublishedDrafter,
    TreeBuilder,
)
from retrieve_spec.drafting.published.logits import TokenRecycling, keep_newest
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.errors import MissingSourceError
from retrieve_spec.kernels.suffix_array import SEPARATOR, sa_longest, sa_narrow, sa_successors
from retrieve_spec.kernels.trie import END
from retrieve_spec.sources import CONTEXT, DENSE, EXACT, SESSION
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.dense import DenseIndexes

if TYPE_CHECKING:
    from retrieve_spec.datastore.segment import Segment
    from retrieve_spec.datastore.store import Datastore

Places = list[tuple[int, int, int]]
"""A match: (number of the segment, first suffix, end of the interval) wherever it occurs."""
Follow = Callable[[Any], Iterable[tuple[int, int, Any]]]
"""State → (token, count, state after it) of its continuations."""
FIRST = 5000
"""Matches read at most per segment, the first in the order of the suffix array, as in REST."""
CHOICES = 64
"""Prefixes that Hierarchy Drafting looks at per database, as in REST."""


class Corpus:
    """Suffix arrays of all segments of some stores as one text to look up.

    Parameters
    ----------
    datastores
        Open stores.
    preset
        The rule that needs one, if it does.

    Raises
    ------
    MissingSourceError
        It needs one, and there is none, or none that keeps its text.
    """

    def __init__(self, datastores: Sequence[Datastore], preset: str = "") -> None:
        self.segments: list[Segment] = [s for store in datastores for s in store.segments if len(s.suffix_array)]
        if preset and not self.segments:
            got = "none" if not datastores else "only stores without an exact index"
            wanted = f"a datastore with an exact index for draft={preset!r}"
            raise MissingSourceError(wanted, got, "Give one, or choose another draft.")

    def longest(self, text: array[int], longest: int) -> tuple[Places, int]:
        """Where the longest suffix of a text, of at most `longest` tokens, occurs; and its length."""
        tail = np.array(text[-longest:], np.int32)
        best: Places = []
        length = 0
        for i, segment in enumerate(self.segments):
            local = segment.localise(tail)
            lo, hi, depth = sa_longest(
                segment.tokens, segment.suffix_array, segment.top, segment.bits, local, len(local), longest
            )
            if depth > length:
                best, length = [], int(depth)
            if depth == length and depth > 0:
                best.append((i, int(lo), int(hi)))
        return best, length

    def next_counts(self, places: Places, depth: int, reads: int = FIRST) -> dict[int, int]:
        """Token → how often it follows a match of `depth` tokens; estimates where more than `reads` places match."""
        counts: dict[int, int] = {}
        tokens, found = np.empty(reads, np.int64), np.empty(reads, np.int64)
        for i, lo, hi in places:
            s = self.segments[i]
            n, _ = sa_successors(s.tokens, s.suffix_array, lo, hi, depth, reads, tokens, found)
            for token, count in zip(s.ids_of(tokens[:n]).tolist(), found[:n].tolist(), strict=True):
                counts[token] = counts.get(token, 0) + count
        return counts

    def narrow(self, places: Places, depth: int, token: int) -> Places:
        """The matches that a token follows."""
        kept: Places = []
        for i, lo, hi in places:
            s = self.segments[i]
            local = int(s.to_local[token]) if token < len(s.to_local) else 0
            a, b = sa_narrow(s.tokens, s.suffix_array, lo, hi, depth, local)
            if a < b:
                kept.append((i, int(a), int(b)))
        return kept

    def earliest(self, places: Places, depth: int, length: int) -> list[int]:
        """What follows the earliest match in its document, at most `length` tokens."""
        i, lo, hi = places[0]
        s = self.segments[i]
        at = int(s.suffix_array[lo:hi].min()) + depth
        run = s.tokens[at : at + length]
        ends = np.flatnonzero(run == SEPARATOR)
        run = run[: ends[0]] if len(ends) else run
        return [int(token) for token in s.ids_of(run)]

    def add_tree(
        self, places: Places, depth: int, builder: TreeBuilder, *, nodes: int, max_depth: int, branching: int = FIRST
    ) -> None:
        """Add the continuations of a match, most frequent first, of equals the shallower, then the smaller token.

        Parameters
        ----------
        places, depth
            The match and its length.
        nodes, max_depth
            Nodes added at most, and how deep.
        branching
            Children per node and nodes per depth at most.
        """
        total = sum(hi - lo for _, lo, hi in places)
        levels = [0] * (max_depth + 1)
        front: list[tuple[int, int, int, int, Places]] = []

        def push(parent: int, level: int, here: Places) -> None:
            counts = ((-count, token) for token, count in self.next_counts(here, depth + level - 1).items())
            for count, token in heapq.nsmallest(min(branching, nodes), counts):
                heapq.heappush(front, (count, level, token, parent, here))

        push(ROOT, 1, places)
        while front and nodes > 0 and len(builder) < builder.max_nodes:
            count, level, token, parent, above = heapq.heappop(front)
            if levels[level] >= branching:
                continue
            node = builder.add(parent, token, -count / (total + 1), EXACT)
            if node == FULL:
                continue
            levels[level] += 1
            nodes -= 1
            if level < min(max_depth, builder.max_depth) and nodes > 0:
                push(node, level + 1, self.narrow(above, depth + level - 1, token))


class Rest(PublishedDrafter):
    """Preset `rest`: the most frequent continuations of the longest match in a store.

    Follows REST (He et al. 2024): the last 16 … 2 tokens, longest first, are looked up and the first length that
    occurs decides; of its first 5,000 places per segment (in the order of the suffix array) the next ten tokens are
    merged into a trie, and the 64 prefixes that occur most often are drafted.

    Differs: nothing is drafted where nothing matches (REST verifies a dummy token); documents end (REST drafts across
    borders); ties are decided by depth and token id instead of the order of a hash map; counts of segments add up.
    """

    nodes = 64
    longest, shortest = 16, 2
    length = 10

    def _open(self) -> None:
        self._corpus = Corpus(self.datastores, "rest")

    def _draft(self, builder: TreeBuilder) -> None:
        places, depth = self._corpus.longest(self.text, self.longest)
        if depth >= self.shortest:
            first = [(i, lo, min(hi, lo + FIRST)) for i, lo, hi in places]
            self._corpus.add_tree(first, depth, builder, nodes=self.nodes, max_depth=self.length)


class Sam(ContextDrafter):
    """Preset `sam`: the longest match in the text so far, or in a store where that is clearly longer.

    Follows SAM-Decoding (Hu et al. 2024) without an auxiliary drafter (`samd_sam_only`): the longest suffix of the text
    that occurred before, of m tokens, is continued from its *earliest* occurrence with ``min(59, 4 m)`` tokens. With a
    store, its match counts m − 5, and where that is longer a tree of ``min(59, 4 (m − 5))`` nodes is drafted: best
    first by relative counts, at most 8 children per node and 8 nodes per depth.

    Differs: a store's suffix arrays are searched for the last 64 tokens, where the published code follows an automaton
    of the store; chains are not padded with token 0; documents of a store end a draft. Chains have constant
    probabilities (`COPY_P` per token).
    """

    bias = 5
    factor = 4
    longest_chain = 59
    longest_match = 64
    branching = 8

    def _open(self) -> None:
        super()._open()
        self._corpus = Corpus(self.datastores)

    def _draft(self, builder: TreeBuilder) -> None:
        matched = self._context.earlier()[1]
        places, depth = self._corpus.longest(self.text, self.longest_match)
        if matched >= depth - self.bias:
            self._copy(builder, matched, min(self.longest_chain, self.factor * matched))
        else:
            nodes = min(self.longest_chain, self.factor * (depth - self.bias))
            self._corpus.add_tree(
                places, depth, builder, nodes=nodes, max_depth=min(nodes, builder.max_depth), branching=self.branching
            )

    def _copy(self, builder: TreeBuilder, matched: int, length: int) -> None:
        """Add what followed the earliest occurrence of the last tokens."""
        begin = earliest_end(self.text, matched) if matched > 0 else len(self.text)
        builder.add_run(ROOT, self.text[begin : begin + length], CONTEXT)


class SamRecycling(Sam, TokenRecycling):
    """Preset `sam+recycling`: a long copy where the match is long, else the Token Recycling tree.

    Follows SAM-Decoding with Token Recycling (`samd`): with m the longer of the match in the text and the match in a
    store less 5, m ≥ 5 drafts a chain of 40 tokens from the *earliest* occurrence (the text wins ties), anything
    shorter drafts the tree of the target's own top tokens. The two are never merged.

    Differs: as `sam` and `token-recycling` do; the tree is Token Recycling's own (80 nodes), which SAM-Decoding used
    too before it cut it to 60; the matrix starts empty in every request unless a session is given.
    """

    threshold = 5
    length = 40

    def _draft(self, builder: TreeBuilder) -> None:
        matched = self._context.earlier()[1]
        places, depth = self._corpus.longest(self.text, self.longest_match)
        if max(matched, depth - self.bias) < self.threshold:
            TokenRecycling._draft(self, builder)
        elif matched >= depth - self.bias:
            self._copy(builder, matched, self.length)
        else:
            builder.add_run(ROOT, self._corpus.earliest(places, depth, self.length), EXACT)


def earliest_end(text: array[int], length: int) -> int:
    """Where the first occurrence of the last `length` tokens goes on, at most ``len(text)`` (no earlier occurrence)."""
    tokens, size = text.tobytes(), text.itemsize
    at = tokens.find(tokens[-size * length :])
    while at % size:
        at = tokens.find(tokens[-size * length :], at + 1)
    return at // size + length


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
        below = list(follow(state)) if len(gram) < length else []
        if gram and not below:
            yield gram, -count
        elif gram:
            cut[gram] = -count
        for token, n, state in below:
            heapq.heappush(front, (-n, (*gram, token), state))
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

    def _open(self) -> None:
        Corpus(self.datastores, "hierarchy")
        split = 1 if len(self.datastores) > 1 else 0
        self._databases = (Corpus(self.datastores[:split]), 1), (Corpus(self.datastores[split:]), self.previous)

    def _reset(self) -> None:
        self._newest: dict[int, dict[Gram, None]] = {}

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        tokens = self.text[max(0, len(self.text) - len(token_ids) - self.length) :].tolist()
        for i in range(len(tokens) - self.length):
            gram = tuple(tokens[i + 1 : i + 1 + self.length])
            keep_newest(self._newest.setdefault(tokens[i], {}), gram, self.guesses)

    def _draft(self, builder: TreeBuilder) -> None:
        taken: dict[Gram, None] = {}
        for gram, count, total, source in self._grams():
            if len(taken) == self.guesses:
                return
            if gram not in taken:
                taken[gram] = None
                p = count / (total + 1)  # the chance of the first token
                builder.add_run(ROOT, gram, source, p / COPY_P)

    def _grams(self) -> Iterator[tuple[Gram, int, int, int]]:
        """N-grams that followed in all databases, with their counts, what these add up to, and the source."""
        known = self._newest.get(self.text[-1], {})
        yield from ((gram, 1, len(known), CONTEXT) for gram in reversed(known))
        found: list[tuple[Gram, int]] = []
        for automaton in self.session.automata if self.session is not None else ():
            state, matched = automaton.advance(0, 0, self.text[-1])
            if matched:
                found += self._most_frequent(partial(_below_state, automaton), state)
        yield from self._shares(sorted(found, key=lambda pair: -pair[1])[: self.guesses], SESSION)
        for corpus, context in self._databases:
            places, depth = corpus.longest(self.text, context)
            if depth == context:
                follow = partial(_below_places, corpus, self.reads)
                yield from self._shares(self._most_frequent(follow, (places, depth, -1)), EXACT)

    def _most_frequent(self, follow: Follow, start: Any) -> list[tuple[Gram, int]]:
        return list(islice(frequent_grams(follow, start, self.length), self.guesses))

    def _shares(self, grams: Sequence[tuple[Gram, int]], source: int) -> Iterator[tuple[Gram, int, int, int]]:
        total = sum(count for _, count in grams)
        yield from ((gram, count, total, source) for gram, count in grams)


def _below_state(automaton: SuffixAutomaton, state: int) -> Iterator[tuple[int, int, int]]:
    """Tokens that follow a state of an automaton, their counts and the states after them."""
    tokens, counts, _ = automaton.successors(state)
    for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        yield token, count, automaton.advance(state, 1, token)[0]


def _below_places(
    corpus: Corpus, reads: int, at: tuple[Places, int, int]
) -> Iterator[tuple[int, int, tuple[Places, int, int]]]:
    """Tokens that follow a match (places, depth) and then a token (-1: none), their counts and how to go on."""
    places, depth, token = at
    here = corpus.narrow(places, depth - 1, token) if token >= 0 else places
    for follower, count in corpus.next_counts(here, depth, reads).items():
        yield follower, count, (here, depth + 1, follower)


class Dresd(PublishedDrafter):
    """Preset `dresd`: what followed the nearest hidden states in a store.

    Follows DReSD (Gritta et al. 2025): the target's hidden state at the last verified token, standardised, reduced (to
    64 dimensions unless the store was built with others) and normalised, is looked up in every step; of its 50 nearest
    neighbours those that go on with the last generated token are kept, and the first ten give drafts of ten tokens.
    Where none is kept, nothing is drafted.

    Differs: the drafts are merged into one tree instead of ten rows with repeated caches, so that what they share is
    verified once; the index is FAISS's instead of ScaNN; drafts end where documents do; ties go to the earlier place.
    """

    neighbours, drafts, length = 50, 10, 10
    nodes = drafts * length

    def _open(self) -> None:
        self.indexes = DenseIndexes(self.datastores)
        if self.indexes.layer is None:
            got = "none" if not self.datastores else "only stores without one"
            raise MissingSourceError(
                "a datastore with a dense index for draft='dresd'", got, "Build one with --dense MODEL."
            )
        self.wants_hidden = self.indexes.layer

    def _reset(self) -> None:
        self._hidden: NDArray[np.float32] | None = None

    def _learn(self, verified: VerifiedPass) -> None:
        self._hidden = verified.last_hidden

    def _draft(self, builder: TreeBuilder) -> None:
        if self._hidden is None:
            return
        near = self.indexes.search(self._hidden, self.neighbours)
        spans, _ = self.indexes.spans_after(near, self.length + 1)
        for run in spans[spans[:, 0] == self.text[-1]][: self.drafts]:
            builder.add_run(ROOT, run[run != END][1:].tolist(), DENSE)
