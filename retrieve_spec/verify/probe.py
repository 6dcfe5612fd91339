"""A model in, the strongest mode it can be verified in out: passes over drafts are compared with single steps.

The reference is what plain `generate` does: the prompt in one pass, then single steps from the cache, with padding in
front and without. A text of a few passes is read both ways: drafts whose second branch is right, wrong ones, right
ones, no draft at all. Where a config names a window, a chunk or another length at which layers begin to see less, the
text goes beyond every one of them: on the model itself where they are short, else on a small copy built from its config
(`retrieve_spec.verify.shrink`). Where there is none, nothing is drafted beyond the first such length.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.candidates import PROMPT, candidates, layout_of, sample_tokens, vocabulary
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, cache_mode, new_cache, weaker
from retrieve_spec.verify.shrink import lengths_of, shrunk
from retrieve_spec.verify.steps import PreparedCall, SingleSteps, prepare_call
from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs

logger = logging.getLogger(__name__)

_PADDING = 3
_REACH = 48
"""Lengths up to this one are crossed on the model itself."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference, as a share of the logits' spread, that rounding makes."""
_NOISE = 4.0
"""How many times the difference between two plain ways to read a text a pass may be off, in any format …"""
_MOST_NOISE = {torch.float64: 1e-6, torch.float32: 2e-3}
_MOST_NOISE_HALF = 0.1
"""… but not by more than this share of the spread."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: how a model can be verified, why not better, and the interface that worked."""

    mode: Mode
    reason: str
    interface: ModelInterface


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
    found = _strongest(model, interface, mode, reason, trials)
    if far and found.mode != "plain":
        return _beyond(model, found, lengths)
    return found


def _beyond(model: Any, found: Finding, lengths: dict[str, int]) -> Finding:
    """Hold a finding against a small copy of the model whose windows are short enough to go beyond them."""
    small, why = shrunk(model)
    if small is None:
        first = min(lengths.values())
        logger.debug("nothing is drafted beyond %d tokens: %s", first, why)
        limit = min(first, found.interface.max_positions or first)
        return replace(found, interface=replace(found.interface, max_positions=limit))
    from retrieve_spec.verify.interface import read_interface

    most = max(lengths_of(small.config).values(), default=0)
    trials = [Trial(most // 2 + 1, 0, 3), Trial(most + 3, 0, 2), Trial(most + 3, _PADDING, 2)]
    copied = read_interface(small)
    beyond = _strongest(small, copied, found.mode, found.reason, trials, layout_of(found.interface))
    if beyond.mode == found.mode:
        return found
    mode, reason = beyond.mode, f"past its windows, {beyond.reason}" if beyond.reason else beyond.reason
    if mode == "plain":
        return Finding(mode, reason, found.interface)
    return _strongest(model, found.interface, mode, reason, [Trial(PROMPT, _PADDING)])


def check_verifier(model: Any, interface: ModelInterface, verifier: Verifier) -> str:
    """Say what is wrong with a verifier's passes over trees, by the same comparison; empty when nothing is."""
    return _problem(model, interface, "tree", [Trial(PROMPT, 0)], verifier)


def _strongest(
    model: Any, interface: ModelInterface, mode: Mode, reason: str, trials: list[Trial], layout: str = ""
) -> Finding:
    """The strongest mode up to `mode` that passes all trials."""
    if mode == "tree":
        problem = ""
        for candidate in candidates(model, interface):
            if isinstance(candidate, str):
                problem = candidate
                continue
            if layout and layout_of(candidate) != layout:
                continue
            problem = _problem(model, candidate, "tree", trials)
            if not problem:
                return Finding("tree", "", candidate)
        mode, reason = "plain" if interface.recurrent else "chain", problem or reason
    if mode == "chain":
        problem = _problem(model, interface, "chain", trials)
        if not problem:
            return Finding("chain", reason, interface)
        reason = problem
    return Finding("plain", reason, interface)


def _fresh_cache_mode(model: Any) -> tuple[Mode, str]:
    if not model._supports_default_dynamic_cache():
        return "plain", "the model keeps its own kind of cache"
    return cache_mode(new_cache(model))


def _problem(
    model: Any, interface: ModelInterface, mode: Mode, trials: list[Trial], verifier: Verifier | None = None
) -> str:
    """What is wrong with a mode; empty when nothing is."""
    try:
        with torch.no_grad():
            for trial in trials:
                if problem := _try(model, interface, mode, trial, verifier or HFVerifier(model, interface, mode)):
                    return problem
    except Exception as error:  # whatever a model's own code raises: the mode is not usable, and plain decoding is
        logger.debug("probing %s failed", mode, exc_info=True)
        return f"a {mode} pass fails ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return ""


def _try(model: Any, interface: ModelInterface, mode: Mode, trial: Trial, verifier: Verifier) -> str:
    """Read one text both ways; what differs."""
    drafts = list(_drafts(mode, trial.rounds, model))
    try:
        call, wanted, noise = _read_plainly(model, trial, drafts)
    except Exception:
        if not trial.padding:
            raise
        trial = replace(trial, padding=0)  # a model that takes no padding is not asked to by its users either
        call, wanted, noise = _read_plainly(model, trial, drafts)
    got = _verified(call, mode, drafts, verifier, trial.rounds)
    spread = float(wanted.std(dim=-1).mean())
    deviation = float((got - wanted).abs().max())
    most = _MOST_NOISE.get(model.dtype, _MOST_NOISE_HALF) * spread
    noise = max(noise, torch.finfo(model.dtype).eps / 2 * float(wanted.abs().max()))  # two readings may agree by luck
    allowed = max(_TOLERANCE.get(model.dtype, 0.0) * spread, min(_NOISE * noise, most))
    if not deviation <= allowed:
        return f"a {mode} pass gives other logits than single steps (off by {deviation:.2g})"
    return ""


def _read_plainly(model: Any, trial: Trial, drafts: list[_Draft]) -> tuple[PreparedCall, torch.Tensor, float]:
    """A trial's text by single steps: how it begins, logits, and what plain decoding makes of noise."""
    ids = sample_tokens(model, trial.prompt + trial.padding)
    shown = torch.ones_like(ids)
    shown[:, : trial.padding] = 0
    call = prepare_call(model, ids, shown)
    return call, *_expected(model, call, drafts, trial.padding)


@dataclass(frozen=True, slots=True)
class _Draft:
    """One pass: the root's token, a draft behind it, and the nodes that are accepted."""

    root: int
    paths: list[list[int]]
    accepted: list[int]


def _drafts(mode: Mode, rounds: int, model: Any) -> Iterator[_Draft]:
    """Passes one after another: the second branch partly right, none, all wrong, the first branch right."""
    vocab = vocabulary(model)

    def token(n: int) -> int:
        return 3 + (n * 7919 + 131) % (min(vocab, 30_000) - 3)

    for i in range(rounds):
        a, b, c, d, e, f = (token(100 * i + j) for j in range(6))
        second, first = ([[a, b], [c, d, a]], [2, 3]) if mode == "tree" else ([[c, d, a, b]], [0, 1])
        yield _Draft(f, second, first)
        yield _Draft(e, [], [])
        if rounds == 1:
            return
        yield _Draft(a, [[b, c], [d], [e, f]] if mode == "tree" else [[b, c, d]], [])
        yield _Draft(d, [[e, f, c], [a]] if mode == "tree" else [[e, f, c]], [0, 1, 2])
    yield _Draft(token(7), [], [])


def _expected(model: Any, call: PreparedCall, drafts: list[_Draft], padding: int) -> tuple[torch.Tensor, float]:
    """(rows, vocab) logits of single steps in the order of the passes' rows, and what plain decoding makes of noise."""
    steps = SingleSteps(model, call)
    steps.feed()
    rows, text = [], []
    kept: list[torch.Tensor] = []
    for draft in drafts:
        kept.append(steps.feed(draft.root))
        rows.append(kept[-1])
        text.append(draft.root)
        tree = DraftTree.from_paths(draft.paths)
        at = {-1: steps}
        seen: dict[int, torch.Tensor] = {}
        for node in range(len(tree)):
            at[node] = at[int(tree.parent[node])].fork()
            seen[node] = at[node].feed(int(tree.token_ids[node]))
            rows.append(seen[node])
        for node in draft.accepted:
            steps = at[node]
            kept.append(seen[node])
            text.append(int(tree.token_ids[node]))
    return torch.stack(rows), _noise(model, call, text, torch.stack(kept), padding)


def _noise(model: Any, call: PreparedCall, text: list[int], stepped: torch.Tensor, padding: int) -> float:
    """Largest difference between single steps and the same text read by `generate` as one prompt."""
    more = torch.tensor([text], dtype=call.input_ids.dtype, device=call.input_ids.device)
    ids = torch.cat([call.input_ids, more], dim=-1)
    shown = torch.ones_like(ids)
    shown[:, :padding] = 0
    whole = prepare_call(model, ids, shown)
    inputs = model.prepare_inputs_for_generation(
        ids, next_sequence_length=ids.shape[1], is_first_iteration=True, **whole.take() | {"use_cache": True}
    )
    inputs.pop("logits_to_keep", None)
    logits = model(**inputs, return_dict=True).logits[0, -len(text) :].float()
    return float((logits - stepped).abs().max())


def _verified(call: PreparedCall, mode: Mode, drafts: list[_Draft], verifier: Verifier, rounds: int) -> torch.Tensor:
    """(rows, vocab) logits of the passes of a verifier."""
    nothing = np.empty(0, np.int32)
    length = call.input_ids.shape[1]
    verifier.start(VerifierInputs(call.input_ids, call.take(), max_length=length + 20 * rounds + 16))
    try:
        if verifier.mode != mode:
            raise RuntimeError(verifier.reason)
        verifier.forward(call.input_ids[0].cpu().numpy().astype(np.int32))
        verifier.commit(nothing)
        rows = []
        for draft in drafts:
            tree = DraftTree.from_paths(draft.paths)
            if verifier.mode == "chain" and not tree.is_chain:
                raise RuntimeError(verifier.reason or "drafts must be chains here")
            logits = verifier.forward(np.array([draft.root], np.int32), tree if len(tree) else None).logits
            rows.append(logits.float().clone())  # the next pass may write over them
            verifier.commit(np.array(draft.accepted, np.int32))
    finally:
        verifier.finish()
    return torch.cat(rows)
