"""The sources of one text, in the order that decides between equally long matches."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrieve_spec.kernels.request import HYPOTHESES
from retrieve_spec.sources import (
    ALIGNMENT,
    BIGRAMS,
    CONTEXT,
    DENSE,
    DISTILLED,
    PHRASES,
    PREDICTION,
    RECYCLING,
    SESSION,
    STATES,
)
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.dense import DenseSource
from retrieve_spec.sources.distilled import DistilledTable
from retrieve_spec.sources.hidden_states import SimilarStates
from retrieve_spec.sources.phrases import PhraseMemory
from retrieve_spec.sources.recycling import Bigrams, RecyclingTable
from retrieve_spec.sources.rows import Alignments, Prediction, Row
from retrieve_spec.sources.unigrams import Unigrams


@dataclass(slots=True)
class TextSources:
    """The sources of one text. To add a source, add a field here, its rows in `rows`, and what to forget in `reset`.

    Attributes
    ----------
    context, unigrams, alignments
        What the text itself has shown.
    prediction
        The text that the user expects.
    earlier
        Automata of earlier texts, as the session had them when the request began.
    exact, dense, ngram
        Rows of the stores' suffix arrays and n-gram tables, numbered over all stores; what the dense indexes found.
    recycling, distilled, bigrams
        The target's own top tokens: in texts so far, in texts that it was made to write, and after each single token.
    states
        What the target said where its hidden state was similar.
    phrases
        What the answers to several requesters have in common.
    """

    context: SuffixAutomaton
    unigrams: Unigrams
    alignments: Alignments | None = None
    prediction: Prediction | None = None
    earlier: list[SuffixAutomaton] = field(default_factory=list)
    exact: list[Row] = field(default_factory=list)
    dense: DenseSource | None = None
    ngram: list[Row] = field(default_factory=list)
    recycling: RecyclingTable | None = None
    bigrams: Bigrams | None = None
    distilled: list[DistilledTable] = field(default_factory=list)
    phrases: PhraseMemory | None = None
    states: SimilarStates | None = None

    def reset(self) -> None:
        """Forget the text."""
        for source in (self.context, self.unigrams, self.alignments, self.states):
            if source is not None:
                source.reset()

    def rows(self) -> dict[str, list[Row]]:
        """Return the rows of every source by name; of equally long matches, those of earlier rows come first.

        What the target said after some tokens tells its next one better than what merely followed them.
        """
        knows_phrases = self.phrases is not None and self.phrases.requests > 1  # more than one requester
        return {
            "prediction": _rows(self.prediction, PREDICTION) * HYPOTHESES,
            "states": _rows(self.states, STATES),
            "distilled": [table.row(DISTILLED) for table in self.distilled],
            "recycling": _rows(self.recycling, RECYCLING),
            "context": [self.context.row(CONTEXT), self.unigrams.row(CONTEXT)],
            "session": [automaton.row(SESSION) for automaton in self.earlier],
            "exact": self.exact,
            "dense": _rows(self.dense, DENSE),
            "bigrams": _rows(self.bigrams if self.recycling else None, BIGRAMS),
            "phrases": _rows(self.phrases if knows_phrases else None, PHRASES),
            "alignment": _rows(self.alignments, ALIGNMENT),
            "ngram": self.ngram,
        }


_OneRow = SimilarStates | Prediction | DenseSource | RecyclingTable | Bigrams | PhraseMemory | Alignments


def _rows(source: _OneRow | None, number: int) -> list[Row]:
    return [] if source is None else [source.row(number)]
