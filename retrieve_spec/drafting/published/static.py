"""Static automata as drafters' cursors: the longest match in a store's segments, kept from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.indexes import check_automaton
from retrieve_spec.drafting.published.corpus import FIRST, Corpus, Places
from retrieve_spec.kernels.static_automaton import automaton_extend, automaton_follow, automaton_successors

if TYPE_CHECKING:
    from retrieve_spec.datastore.indexes import StaticAutomaton
    from retrieve_spec.datastore.store import Datastore


def static_automata(datastores: Sequence[Datastore]) -> AutomatonCorpus | None:
    """The automata of all segments; None where a segment has no automaton, or there is no segment."""
    segments = [s for store in datastores for s in store.segments if len(s.suffix_array)]
    if not segments or any(segment.automaton is None for segment in segments):
        return None
    return AutomatonCorpus(datastores)


class AutomatonCorpus(Corpus):
    """`Corpus` that reads automata instead of suffix arrays: a match is a state, exact counts are its edges'.

    A place is (number of the segment, state, state + occurrences), so that counts add up as intervals do. Matches are
    as long as they are, where the suffix arrays are asked for a limited length.
    """

    def __init__(self, datastores: Sequence[Datastore]) -> None:
        super().__init__(datastores)
        self._automata: list[StaticAutomaton] = [s.automaton for s in self.segments if s.automaton is not None]
        for segment, automaton in zip(self.segments, self._automata, strict=True):
            check_automaton(automaton, len(segment.tokens), f"segment {segment.name}")
        widest = max((int(np.diff(a.first.astype(np.int64)).max(initial=0)) for a in self._automata), default=0) + 1
        self._tokens, self._counts = np.empty(max(widest, FIRST), np.int64), np.empty(max(widest, FIRST), np.int64)
        self.reset()

    def reset(self) -> None:
        """Begin another text."""
        self._states = [(0, 0)] * len(self.segments)

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Follow more tokens of the text, amortised O(1) each."""
        for i, (segment, a) in enumerate(zip(self.segments, self._automata, strict=True)):
            state, depth = self._states[i]
            for token in segment.localise(token_ids).tolist():
                state, depth = automaton_extend(
                    segment.tokens,
                    a.counts,
                    a.link,
                    a.clone_lengths,
                    a.first,
                    a.edge_tokens,
                    a.edge_targets,
                    state,
                    depth,
                    token,
                )
            self._states[i] = int(state), int(depth)

    def matches(self) -> tuple[Places, int]:
        """Where the longest end of the text occurs, and its length; as `longest` says it without a limit."""
        length = max(depth for _, depth in self._states)
        if length == 0:
            return [], 0
        return [self._place(i, state) for i, (state, depth) in enumerate(self._states) if depth == length], length

    def _place(self, i: int, state: int) -> tuple[int, int, int]:
        return i, state, state + int(self._automata[i].counts[state])

    def _read_next(self, place: tuple[int, int, int], depth: int, reads: int) -> int:
        """Read what follows a state, exactly; `depth` and `reads` are not needed."""
        i, state, _ = place
        s, a = self.segments[i], self._automata[i]
        n, _ = automaton_successors(
            s.tokens, a.counts, a.first, a.edge_tokens, a.edge_targets, state, self._tokens, self._counts
        )
        return int(n)

    def narrow(self, places: Places, depth: int, token: int) -> Places:
        """The matches that a token follows."""
        kept: Places = []
        for i, state, _ in places:
            s, a = self.segments[i], self._automata[i]
            local = int(s.to_local[token]) if token < len(s.to_local) else 0
            target = automaton_follow(s.tokens, a.counts, a.first, a.edge_tokens, a.edge_targets, state, local)
            if local > 0 and target >= 0:
                kept.append(self._place(i, int(target)))
        return kept
