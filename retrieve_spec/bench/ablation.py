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
from retrieve_spec.errors import ConfigError, nearest
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


SOURCES: dict[str, dict[str, Any]] = {
    "context": {"context": Unfed},
    "session": {"session": None},
    "prediction": {},
    "recycling": {"recycling": None, "top_k": 0},
    "ngram": {"stores.ngram": list},
    "exact": {"stores.exact": list},
    "dense": {"dense": None, "wants_hidden": None},
    "phrases": {"phrases": None},
    "alignment": {"alignments": None},
}
"""What takes a source away from the mixture, by its name: attributes, and what they are then (types are called)."""


def _take_away(drafter: MixtureDrafter, source: str) -> None:
    for name, value in SOURCES[source].items():
        *owners, attribute = name.split(".")
        owner = getattr(drafter, owners[0]) if owners else drafter
        setattr(owner, attribute, value() if isinstance(value, type) else value)
    if source == "context":
        drafter.unigrams = drafter.calibration.unigrams(mute=True)
    elif source == "prediction":
        start = drafter.start
        drafter.start = lambda prompt_ids, prediction_ids=None: start(prompt_ids)  # type: ignore[method-assign]


def _deprived(drafter: Any, without: Sequence[str]) -> Any:
    for name in without:
        if name not in SOURCES or not isinstance(drafter, MixtureDrafter):
            got, hint = (repr(name), nearest(name, SOURCES)) if name not in SOURCES else ("another preset", "")
            raise ConfigError(f"auto without one of {', '.join(SOURCES)}", got, hint or "Name one of these, and auto.")
        _take_away(drafter, name)
    return drafter
