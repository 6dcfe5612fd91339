"""Names of presets in, their drafters out: made when first asked for, and kept with what they learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.drafting.calibration import calibration_for
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.drafting.presets import build_drafter

OFF = "off"


class Drafters:
    """The drafters of one accelerated model.

    Parameters
    ----------
    config
        How to draft unless a call says otherwise.
    datastores
        Open stores to draft from.
    given
        What drafts in place of the configured preset.
    model_key
        Name under which what was learned about the model is kept beside a store.
    """

    def __init__(
        self, config: SpeculationConfig, datastores: Sequence[Any], given: Drafter | None, model_key: str
    ) -> None:
        self.datastores = list(datastores)
        self.given = given
        self._config, self._model_key = config, model_key
        self._first: dict[str, Drafter] = {}
        self._more: dict[str, list[Drafter]] = {}  # of the second and later rows of a batch

    def of(self, draft: str | None = None) -> Drafter | None:
        """Drafter for a call: the one given, a preset's, or None when drafting is off.

        Raises
        ------
        UnknownPresetError
            No preset has the name.
        MissingSourceError
            The preset needs a source that was not given.
        """
        name = self._name(draft)
        if name == OFF:
            return None
        if self.given is not None and name in (AUTO, self._config.draft):
            return self.given
        if name not in self._first:
            calibration = calibration_for(self.datastores, self._model_key)
            self._first[name] = self._build(name, None, calibration)
        return self._first[name]

    def of_rows(self, draft: str | None, rows: int) -> list[Drafter] | list[None]:
        """A drafter for every row of a batch, with one session and one calibration (Nones when drafting is off)."""
        first = self.of(draft)
        if first is None:
            return [None] * rows
        name = self._name(draft)
        more = self._more.setdefault(name, [])
        while len(more) < rows - 1:
            more.append(self._like(name, first))
        return [first, *more[: rows - 1]]

    def use(self, datastores: Sequence[Any]) -> None:
        """Draft from these stores instead; sessions and calibrations are kept."""
        self.datastores = list(datastores)
        self._more.clear()
        self._first = {name: self._like(name, old) for name, old in self._first.items()}

    def forget(self) -> None:
        """Drop all drafters that were made here, with what they learned."""
        self._first.clear()
        self._more.clear()

    def _name(self, draft: str | None) -> str:
        return self._config.draft if draft is None else draft

    def _like(self, name: str, old: Drafter) -> Drafter:
        return self._build(name, getattr(old, "session", None), getattr(old, "calibration", None))

    def _build(self, name: str, session: Any, calibration: Any) -> Drafter:
        config = self._config.with_options(draft=name)
        return build_drafter(config, datastores=self.datastores, session=session, calibration=calibration)
