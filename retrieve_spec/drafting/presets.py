"""Preset names in, drafters out: `auto` is the mixture of all sources, the others follow published rules."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.errors import UnknownPresetError
from retrieve_spec.sources.session import SessionMemory

Factory = Callable[[SpeculationConfig, Sequence[Any], SessionMemory | None, Calibration | None], Drafter]


def _auto(
    config: SpeculationConfig, datastores: Sequence[Any], session: SessionMemory | None, calibration: Calibration | None
) -> Drafter:
    return MixtureDrafter(config, session=session, datastores=datastores, calibration=calibration)


PRESETS: dict[str, Factory] = {AUTO: _auto}


def build_drafter(
    config: SpeculationConfig,
    *,
    datastores: Sequence[Any] = (),
    session: SessionMemory | None = None,
    calibration: Calibration | None = None,
) -> Drafter:
    """Drafter that ``config.draft`` names.

    Parameters
    ----------
    config
        Its ``draft`` is `"auto"` or the name of a preset.
    datastores
        Open stores (`retrieve_spec.datastore.Datastore`) to draft from.
    session, calibration
        State kept between requests; None starts without.

    Raises
    ------
    UnknownPresetError
        When no preset has the name.
    MissingSourceError
        When the preset needs a source that was not given.
    """
    factory = PRESETS.get(config.draft)
    if factory is None:
        names = ", ".join(["off", *PRESETS])
        close = difflib.get_close_matches(config.draft, ["off", *PRESETS], n=1)
        remedy = f"Did you mean {close[0]!r}?" if close else "Use one of these names."
        raise UnknownPresetError(f"draft to be one of {names}", repr(config.draft), remedy)
    if session is None and config.session:
        session = SessionMemory(config.session_tokens)
    return factory(config, datastores, session, calibration)
