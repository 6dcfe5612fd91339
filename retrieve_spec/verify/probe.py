"""Probe: the strongest mode a model can be verified in; passes over drafts are compared with single steps.

The reference is what plain `generate` does: the prompt in one pass, then single steps from the cache, with padding in
front and without. A text of a few passes is read both ways: drafts whose second branch is right, wrong ones, right
ones, no draft at all. The comparison covers the rollback too: what follows a pass of which a part was accepted must
match as well. A mode that raises or deviates is not used.

The stages, each over some trials:

| stage | examined | trials | if no mode passes; if a weaker one does |
|---|---|---|---|
| on itself | the model | a short prompt, and past its windows where these are short | no drafts; the weaker mode |
| past windows | a small copy with short windows | past these | the next line; the weaker mode |
| below windows | a small copy with longer windows | below these | no drafts; no drafts |
| below choices | nothing | none | – |

Passes of some models agree with single steps below such a length only (sparse attention whose choice of keys turns on
rounding): if they do below windows, nothing is drafted beyond the first length, and neither where no small copy can be
made. Wherever layers choose keys, drafts are limited so: passes may agree beyond by luck.

A model of many layers, in 16 bits, or with quantised weights is probed in two tiers: all of this on its first layers in
float32 (`retrieve_spec.verify.shrink`; a small copy where its weights cannot be cast), then one text on the model
itself, where passes of the latter two may be as far from single steps as other plain ways to read it
(`retrieve_spec.verify.comparison`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from retrieve_spec.errors import in_a_line
from retrieve_spec.model_layers import evaluating
from retrieve_spec.verify.cache import cache_mode
from retrieve_spec.verify.comparison import is_exact, rows_change_one_another
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, new_cache, read_interface, weaker
from retrieve_spec.verify.shrink import CHOICES, float32_copy, is_deep, lengths_of, shrunk
from retrieve_spec.verify.signatures import SignatureModes
from retrieve_spec.verify.steps import SingleSteps, prepare_call, sample_tokens
from retrieve_spec.verify.trials import PROMPT, PlainTexts, Trial, problem_of
from retrieve_spec.verify.verifier import Mode
from retrieve_spec.verify.ways import layout_of, ways

logger = logging.getLogger(__name__)

_PADDING = 3
REACH = 48
"""Lengths up to this one are crossed on the model itself."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: how a model can be verified, why not better, and the interface that worked.

    `signatures` is what calls with more than text have shown since; `texts` are those that the model itself was
    compared on.
    """

    mode: Mode
    reason: str
    interface: ModelInterface
    signatures: SignatureModes = field(default_factory=SignatureModes)
    texts: PlainTexts = field(default_factory=PlainTexts, compare=False)

    def narrowed(self, other: Finding) -> Finding:
        """Return this finding, with padded rows and prompts in pieces only where another finding accepts them, too."""
        ours, theirs = self.interface, other.interface
        padding, pieces = ours.takes_padding and theirs.takes_padding, ours.takes_pieces and theirs.takes_pieces
        return replace(self, interface=replace(ours, takes_padding=padding, takes_pieces=pieces))

    def limited(self, lengths: Iterable[int], why: str) -> Finding:
        """Return this finding up to the first of some lengths; beyond it prompts are read as `generate` does."""
        first = min(lengths)
        logger.debug("nothing is drafted beyond %d tokens: %s", first, why)
        limit = min(first, self.interface.max_positions or first)
        return replace(self, interface=replace(self.interface, max_positions=limit, takes_pieces=False))


@dataclass(frozen=True, slots=True)
class Examined:
    """A model, or a copy in its place, with the lengths, by name, from which the model's layers attend to less."""

    model: Any
    lengths: dict[str, int]

    @property
    def longest(self) -> int:
        """The longest of these lengths that the examined model or copy has itself; 0 without any."""
        return max(lengths_of(self.model.config).values(), default=0)


def call_once(model: Any) -> None:
    """Call a model's forward once, if it works, so that it sets what it sets once; with another text than `probe`
    reads.
    """
    ids = sample_tokens(model, PROMPT - 1, which=1)
    with contextlib.suppress(Exception), torch.no_grad(), evaluating(model):
        steps = SingleSteps.of(model, prepare_call(model, ids, torch.ones_like(ids)))
        steps.feed()
        steps.feed(int(ids[0, 0]))


def probe(model: Any, interface: ModelInterface) -> Finding:
    """Try trees, then chains; a mode counts when its logits are those of single steps from a cache."""
    at_most = Finding(*weaker((interface.mode, interface.reason), _fresh_cache_mode(model)), interface)
    if at_most.mode == "plain":
        return at_most
    lengths = lengths_of(model.config)
    if is_exact(model) and not is_deep(model):
        return _examine(Examined(model, lengths), at_most)
    if why := rows_change_one_another(model):
        return replace(at_most, mode="plain", reason=why)
    copied = float32_copy(model)
    if copied is None:
        return _examine(Examined(model, lengths), at_most)
    of_copy = read_interface(copied)
    found = _examine(Examined(copied, lengths), replace(at_most, interface=of_copy))
    if found.mode == "plain":
        return Finding(found.mode, found.reason, interface)
    texts = PlainTexts(found.interface.takes_padding, found.interface.takes_pieces)
    at_most, layout = replace(found, interface=interface, texts=texts), layout_of(found.interface)
    itself = _strongest(model, at_most, [Trial(PROMPT, 0)], layout).narrowed(found)
    if found.interface.max_positions == of_copy.max_positions:
        return itself
    return replace(itself, interface=replace(itself.interface, max_positions=found.interface.max_positions))


def _examine(examined: Examined, at_most: Finding) -> Finding:
    """Go through the stages; the first one that leaves no mode ends the probe."""
    found = at_most
    for stage in _STAGES:
        found = stage(examined, found)
        if found.mode == "plain":
            break
    return found


def _on_itself(examined: Examined, at_most: Finding) -> Finding:
    """Return the strongest mode whose passes agree with single steps, padded and past short windows, too."""
    longest, positions = examined.longest, at_most.interface.max_positions
    trials = [] if longest > REACH else [Trial(PROMPT, 0, 2)]
    if 0 < longest <= REACH:
        trials += [Trial(longest + 3, 0, 2), Trial(longest + 3, _PADDING)]
    fitting = [trial for trial in trials if not positions or trial.length <= positions]
    return _strongest(examined.model, at_most, [Trial(PROMPT, _PADDING), *fitting])


def _past_windows(examined: Examined, found: Finding) -> Finding:
    """Check a finding on a small copy of the model whose windows are short enough to go beyond them."""
    if examined.longest <= REACH:
        return found
    small = shrunk(examined.model)
    if small is None:
        return found.limited(examined.lengths.values(), "no small copy can be made")
    longest = Examined(small, {}).longest
    trials = [Trial(longest // 2 + 1, 0, 3), Trial(longest + 3, 0, 2), Trial(longest + 3, _PADDING, 2)]
    beyond = _on_copy(small, found, trials)
    if beyond.mode == found.mode:
        return found.narrowed(beyond)
    reason = f"past its windows, {beyond.reason}" if beyond.reason else ""
    if beyond.mode != "plain":
        weaker_one = Finding(beyond.mode, reason, found.interface)
        return _strongest(examined.model, weaker_one, [Trial(PROMPT, _PADDING)]).narrowed(found).narrowed(beyond)
    return _below_windows(examined, found, reason)


def _below_windows(examined: Examined, found: Finding, reason: str) -> Finding:
    """Check a finding on small copies, below their windows: those that choose keys first, then all."""
    for names in (CHOICES, examined.lengths.keys()):
        longer = {name: length for name, length in examined.lengths.items() if name in names}
        small = shrunk(examined.model, longer) if longer else None
        if small is None:
            continue
        least = min(length for name, length in lengths_of(small.config).items() if name in longer)
        trials = [Trial(PROMPT, _PADDING), Trial(least - 22, 0, 2), Trial(least - 22 - _PADDING, _PADDING, 2)]
        below = _on_copy(small, found, trials)
        if below.mode == found.mode:
            return found.narrowed(below).limited(longer.values(), reason)
    return Finding("plain", reason, found.interface)


def _below_choices(examined: Examined, found: Finding) -> Finding:
    """Limit a finding where layers choose among keys."""
    choices = [length for name, length in examined.lengths.items() if name in CHOICES]
    return found.limited(choices, "which keys are seen there turns on rounding") if choices else found


_STAGES: tuple[Callable[[Examined, Finding], Finding], ...] = (_on_itself, _past_windows, _below_choices)


def _on_copy(small: Any, found: Finding, trials: list[Trial]) -> Finding:
    """Return the strongest mode of a small copy that works in a finding's way, up to the finding's mode."""
    of_copy = Finding(found.mode, found.reason, read_interface(small))
    return _strongest(small, of_copy, trials, layout_of(found.interface))


def _strongest(model: Any, at_most: Finding, trials: list[Trial], layout: str = "") -> Finding:
    """Return the strongest mode, up to that of a finding, that passes all trials. One that passes only those without
    padding is for rows without padding. With a `layout`, only interfaces of that layout are tried.
    """
    texts, first = at_most.texts, ""
    for padded in (True, False):
        of_these = [trial for trial in trials if padded or not trial.padding]
        if not of_these or (not padded and len(of_these) == len(trials)):
            break
        why = at_most.reason
        modes: list[Mode] = ["tree", "chain"] if at_most.mode == "tree" else [at_most.mode]
        for mode in modes:
            problems: list[tuple[float, str]] = []
            for way in ways(model, at_most.interface, mode, padded, layout):
                if isinstance(way, str):
                    problems.append((math.inf, way))
                    continue
                problem = problem_of(model, mode, of_these, partial(HFVerifier, model, way, mode), texts)
                if problem is None:
                    return Finding(mode, "" if mode == "tree" else why, way, SignatureModes(texts.rounding), texts)
                problems.append(problem)
            why = min(problems, key=itemgetter(0), default=(0.0, why))[1]
        first = first or why
    return Finding("plain", first, at_most.interface)


def _fresh_cache_mode(model: Any) -> tuple[Mode, str]:
    """Return the best mode that a new cache of a model allows, and why not better."""
    if not model._supports_default_dynamic_cache():
        return "plain", "the model keeps its own kind of cache"
    try:
        return cache_mode(new_cache(model))
    except Exception as error:  # the config does not tell what its layers keep
        return "plain", f"no cache can be made for it ({in_a_line(error)})"
