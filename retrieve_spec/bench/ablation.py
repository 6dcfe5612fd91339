"""Ablations: a drafter made anew at will from a configuration, without some of its sources."""

from __future__ import annotations

from collections.abc import Sequence
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


class EmptyContext(SuffixAutomaton):
    """A context source that stays empty: kernels find no room in it, and `extend` makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.states = self.states[:1].copy()  # the root alone

    def extend(self, token_ids: NDArray[np.int32]) -> None:
        """Do nothing."""


SOURCES: dict[str, dict[str, Any]] = {
    "context": {"context": EmptyContext},
    "session": {"session": None},
    "prediction": {},
    "recycling": {"recycling": None, "top_k": 0},
    "ngram": {"stores.ngram": list},
    "exact": {"stores.exact": list},
    "dense": {"dense": None, "wants_hidden": None},
    "phrases": {"phrases": None},
    "alignment": {"alignments": None},
}
"""Attributes of the mixture that hold a source, by its name, with what stands there without it (types are called)."""


class FreshDrafter:
    """A drafter that `renew` puts back to how it began; everything else is the drafter's own.

    What it learns is kept in memory only: a calibration file beside a store would carry one measurement into the next.

    Parameters
    ----------
    config, datastores
        What `build_drafter` takes.
    without
        Names of sources that `auto` does without.
    tokenizer
        Of the model that answers, if it is known.

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
        self._config, self._datastores, self._without = config, datastores, without
        self._classes = token_classes(tokenizer)
        self.renew()

    def renew(self) -> None:
        """Forget all that was learned."""
        calibration = Calibration(classes=self._classes)
        self.drafter: Any = build_drafter(self._config, datastores=self._datastores, calibration=calibration)
        for name in self._without:
            _remove_source(self.drafter, name)

    def prepare(self) -> None:
        """As `Preparable`; defined here because protocols look at classes (Python 3.12 and newer)."""
        if isinstance(self.drafter, Preparable):
            self.drafter.prepare()

    def __getattr__(self, name: str) -> Any:
        if name == "drafter":  # not made yet
            raise AttributeError(name)
        return getattr(self.drafter, name)


def _remove_source(drafter: Any, source: str) -> None:
    if source not in SOURCES:
        remedy = nearest(source, SOURCES) or "Name one of these."
        raise ConfigError(f"a source among {', '.join(SOURCES)}", repr(source), remedy)
    if not isinstance(drafter, MixtureDrafter):
        raise ConfigError("the preset auto", "another preset", "Only `auto` can do without a source.")
    for name, value in SOURCES[source].items():
        *owners, attribute = name.split(".")
        owner = getattr(drafter, owners[0]) if owners else drafter
        setattr(owner, attribute, value() if isinstance(value, type) else value)
    if source == "context":
        drafter.unigrams = drafter.calibration.unigrams(mute=True)
    elif source == "prediction":
        start = drafter.start
        drafter.start = lambda prompt_ids, prediction_ids=None: start(prompt_ids)  # type: ignore[method-assign]
