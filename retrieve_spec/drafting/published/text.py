"""Rules that count in the text so far and in earlier answers: prompt lookup, ANPD, SuffixDecoding, ADED."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import FULL, ContextDrafter, Gram, NgramIndex, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.kernels.ngram import ngram_hash
from retrieve_spec.kernels.suffix_decoding import speculate
from retrieve_spec.sources import CONTEXT, NGRAM, SESSION
from retrieve_spec.sources.automaton import SuffixAutomaton

Pair = tuple[int, int]


class PromptLookup(PublishedDrafter):
    """Preset `prompt-lookup`: what followed the last three, two or one tokens the first time.

    Follows prompt lookup decoding (Saxena 2023) and its copy in Spec-Bench: n-grams from 3 down to 1, the *earliest*
    match, `length` = 10 tokens, and a match counts only when all ten exist; the first n that has one wins.

    Differs: where nothing matches, nothing is drafted (Spec-Bench verifies a dummy token); matches are looked up in an
    index instead of by scanning. Probabilities are constants (`COPY_P` per token), the rule has none.
    """

    longest = 3
    length = 10

    def _reset(self) -> None:
        self._index = NgramIndex(self.longest, self.length)

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._index.read(self.text, len(token_ids))

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text[-self.longest :].tolist()
        for n in range(len(newest), 0, -1):
            begin = self._index.first.get(tuple(newest[-n:]), len(self.text))
            if begin + self.length <= len(self.text):
                builder.add_run(ROOT, self.text[begin : begin + self.length], CONTEXT)
                return


class AdaptiveNgram(PublishedDrafter):
    """Preset `anpd`: the most frequent continuation of the longest known n-gram, token by token.

    Follows ANPD (Ou, Chen and Tian 2024): n-gram counts of the prompt and the output for n = `order` … 2, the highest
    order that knows the context decides, greedily, for each of `length` tokens. Of equally frequent tokens the one
    that came up last for the first time is taken, as in the published code.

    Differs: only accepted tokens are counted (the text itself), and probabilities are the relative counts. The
    paper's code is incomplete; order 5 and 6 tokens are the settings its evaluation names as best.
    """

    order = 5
    length = 6

    def _reset(self) -> None:
        self._counts: dict[Gram, dict[int, int]] = {}

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        begin = len(self.text) - len(token_ids)
        lead = max(0, begin - self.order + 1)
        tokens = self.text[lead:].tolist()
        for i in range(begin - lead, len(tokens)):
            for n in range(1, min(self.order - 1, i) + 1):
                seen = self._counts.setdefault(tuple(tokens[i - n : i]), {})
                seen[tokens[i]] = seen.get(tokens[i], 0) + 1

    def _draft(self, builder: TreeBuilder) -> None:
        context = self.text[1 - self.order :].tolist()
        parent, p = ROOT, 1.0
        for _ in range(self.length):
            known = (self._counts.get(tuple(context[-n:])) for n in range(len(context), 0, -1))
            seen = next(filter(None, known), None)
            if seen is None:
                return
            most = max(seen.values())
            token = next(t for t in reversed(seen) if seen[t] == most)
            p *= most / sum(seen.values())
            parent = builder.add(parent, token, p, CONTEXT)
            context = [*context, token][-(self.order - 1) :]


class SuffixDecoding(ContextDrafter):
    """Preset `suffix`: the best-scored count tree below any suffix of the text.

    Follows SuffixDecoding (Oliaro et al. 2024) in tree mode: for every match length m the continuations are taken by
    path probability (product of child count / parent count, the text's own end counted among the occurrences), at
    most ``factor · m`` of them, none below `min_token_probability`, match and draft together at most `depth` deep. The
    tree with the largest sum of probabilities is drafted; the longer match wins ties, and the text so far wins
    against earlier answers.

    Differs: `factor` is 4, the upper end of the published range and the best in tree mode (engines default to 1 and
    chains); automata replace the suffix trees (the same counts, except that contexts of more than 32 tokens count each
    continuation once); earlier answers are in two automata, an old and a young one, each a tree of its own, and the
    answer at hand joins them when it is finished (until then only its end is counted among the occurrences).
    """

    factor = 4.0
    min_token_probability = 0.1
    depth = 64

    def _reset(self) -> None:
        super()._reset()
        self._earlier: list[SuffixAutomaton] = [] if self.session is None else list(self.session.automata)
        self._cursors = [(0, 0)] * len(self._earlier)

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        super()._read(token_ids)
        newest = token_ids[-self.depth :]
        self._cursors = [a.follow(newest, *at) for a, at in zip(self._earlier, self._cursors, strict=True)]

    def _draft(self, builder: TreeBuilder) -> None:
        score, found, source = *self._speculate(self._context, self._context.earlier(), builder), CONTEXT
        for automaton, cursor in zip(self._earlier, self._cursors, strict=True):
            other, nodes = self._speculate(automaton, cursor, builder)
            if other > score:
                score, found, source = other, nodes, SESSION
        numbers: list[int] = []
        for token, parent, p in found:
            numbers.append(builder.add(numbers[parent] if parent >= 0 else ROOT, token, p, source))

    def _speculate(
        self, automaton: SuffixAutomaton, cursor: tuple[int, int], builder: TreeBuilder
    ) -> tuple[float, list[tuple[int, int, float]]]:
        """Score of one automaton's tree, and its nodes: token, parent, path probability."""
        if cursor[1] <= 0:
            return 0.0, []
        nodes, p = np.empty((builder.max_nodes, 2), np.int32), np.empty(builder.max_nodes, np.float64)
        n, score = speculate(
            automaton.states,
            automaton.edges,
            automaton.slots,
            cursor,
            self.factor,
            builder.max_depth,
            self.depth,
            self.min_token_probability,
            nodes,
            p,
        )
        return float(score), list(zip(*nodes[:n].T.tolist(), p[:n].tolist(), strict=True))


@dataclass(slots=True)
class _Child:
    """A token of a tree search with the pair that it makes: its probability and Q, and what was found below it."""

    pair: Pair
    p: float
    q: float
    source: int
    chance: float = 1.0
    node: int = FULL
    visits: int = 0
    children: list[_Child] = field(default_factory=list)
    spent: bool = False


class AdaptiveTrigram(ContextDrafter):
    """Preset `adaptive-trigram`: a tree search over tri-gram probabilities that adapts to what was accepted.

    Follows ADED (Liu et al. 2025): a tri-gram matrix of a corpus gives the top 12 tokens after two tokens; it is
    updated with the output as it appears; drafts are built by a Monte Carlo tree search that scores a child by
    ``Q + C · P · √(visits of the parent) / (1 + visits of the child)``, where Q is how often it was accepted before.

    Differs: ADED's code was never released and leaves open how Q is kept, and how the update weighs against the
    corpus. Here Q is the share of a tri-gram's drafts that were accepted in this request, P before it was drafted; the
    corpus counts as `corpus_weight` observations; every visit adds one node, at most four deep, until the budget is
    full; ties go to the more probable, then to the smaller token. Without a store the matrix starts empty.
    """

    branching = 12
    exploration = 1.0
    depth = 4
    nodes = 64
    corpus_weight = 4.0

    def _open(self) -> None:
        self._tables = [(table, store.manifest.vocabulary) for store in self.datastores for table in store.ngrams]

    def _reset(self) -> None:
        super()._reset()
        self._tried: dict[tuple[int, int, int], tuple[int, int]] = {}

    def _of_corpus(self, pair: Pair) -> dict[int, float]:
        """Shares of the tokens that follow a pair in the stores' tables."""
        h = np.uint64(ngram_hash(np.uint64(ngram_hash(np.uint64(0), pair[1])), pair[0]))
        counts: Counter[int] = Counter()
        total = 0
        for table, vocabulary in self._tables:
            found = table.look_up(h, vocabulary)
            if found is not None:
                counts.update(dict(zip(found[2].tolist(), found[3].tolist(), strict=True)))
                total += found[0]
        return {token: count / max(total, 1) for token, count in counts.items()}

    def _of_text(self, pair: Pair) -> dict[int, int]:
        """How often tokens follow a pair in the text."""
        state, matched = self._context.follow(np.array(pair, np.int32))
        if matched < 2:
            return {}
        tokens, counts, _ = self._context.successors(state, len(self.text))
        return dict(zip(tokens.tolist(), counts.tolist(), strict=True))

    def _children(self, pair: Pair) -> list[_Child]:
        """The top tokens after a pair, most probable first."""
        corpus, seen = self._of_corpus(pair), self._of_text(pair)
        weight = self.corpus_weight if corpus else 0.0
        total = sum(seen.values()) + weight
        p = {token: weight * share / total for token, share in corpus.items()}
        for token, count in seen.items():
            p[token] = p.get(token, 0.0) + count / total
        children = []
        for token, share in sorted(p.items(), key=lambda item: (-item[1], item[0]))[: self.branching]:
            right, tried = self._tried.get((*pair, token), (share, 1))
            children.append(_Child((pair[1], token), share, right / tried, CONTEXT if token in seen else NGRAM))
        return children

    def _draft(self, builder: TreeBuilder) -> None:
        if len(self.text) < 2:
            return
        pair = (self.text[-2], self.text[-1])
        root = _Child(pair, 1.0, 1.0, CONTEXT, node=ROOT, children=self._children(pair))
        while len(builder) < builder.max_nodes and not root.spent:
            self._visit(root, builder, min(self.depth, builder.max_depth))

    def _visit(self, at: _Child, builder: TreeBuilder, depth: int) -> None:
        """Walk down by score and add one node, or find that nothing can be added below."""
        at.visits += 1
        bonus = self.exploration * math.sqrt(at.visits)
        unspent = [child for child in at.children if not child.spent]
        if not unspent:
            at.spent = True
            return
        best = max(unspent, key=lambda child: child.q + bonus * child.p / (1 + child.visits))
        if best.node != FULL:
            self._visit(best, builder, depth - 1)
            return
        best.chance = at.chance * best.p
        best.node = builder.add(at.node, best.pair[1], best.chance, best.source)
        best.children = self._children(best.pair) if depth > 1 else []
        best.spent = not best.children

    def _learn(self, verified: VerifiedPass) -> None:
        """Count which drafted tri-grams were accepted: children of the root and of accepted nodes."""
        if len(self.text) < 2:
            return
        accepted = {ROOT, *verified.path.tolist()}
        tokens = [*self.text[-2:], *verified.tree.token_ids.tolist()]  # node i stands at i + 2, the root at 1
        above = [0, 0, *(verified.tree.parent + 2).tolist()]
        for i in range(2, len(tokens)):
            if above[i] - 2 in accepted:
                key = (tokens[above[above[i]]], tokens[above[i]], tokens[i])
                right, tried = self._tried.get(key, (0, 0))
                self._tried[key] = right + (i - 2 in accepted), tried + 1
