"""Ways: the interfaces by which a model may be verified, the likeliest first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import in_a_line
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import DERIVES, ModelInterface, Recurrence, Way, read_interface
from retrieve_spec.verify.mixers import find_mixers
from retrieve_spec.verify.positions import Place, noting_places, outermost
from retrieve_spec.verify.recurrent import replaceable
from retrieve_spec.verify.steps import sample_tokens, vocabulary
from retrieve_spec.verify.trials import PROMPT, read_prompt
from retrieve_spec.verify.verifier import Mode

logger = logging.getLogger(__name__)


def ways(
    model: Any, interface: ModelInterface, mode: Mode, padded: bool, layout: str
) -> Iterator[ModelInterface | str]:
    """Yield interfaces that a mode may work with, the likeliest first, or why one does not exist."""
    by_tree = mode == "tree" or interface.recurrent
    for candidate in candidates(model, interface) if by_tree else (interface, unplaced(interface)):
        if isinstance(candidate, str):
            yield candidate
        elif not layout or mode != "tree" or layout_of(candidate) == layout:
            for pieces in (True, False):
                yield replace(candidate, takes_padding=padded, takes_pieces=pieces)


def layout_of(interface: ModelInterface) -> str:
    """Return which of the candidates an interface is."""
    way = interface.recurrence.way if interface.recurrence is not None else ""
    inside = interface.masks_inside
    return f"{sorted(interface.masks)}{way}{bool(interface.places)}{inside}{interface.takes_position_ids}"


def way_of_layout(model: Any, interface: ModelInterface, layout: str) -> ModelInterface | None:
    """Return the candidate with a layout, None where there is none."""
    ways = (way for way in candidates(model, interface) if not isinstance(way, str))
    return next((way for way in ways if layout_of(way) == layout), None)


def same_way(copied: Any, interface: ModelInterface) -> ModelInterface:
    """Return the interface of a model's copy in the way that worked for the model."""
    own = read_interface(copied)
    return way_of_layout(copied, own, layout_of(interface)) or own


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
    except Exception as error:  # a model's own code may raise anything
        mixers = f"its forward fails ({in_a_line(error)})"
    if isinstance(mixers, str):
        yield mixers
        return
    known: list[Way] = ["rows"] if all(replaceable(mixer.module) for mixer in mixers) else []
    for way in (*known, "steps"):
        recurrence = Recurrence(tuple(mixers), way)
        yield from (replace(variant, recurrence=recurrence) for variant in variants)


def unplaced(interface: ModelInterface) -> ModelInterface:
    """Return the interface without position ids: some models count otherwise where `generate` gives none."""
    return replace(interface, takes_position_ids=False)


def _find_places(model: Any, interface: ModelInterface) -> list[tuple[Place, ...]]:
    """Find where a model passes on positions that it derives itself, and also masks; empty where it cannot be told."""
    ids = sample_tokens(model, PROMPT)
    root, *chain = (token % vocabulary(model) for token in range(5, 10))
    verifier = HFVerifier(model, interface, "chain")
    try:
        with torch.no_grad():
            past = read_prompt(model, verifier, ids)
            with noting_places(model, past, 5) as places:
                verifier.forward(np.array([root], np.int32), DraftTree.from_paths([chain]))
    except Exception:  # a model's own code may raise anything; chains are tried later
        logger.debug("no chain passes", exc_info=True)
        return []
    finally:
        verifier.finish()
    ways = [outermost([place for place in places if place.kind != "mask"])]
    if any(place.kind == "mask" for place in places):
        ways.append(outermost(places))
    return [way for way in ways if way]
