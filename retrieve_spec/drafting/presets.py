"""Presets: drafters by name; `auto` is the mixture of all sources, the others follow published rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.published.logits import LogitSpec, Lookahead, TokenRecycling
from retrieve_spec.drafting.published.search import AdaptiveTrigram, Stand
from retrieve_spec.drafting.published.stores import Dresd, Hierarchy, Rest, Sam, SamRecycling
from retrieve_spec.drafting.published.text import AdaptiveNgram, PromptLookup, SuffixDecoding
from retrieve_spec.errors import UnknownPresetError, nearest
from retrieve_spec.sources.session import SessionMemory

Factory = Callable[[SpeculationConfig, Sequence[Any], SessionMemory | None, Calibration | None], Drafter]


def _auto(
    config: SpeculationConfig, datastores: Sequence[Any], session: SessionMemory | None, calibration: Calibration | None
) -> Drafter:
    return MixtureDrafter(config, session=session, datastores=datastores, calibration=calibration)


def _dresd(
    config: SpeculationConfig, datastores: Sequence[Any], session: SessionMemory | None, calibration: Calibration | None
) -> Drafter:
    return Dresd(datastores if config.dense == AUTO else (), session)


def _of_text(rule: Callable[[SessionMemory | None], Drafter]) -> Factory:
    """Factory of a rule that reads no store."""
    return lambda config, datastores, session, calibration: rule(session)


def _of_stores(rule: Callable[[Sequence[Any], SessionMemory | None], Drafter]) -> Factory:
    """Factory of a rule that reads stores."""
    return lambda config, datastores, session, calibration: rule(datastores, session)


PRESETS: dict[str, Factory] = {
    AUTO: _auto,
    "prompt-lookup": _of_text(PromptLookup),
    "anpd": _of_text(AdaptiveNgram),
    "sam": _of_stores(Sam),
    "sam+recycling": _of_stores(SamRecycling),
    "rest": _of_stores(Rest),
    "dresd": _dresd,
    "hierarchy": _of_stores(Hierarchy),
    "token-recycling": _of_text(TokenRecycling),
    "suffix": _of_text(SuffixDecoding),
    "stand": _of_text(Stand),
    "logitspec": _of_text(LogitSpec),
    "lookahead": _of_text(Lookahead),
    "adaptive-trigram": _of_stores(AdaptiveTrigram),
}
"""Drafters by the name given as `draft`; docs/presets.md says what each follows."""


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
        remedy = nearest(str(config.draft), ["off", *PRESETS]) or "Use one of these names."
        raise UnknownPresetError(f"draft to be one of {names}", repr(config.draft), remedy)
    if session is None and config.session:
        session = SessionMemory(config.session_tokens, exact=config.draft != AUTO)
    return factory(config, datastores, session, calibration)
