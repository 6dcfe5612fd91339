"""Probe: the strongest mode a model can be verified in; passes over drafts are compared with single steps.

The reference is what plain `generate` does: the prompt in one pass, then single steps from the cache, with padding in
front and without. A text of a few passes is read both ways: drafts whose second branch is right, wrong ones, right
ones, no draft at all. Where a config names a window, a chunk or another length at which layers begin to see less, the
text goes beyond every one of them: on the model itself where they are short, else on a small copy built from its config
(`retrieve_spec.verify.shrink`). Where there is none, or where passes agree with single steps below such a length only
(sparse attention whose choice of keys turns on rounding), nothing is drafted beyond the first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from retrieve_spec.errors import in_a_line
from retrieve_spec.verify.cache import cache_mode
from retrieve_spec.verify.call_kinds import CallKinds
from retrieve_spec.verify.candidates import PROMPT, candidates, layout_of, unplaced
from retrieve_spec.verify.comparison import (
    Draft,
    Reference,
    by_passes,
    by_single_steps,
    disagreement,
    drafts_for,
    noise_of,
    spread_of,
)
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, new_cache, read_interface, weaker
from retrieve_spec.verify.shrink import CHOICES, lengths_of, shrunk
from retrieve_spec.verify.steps import Captured, SingleSteps, prepare_call, sample_tokens
from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs

logger = logging.getLogger(__name__)

_PADDING = 3
_REACH = 48
"""Lengths up to this one are crossed on the model itself."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: how a model can be verified, why not better, and the interface that worked.

    `kinds` is what calls with more than text have shown since.
    """

    mode: Mode
    reason: str
    interface: ModelInterface
    kinds: CallKinds = field(default_factory=CallKinds)


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


def probe(model: Any, interface: ModelInterface) -> Finding:
    """Try trees, then chains; a mode counts when its logits are those of single steps from a cache.

    A mode that raises or deviates is not used. The comparison covers the rollback too: what follows a pass of which a
    part was accepted must match as well.
    """
    mode, reason = weaker((interface.mode, interface.reason), _fresh_cache_mode(model))
    if mode == "plain":
        return Finding(mode, reason, interface)
    lengths = lengths_of(model.config)
    far = bool(lengths) and max(lengths.values()) > _REACH
    trials = [Trial(PROMPT, _PADDING)]
    if not far:
        most = max(lengths.values(), default=0)
        trials += [Trial(PROMPT, 0, 2)] + ([Trial(most + 3, 0, 2), Trial(most + 3, _PADDING)] if lengths else [])
    if interface.max_positions:
        trials = trials[:1] + [trial for trial in trials[1:] if trial.length <= interface.max_positions]
    kinds = CallKinds()
    found = replace(_strongest(model, interface, mode, reason, trials, kinds=kinds), kinds=kinds)
    if far and found.mode != "plain":
        found = _beyond(model, found, lengths)
    choices = {name: length for name, length in lengths.items() if name in CHOICES}
    if choices and found.mode != "plain":  # passes may agree beyond them too, by luck
        return _up_to(found, choices, "which keys are seen there turns on rounding")
    return found


def _beyond(model: Any, found: Finding, lengths: dict[str, int]) -> Finding:
    """Hold a finding against small copies of the model whose windows are short enough to go beyond them."""
    small, why = shrunk(model)
    if small is None:
        return _up_to(found, lengths, why)
    most = max(lengths_of(small.config).values(), default=0)
    trials = [Trial(most // 2 + 1, 0, 3), Trial(most + 3, 0, 2), Trial(most + 3, _PADDING, 2)]
    beyond = _of_copy(small, found, trials)
    if beyond.mode == found.mode:
        return _both(found, beyond)
    mode, reason = beyond.mode, f"past its windows, {beyond.reason}" if beyond.reason else beyond.reason
    if mode != "plain":
        again = _strongest(model, found.interface, mode, reason, [Trial(PROMPT, _PADDING)])
        return _both(_both(replace(again, kinds=found.kinds), found), beyond)
    for some in (CHOICES, lengths.keys()):
        longer = {name: length for name, length in lengths.items() if name in some}
        small, why = shrunk(model, longer) if longer else (None, "")
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


def check_verifier(model: Any, interface: ModelInterface, verifier: Verifier, mode: Mode = "tree") -> str:
    """Say what is wrong with a verifier's passes over drafts, by the same comparison; empty when nothing is."""
    return _problem(model, interface, mode, [Trial(PROMPT, 0)], verifier)


def _strongest(
    model: Any,
    interface: ModelInterface,
    mode: Mode,
    reason: str,
    trials: list[Trial],
    layout: str = "",
    kinds: CallKinds | None = None,
) -> Finding:
    """The strongest mode up to `mode` that passes all trials, or those without padding, for such rows alone then."""
    first = ""
    for padded in (True, False):
        of_these = [trial for trial in trials if padded or not trial.padding]
        if not of_these or (not padded and len(of_these) == len(trials)):
            break
        why = reason
        modes: list[Mode] = ["tree", "chain"] if mode == "tree" else [mode]
        for tried in modes:
            problem = ""
            for candidate in _ways(model, interface, tried):
                if isinstance(candidate, str):
                    problem = candidate
                    continue
                if layout and tried == "tree" and layout_of(candidate) != layout:
                    continue
                for pieces in (True, False):
                    way = replace(candidate, takes_padding=padded, takes_pieces=pieces)
                    problem = _problem(model, way, tried, of_these, kinds=kinds)
                    if not problem:
                        return Finding(tried, "" if tried == "tree" else why, way)
            why = problem or why
        first = first or why
    return Finding("plain", first, interface)


def _ways(model: Any, interface: ModelInterface, mode: Mode) -> Iterable[ModelInterface | str]:
    """The interfaces to try in a mode."""
    if mode == "tree" or interface.recurrent:
        return candidates(model, interface)
    return (interface, unplaced(interface))


def _fresh_cache_mode(model: Any) -> tuple[Mode, str]:
    if not model._supports_default_dynamic_cache():
        return "plain", "the model keeps its own kind of cache"
    try:
        return cache_mode(new_cache(model))
    except Exception as error:  # a config that does not say what its layers keep
        return "plain", f"no cache can be made for it ({in_a_line(error)})"


def _problem(
    model: Any,
    interface: ModelInterface,
    mode: Mode,
    trials: list[Trial],
    verifier: Verifier | None = None,
    kinds: CallKinds | None = None,
) -> str:
    """What is wrong with a mode; empty when nothing is. `kinds` hears what plain decoding makes of noise."""
    try:
        with torch.no_grad():
            for trial in trials:
                problem, noise = _try(model, mode, trial, verifier or HFVerifier(model, interface, mode))
                if kinds is not None:
                    kinds.noise = max(kinds.noise, noise)
                if problem:
                    return problem
    except Exception as error:  # whatever a model's own code raises: the mode is not usable, and plain decoding is
        logger.debug("probing %s failed", mode, exc_info=True)
        return f"a {mode} pass fails ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return ""


def _try(model: Any, mode: Mode, trial: Trial, verifier: Verifier) -> tuple[str, float]:
    """Read one text both ways; what differs, and noise as a share of the logits' spread."""
    drafts = drafts_for(mode, trial.rounds, model)
    try:
        call, reference, noise = _read_plainly(model, trial, drafts)
    except Exception:
        if not trial.padding:
            raise
        trial = replace(trial, padding=0)  # a model that takes no padding is not asked to by its users either
        call, reference, noise = _read_plainly(model, trial, drafts)
    got = _verified(call, mode, drafts, verifier, trial.rounds)
    return disagreement(got, reference.rows, noise, model.dtype, mode), noise / spread_of(reference.rows)


def _read_plainly(model: Any, trial: Trial, drafts: list[Draft]) -> tuple[Captured, Reference, float]:
    """A trial's text by single steps: how it begins, logits, and what plain decoding makes of noise."""
    ids = sample_tokens(model, trial.prompt + trial.padding)
    shown = torch.ones_like(ids)
    shown[:, : trial.padding] = 0
    call = prepare_call(model, ids, shown)
    steps = SingleSteps.of(model, call)
    steps.feed()
    reference = by_single_steps(steps, drafts)
    return call, reference, noise_of(model, call, reference, trial.padding)


def _verified(call: Captured, mode: Mode, drafts: list[Draft], verifier: Verifier, rounds: int) -> torch.Tensor:
    """(rows, vocab) logits of the passes of a verifier."""
    length = call.input_ids.shape[1]
    verifier.start(VerifierInputs(call.input_ids, call.take(), max_length=length + 20 * rounds + 16))
    try:
        if verifier.mode != mode:
            raise RuntimeError(verifier.reason)
        prompt = call.input_ids[0].cpu().numpy().astype(np.int32)
        cuts = [] if verifier.whole_prompts else [len(prompt) // 2, max(len(prompt) // 2, len(prompt) - 2)]
        for piece in filter(len, np.split(prompt, cuts)):
            verifier.forward(piece)
            verifier.commit(np.empty(0, np.int32))
        return by_passes(verifier, drafts)
    finally:
        verifier.finish()
