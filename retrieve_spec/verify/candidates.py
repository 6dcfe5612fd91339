"""Candidates: the ways in which a model's passes over trees may work, for a probe to try one after another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import in_a_line
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import DERIVES, ModelInterface, Recurrence, Way, read_interface
from retrieve_spec.verify.mixers import find_mixers
from retrieve_spec.verify.positions import Place, noting_places, outermost
from retrieve_spec.verify.row_mixer import replaceable
from retrieve_spec.verify.steps import prepare_call, sample_tokens, vocabulary
from retrieve_spec.verify.verifier import Verifier, VerifierInputs

logger = logging.getLogger(__name__)

PROMPT = 12
"""Tokens of a prompt that is shorter than every window."""


def layout_of(interface: ModelInterface) -> str:
    """Which of the candidates an interface is."""
    way = interface.recurrence.way if interface.recurrence is not None else ""
    inside = interface.masks_inside
    return f"{sorted(interface.masks)}{way}{bool(interface.places)}{inside}{interface.takes_position_ids}"


def same_way(copied: Any, interface: ModelInterface) -> ModelInterface:
    """How a copy of a model runs in the way that worked for the model."""
    own = read_interface(copied)
    ways = (way for way in candidates(copied, own) if not isinstance(way, str))
    return next((way for way in ways if layout_of(way) == layout_of(interface)), own)


def candidates(model: Any, interface: ModelInterface) -> Iterator[ModelInterface | str]:
    """The interfaces to try: masks by layer type where the config names types, else one mask; ways of mixers."""
    variants = [interface]
    views = [view for view in interface.masks.values() if view is not None]
    if "" not in interface.masks and len(views) == 1:
        variants.append(replace(interface, masks={"": views[0]}))
    if interface.derives_positions and not interface.recurrent:
        ways = _find_places(model, interface)
        if not ways:
            yield DERIVES
        yield from (replace(variant, places=places) for places in ways for variant in variants)
        return
    if not interface.recurrent:
        yield from variants
        if interface.takes_position_ids:
            ways = _find_places(model, unplaced(interface))
            yield from (replace(unplaced(variant), places=places) for places in ways for variant in variants)
        return
    try:
        mixers = find_mixers(model, interface.cache_name, sample_tokens(model, 4))
    except Exception as error:  # whatever a model's own code raises
        mixers = f"its forward fails ({in_a_line(error)})"
    if isinstance(mixers, str):
        yield mixers
        return
    known: list[Way] = ["rows"] if all(replaceable(mixer.module) for mixer in mixers) else []
    for way in (*known, "steps"):
        recurrence = Recurrence(tuple(mixers), way)
        yield from (replace(variant, recurrence=recurrence) for variant in variants)


def unplaced(interface: ModelInterface) -> ModelInterface:
    """The same model left to derive positions: some take them, are given none, and count from another number."""
    return replace(interface, takes_position_ids=False)


def _find_places(model: Any, interface: ModelInterface) -> list[tuple[Place, ...]]:
    """Where a model hands on positions that it derives itself, and then also masks; nothing where it cannot be told."""
    ids = sample_tokens(model, PROMPT)
    root, *chain = (token % vocabulary(model) for token in range(5, 10))
    verifier = HFVerifier(model, interface, "chain")
    try:
        with torch.no_grad():
            prompt = start(model, verifier, ids)
            verifier.forward(prompt)
            verifier.commit(np.empty(0, np.int32))
            with noting_places(model, len(prompt), 5) as places:
                verifier.forward(np.array([root], np.int32), DraftTree.from_paths([chain]))
    except Exception:  # whatever a model's own code raises: chains will tell
        logger.debug("no chain passes", exc_info=True)
        return []
    finally:
        verifier.finish()
    ways = [outermost([place for place in places if place.kind != "mask"])]
    if any(place.kind == "mask" for place in places):
        ways.append(outermost(places))
    return [way for way in ways if way]


def start(model: Any, verifier: Verifier, ids: torch.Tensor) -> NDArray[np.int32]:
    """Start a verifier on a prompt of (1, L) tokens; (m,) int32 what it is to read."""
    call = prepare_call(model, ids, torch.ones_like(ids))
    prompt: NDArray[np.int32] = call.input_ids[0].cpu().numpy().astype(np.int32)
    verifier.start(VerifierInputs(call.input_ids, call.take(), max_length=len(prompt) + 64))
    return prompt
