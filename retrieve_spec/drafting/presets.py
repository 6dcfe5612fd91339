"""Presets: drafters by name; `auto` is the mixture of all sources, the others follow published rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.published.base import PublishedDrafter
from retrieve_spec.drafting.published.logits import LogitSpec, Lookahead, TokenRecycling
from retrieve_spec.drafting.published.search import Stand
from retrieve_spec.drafting.published.stores import Dresd, Hierarchy, Rest, Sam, SamRecycling
from retrieve_spec.drafting.published.text import AdaptiveNgram, AdaptiveTrigram, PromptLookup, SuffixDecoding
from retrieve_spec.errors import UnknownPresetError, nearest
from retrieve_spec.sources.distilled import ModelTables
from retrieve_spec.sources.recycling import MANY_CONTEXTS, Bigrams
from retrieve_spec.sources.session import SessionMemory

PRESETS: dict[str, type[MixtureDrafter | PublishedDrafter]] = {
    AUTO: MixtureDrafter,
    "prompt-lookup": PromptLookup,
    "anpd": AdaptiveNgram,
    "sam": Sam,
    "sam+recycling": SamRecycling,
    "rest": Rest,
    "dresd": Dresd,
    "hierarchy": Hierarchy,
    "token-recycling": TokenRecycling,
    "suffix": SuffixDecoding,
    "stand": Stand,
    "logitspec": LogitSpec,
    "lookahead": Lookahead,
    "adaptive-trigram": AdaptiveTrigram,
}
"""Drafters by the name given as `draft`; docs/presets.md says what each follows."""


def build_drafter(
    config: SpeculationConfig,
    *,
    datastores: Sequence[Any] = (),
    session: SessionMemory | None = None,
    calibration: Calibration | None = None,
    bigrams: Bigrams | None = None,
    contexts: int = MANY_CONTEXTS,
    fingerprint: Callable[[], str] | None = None,
) -> MixtureDrafter | PublishedDrafter:
    """Return the drafter that ``config.draft`` names.

    Parameters
    ----------
    config
        Its ``draft`` is `"auto"` or the name of a preset.
    datastores
        Open stores (`retrieve_spec.datastore.Datastore`) to draft from.
    session, calibration
        State kept between requests; None starts without.
    bigrams, contexts, fingerprint
        For `auto`: the model's bigrams, how many contexts its top tokens are remembered in, and what computes its
        fingerprint.

    Raises
    ------
    UnknownPresetError
        When no preset has the name.
    MissingSourceError
        When the preset needs a source that was not given.
    """
    preset = PRESETS.get(config.draft)
    if preset is None:
        names = ", ".join(["off", *PRESETS])
        remedy = nearest(str(config.draft), ["off", *PRESETS]) or "Use one of these names."
        raise UnknownPresetError(f"draft to be one of {names}", repr(config.draft), remedy)
    if session is None and config.session:
        session = SessionMemory(config.session_tokens, exact=config.draft != AUTO)
    if issubclass(preset, MixtureDrafter):
        return preset(
            config,
            session=session,
            datastores=datastores,
            calibration=calibration,
            bigrams=bigrams,
            contexts=contexts,
            distilled=ModelTables(datastores, fingerprint),
        )
    return preset(() if preset is Dresd and config.dense != AUTO else datastores, session)
