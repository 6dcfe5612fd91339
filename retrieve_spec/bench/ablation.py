"""Ablations: a drafter made anew at will from a configuration, without some of its sources.

What such a drafter learns is kept in memory only: a calibration file beside a store would carry one measurement into
the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Preparable
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.errors import ConfigError
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.unigrams import token_classes


class Unfed(SuffixAutomaton):
    """A context source that is never given the text: kernels find no room in it, and `extend` makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.states = self.states[:1].copy()  # the empty context alone

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Do nothing."""


class FreshDrafter:
    """A drafter that `renew` puts back to how it began; everything else is the drafter's own.

    Parameters
    ----------
    config, datastores
        What `build_drafter` takes.
    without
        Names of sources that `auto` is to do without.
    tokenizer
        Of the model that answers, if it is known: `auto` tells words from marks by it.

    Raises
    ------
    ConfigError
        No such source, or the preset is not `auto`.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        datastores: Sequence[Any] = (),
        without: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> None:
        classes = token_classes(tokenizer)

        def make() -> Any:
            calibration = Calibration(classes=classes)
            return _deprived(build_drafter(config, datastores=datastores, calibration=calibration), without)

        self._make: Callable[[], Any] = make
        self.renew()

    def renew(self) -> None:
        """Forget all that was learned."""
        self.drafter: Any = self._make()

    def prepare(self) -> None:
        """As `Preparable`; said here because protocols look at classes (Python 3.12 and newer)."""
        if isinstance(self.drafter, Preparable):
            self.drafter.prepare()

    def __getattr__(self, name: str) -> Any:
        if name == "drafter":  # asked for before there is one
            raise AttributeError(name)
        return getattr(self.drafter, name)


def _no_context(drafter: MixtureDrafter) -> None:
    drafter.context = Unfed()
    drafter.unigrams = drafter.calibration.unigrams(mute=True)


def _no_session(drafter: MixtureDrafter) -> None:
    drafter.session = None


def _no_prediction(drafter: MixtureDrafter) -> None:
    start = drafter.start
    drafter.start = lambda prompt_ids, prediction_ids=None: start(prompt_ids)  # type: ignore[method-assign]


def _no_recycling(drafter: MixtureDrafter) -> None:
    drafter.recycling = None
    drafter.top_k = 0


def _no_ngram(drafter: MixtureDrafter) -> None:
    drafter.stores.ngram = []


def _no_exact(drafter: MixtureDrafter) -> None:
    drafter.stores.exact = []


def _no_dense(drafter: MixtureDrafter) -> None:
    drafter.dense = None
    drafter.wants_hidden = None


def _no_phrases(drafter: MixtureDrafter) -> None:
    drafter.phrases = None


def _no_alignment(drafter: MixtureDrafter) -> None:
    drafter.alignments = None


SOURCES: dict[str, Callable[[MixtureDrafter], None]] = {
    "context": _no_context,
    "session": _no_session,
    "prediction": _no_prediction,
    "recycling": _no_recycling,
    "ngram": _no_ngram,
    "exact": _no_exact,
    "dense": _no_dense,
    "phrases": _no_phrases,
    "alignment": _no_alignment,
}
"""What takes a source away from the mixture, by its name."""


def _deprived(drafter: Any, without: Sequence[str]) -> Any:
    for name in without:
        if name not in SOURCES or not isinstance(drafter, MixtureDrafter):
            got = repr(name) if name not in SOURCES else "another preset"
            raise ConfigError(f"auto without one of {', '.join(SOURCES)}", got, "Name one of these, and auto.")
        SOURCES[name](drafter)
    return drafter
