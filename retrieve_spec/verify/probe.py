"""Probe: the strongest mode a model can be verified in; passes over drafts are compared with single steps.

The reference is what plain `generate` does: the prompt in one pass, then single steps from the cache, with padding in
front and without. A text of a few passes is read both ways: drafts whose second branch is right, wrong ones, right
ones, no draft at all. Where a config names a window, a chunk or another length at which layers begin to see less, the
text goes beyond every one of them: on the model itself where they are short, else on a small copy built from its config
(`retrieve_spec.verify.shrink`). Where there is none, or where passes agree with single steps below such a length only
(sparse attention whose choice of keys turns on rounding), nothing is drafted beyond the first.

A model of many layers, in 16 bits, or with quantised weights is probed in two tiers: all of this on its first layers in
float32 (`retrieve_spec.verify.shrink`; a small copy where its weights cannot be cast), then one text on the model
itself, where passes of the latter two may be as far from single steps as other plain ways to read it
(`retrieve_spec.verify.comparison`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import in_a_line
from retrieve_spec.verify.cache import cache_mode
from retrieve_spec.verify.comparison import (
    Draft,
    PlainText,
    Rounding,
    by_passes,
    drafts_for,
    is_exact,
    row_texts,
    rows_change_one_another,
)
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import DERIVES, ModelInterface, Recurrence, Way, new_cache, read_interface, weaker
from retrieve_spec.verify.mixers import find_mixers
from retrieve_spec.verify.positions import Place, noting_places, outermost
from retrieve_spec.verify.recurrent import replaceable
from retrieve_spec.verify.shrink import CHOICES, float32_copy, is_deep, lengths_of, shrunk
from retrieve_spec.verify.signatures import SignatureModes
from retrieve_spec.verify.steps import Captured, prepare_call, sample_tokens, vocabulary
from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs

logger = logging.getLogger(__name__)

PROMPT = 12
"""Tokens of a prompt that is shorter than every window."""
_ACROSS = 318
"""Tokens of a prompt behind which a draft reaches into the next block of keys of a GPU's attention."""
_PADDING = 3
_AHEAD = 80
"""Positions that trials take behind a prompt at most."""
REACH = 48
"""Lengths up to this one are crossed on the model itself."""


class VerificationError(Exception):
    """A way to verify is not used for a model; the message says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One text to read: tokens of the prompt, padding in front of it, and how many rounds of passes behind it."""

    prompt: int
    padding: int
    rounds: int = 1

    @property
    def length(self) -> int:
        """Positions that the text takes at most."""
        return self.prompt + (4 if self.rounds == 1 else 9 * self.rounds + 3)


class PlainTexts:
    """What plain decoding says of trials, read once each.

    Parameters
    ----------
    pads, pieces
        Whether the model takes padding in front of texts, and prompts in pieces.
    """

    def __init__(self, pads: bool = True, pieces: bool = True) -> None:
        self._pads, self._pieces = pads, pieces
        self._read: dict[tuple[Trial, Mode], PlainText] = {}

    def read(self, model: Any, trial: Trial, mode: Mode) -> PlainText:
        """A trial's text with the drafts of a mode; without padding where the model takes none."""
        text = self._read.get((trial, mode))
        if text is None:
            drafts = drafts_for(mode, trial.rounds, model)
            try:
                text = PlainText.read(model, trial.prompt, trial.padding, drafts, self._pads, self._pieces)
            except Exception:
                if not trial.padding:
                    raise
                text = PlainText.read(model, trial.prompt, 0, drafts, self._pads, self._pieces)
            self._read[trial, mode] = text
        return text

    @property
    def rounding(self) -> Rounding | None:
        """What rounding makes of the texts at most; None where none was read."""
        return max((text.rounding for text in self._read.values()), key=lambda r: (r.rms, r.largest), default=None)

    def clear(self) -> None:
        """Forget the texts."""
        self._read.clear()


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: how a model can be verified, why not better, and the interface that worked.

    `signatures` is what calls with more than text have shown since; `texts` what the model itself was held against.
    """

    mode: Mode
    reason: str
    interface: ModelInterface
    signatures: SignatureModes = field(default_factory=SignatureModes)
    texts: PlainTexts = field(default_factory=PlainTexts, compare=False)


def probe(model: Any, interface: ModelInterface) -> Finding:
    """Try trees, then chains; a mode counts when its logits are those of single steps from a cache.

    A mode that raises or deviates is not used. The comparison covers the rollback too: what follows a pass of which a
    part was accepted must match as well.
    """
    mode, reason = weaker((interface.mode, interface.reason), _fresh_cache_mode(model))
    if mode == "plain":
        return Finding(mode, reason, interface)
    if is_exact(model) and not is_deep(model):
        return _structure(model, interface, mode, reason, lengths_of(model.config))
    if why := rows_change_one_another(model):
        return Finding("plain", why, interface)
    copied = float32_copy(model)
    if copied is None:
        return _structure(model, interface, mode, reason, lengths_of(model.config))
    of_copy = read_interface(copied)
    found = _structure(copied, of_copy, mode, reason, lengths_of(model.config))
    if found.mode == "plain":
        return Finding(found.mode, found.reason, interface)
    limit = found.interface.max_positions if found.interface.max_positions != of_copy.max_positions else 0
    texts = PlainTexts(found.interface.takes_padding, found.interface.takes_pieces)
    layout = layout_of(found.interface)
    itself = _strongest(model, interface, found.mode, found.reason, [Trial(PROMPT, 0)], layout, texts)
    itself = _both(itself, found)
    if limit:
        itself = replace(itself, interface=replace(itself.interface, max_positions=limit))
    return itself


def _structure(model: Any, interface: ModelInterface, mode: Mode, reason: str, limits: dict[str, int]) -> Finding:
    """The strongest mode whose logits, rollbacks, windows and padding are those of single steps.

    `limits` are the lengths up to which it holds where it does not beyond, by their names.
    """
    lengths = lengths_of(model.config)
    far = bool(lengths) and max(lengths.values()) > REACH
    trials = [Trial(PROMPT, _PADDING)]
    if not far:
        most = max(lengths.values(), default=0)
        trials += [Trial(PROMPT, 0, 2)] + ([Trial(most + 3, 0, 2), Trial(most + 3, _PADDING)] if lengths else [])
    if interface.max_positions:
        trials = trials[:1] + [trial for trial in trials[1:] if trial.length <= interface.max_positions]
    found = _strongest(model, interface, mode, reason, trials)
    if far and found.mode != "plain":
        found = _beyond(model, found, limits)
    choices = {name: length for name, length in limits.items() if name in CHOICES}
    if choices and found.mode != "plain":  # passes may agree beyond them too, by luck
        return _up_to(found, choices, "which keys are seen there turns on rounding")
    return found


def _beyond(model: Any, found: Finding, lengths: dict[str, int]) -> Finding:
    """Hold a finding against small copies of the model whose windows are short enough to go beyond them."""
    small = shrunk(model)
    if small is None:
        return _up_to(found, lengths, "no small copy can be made")
    most = max(lengths_of(small.config).values(), default=0)
    trials = [Trial(most // 2 + 1, 0, 3), Trial(most + 3, 0, 2), Trial(most + 3, _PADDING, 2)]
    beyond = _of_copy(small, found, trials)
    if beyond.mode == found.mode:
        return _both(found, beyond)
    mode, reason = beyond.mode, f"past its windows, {beyond.reason}" if beyond.reason else beyond.reason
    if mode != "plain":
        again = _strongest(model, found.interface, mode, reason, [Trial(PROMPT, _PADDING)])
        return _both(_both(again, found), beyond)
    for some in (CHOICES, lengths.keys()):
        longer = {name: length for name, length in lengths.items() if name in some}
        small = shrunk(model, longer) if longer else None
        if small is None:
            continue
        least = min(length for name, length in lengths_of(small.config).items() if name in longer)
        trials = [Trial(PROMPT, _PADDING), Trial(least - 22, 0, 2), Trial(least - 22 - _PADDING, _PADDING, 2)]
        below = _of_copy(small, found, trials)
        if below.mode == found.mode:
            return _up_to(_both(found, below), longer, reason)
    return Finding(mode, reason, found.interface)


def _both(found: Finding, other: Finding) -> Finding:
    """A finding, of padded rows and prompts in pieces only where another one of the same way takes them, too."""
    ours, theirs = found.interface, other.interface
    padding, pieces = ours.takes_padding and theirs.takes_padding, ours.takes_pieces and theirs.takes_pieces
    return replace(found, interface=replace(ours, takes_padding=padding, takes_pieces=pieces))


def _of_copy(small: Any, found: Finding, trials: list[Trial]) -> Finding:
    """What the same way gives on a copy."""
    return _strongest(small, read_interface(small), found.mode, found.reason, trials, layout_of(found.interface))


def _up_to(found: Finding, lengths: dict[str, int], why: str) -> Finding:
    """A finding that holds up to the first of some lengths; beyond, prompts are read at once as by `generate`."""
    first = min(lengths.values())
    logger.debug("nothing is drafted beyond %d tokens: %s", first, why)
    limit = min(first, found.interface.max_positions or first)
    return replace(found, interface=replace(found.interface, max_positions=limit, takes_pieces=False))


def check_verifier(
    model: Any,
    verifier: Verifier,
    mode: Mode = "tree",
    texts: PlainTexts | None = None,
    trial: Trial = Trial(PROMPT, 0),
) -> None:
    """Hold a verifier's passes over drafts against single steps.

    Raises
    ------
    VerificationError
        Where they give other logits, or fail.
    """
    problem = _problem(model, mode, [trial], lambda: verifier, PlainTexts() if texts is None else texts)
    if problem is not None:
        raise VerificationError(problem[1])


def check_exact(model: Any, verifier: Callable[[], Verifier], texts: PlainTexts) -> None:
    """Hold a verifier's passes over drafts against its passes without, bit for bit.

    Raises
    ------
    VerificationError
        Where they give other logits.
    """
    trial = Trial(PROMPT if model.device.type == "cpu" else _ACROSS, 0)
    text = texts.read(model, trial, "tree")
    with torch.no_grad():
        drafted = _verified(text, "tree", verifier())
        for row, tokens in enumerate(row_texts(text.drafts)):
            one_by_one = replace(text, drafts=[Draft(token, [], []) for token in tokens])
            alone = _verified(one_by_one, "tree", verifier())[-1]
            if not torch.equal(drafted[row], alone):
                raise VerificationError("a row's logits depend on the drafts beside it")


def _strongest(
    model: Any,
    interface: ModelInterface,
    mode: Mode,
    reason: str,
    trials: list[Trial],
    layout: str = "",
    texts: PlainTexts | None = None,
) -> Finding:
    """The strongest mode up to `mode` that passes all trials, or those without padding, for such rows alone then."""
    texts = PlainTexts() if texts is None else texts
    first = ""
    for padded in (True, False):
        of_these = [trial for trial in trials if padded or not trial.padding]
        if not of_these or (not padded and len(of_these) == len(trials)):
            break
        why = reason
        modes: list[Mode] = ["tree", "chain"] if mode == "tree" else [mode]
        for tried in modes:
            problems: list[tuple[float, str]] = []
            for way in _ways(model, interface, tried, padded, layout):
                if isinstance(way, str):
                    problems.append((math.inf, way))
                    continue
                problem = _problem(model, tried, of_these, partial(HFVerifier, model, way, tried), texts)
                if problem is None:
                    signatures = SignatureModes(texts.rounding)
                    return Finding(tried, "" if tried == "tree" else why, way, signatures, texts)
                problems.append(problem)
            why = min(problems, key=itemgetter(0), default=(0.0, why))[1]
        first = first or why
    return Finding("plain", first, interface)


def _ways(
    model: Any, interface: ModelInterface, mode: Mode, padded: bool, layout: str
) -> Iterator[ModelInterface | str]:
    """Interfaces that a mode may work with, the likeliest first, or why one is not there."""
    by_tree = mode == "tree" or interface.recurrent
    for candidate in candidates(model, interface) if by_tree else (interface, unplaced(interface)):
        if isinstance(candidate, str):
            yield candidate
        elif not layout or mode != "tree" or layout_of(candidate) == layout:
            for pieces in (True, False):
                yield replace(candidate, takes_padding=padded, takes_pieces=pieces)


def _fresh_cache_mode(model: Any) -> tuple[Mode, str]:
    if not model._supports_default_dynamic_cache():
        return "plain", "the model keeps its own kind of cache"
    try:
        return cache_mode(new_cache(model))
    except Exception as error:  # a config that does not say what its layers keep
        return "plain", f"no cache can be made for it ({in_a_line(error)})"


def _problem(
    model: Any, mode: Mode, trials: list[Trial], verifier: Callable[[], Verifier], texts: PlainTexts
) -> tuple[float, str] | None:
    """How many times farther off a mode is than allowed, and what is wrong with it; None when nothing is."""
    try:
        with torch.no_grad():
            for trial in trials:
                text = texts.read(model, trial, mode)
                got = _verified(text, mode, verifier())
                deviation = text.rounding.compare(got, text.reference.rows)
                if not deviation.is_rounding:
                    return deviation.excess, f"a {mode} pass gives other logits than single steps ({deviation})"
    except Exception as error:  # whatever a model's own code raises: the mode is not usable, and plain decoding is
        logger.debug("probing %s failed", mode, exc_info=True)
        return math.inf, f"a {mode} pass fails ({in_a_line(error)})"
    return None


def _verified(text: PlainText, mode: Mode, verifier: Verifier) -> torch.Tensor:
    """(rows, vocab) logits of the passes of a verifier."""
    try:
        _read(verifier, text.call, in_pieces=True)
        if verifier.mode != mode:
            raise RuntimeError(verifier.reason)
        return by_passes(verifier, text.drafts)
    finally:
        verifier.finish()


def layout_of(interface: ModelInterface) -> str:
    """Which of the candidates an interface is."""
    way = interface.recurrence.way if interface.recurrence is not None else ""
    inside = interface.masks_inside
    return f"{sorted(interface.masks)}{way}{bool(interface.places)}{inside}{interface.takes_position_ids}"


def way_of_layout(model: Any, interface: ModelInterface, layout: str) -> ModelInterface | None:
    """The candidate with a layout, None where there is none."""
    ways = (way for way in candidates(model, interface) if not isinstance(way, str))
    return next((way for way in ways if layout_of(way) == layout), None)


def same_way(copied: Any, interface: ModelInterface) -> ModelInterface:
    """How a copy of a model runs in the way that worked for the model."""
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
            past = read_prompt(model, verifier, ids)
            with noting_places(model, past, 5) as places:
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


def read_prompt(model: Any, verifier: Verifier, ids: torch.Tensor) -> int:
    """Let a verifier read a prompt of (1, L) tokens; how many it has then."""
    return _read(verifier, prepare_call(model, ids, torch.ones_like(ids)))


def _read(verifier: Verifier, call: Captured, in_pieces: bool = False) -> int:
    length = int(call.input_ids.shape[1])
    verifier.start(VerifierInputs(call.input_ids, call.take(), max_length=length + _AHEAD))
    cuts = [length // 2, max(length // 2, length - 2)] if in_pieces and not verifier.whole_prompts else []
    for piece in filter(len, np.split(call.input_ids[0].cpu().numpy().astype(np.int32), cuts)):
        verifier.forward(piece)
        verifier.commit(np.empty(0, np.int32))
    return length
