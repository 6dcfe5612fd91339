"""Comparison: one text by passes over drafts and by single steps from a cache; the logits of both must agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.steps import Captured, SingleSteps, ordinary_tokens, prepare_call
from retrieve_spec.verify.verifier import Mode, Verifier

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference, as a share of the logits' spread, that rounding makes."""
_NOISE = 4.0
"""How many times the difference between two plain ways to read a text a pass may be off, in any format …"""
_MOST_NOISE = {torch.float64: 1e-6, torch.float32: 2e-3}
_MOST_NOISE_HALF = 0.1
"""… but not by more than this share of the spread."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One pass: the root's token, a draft behind it, and the nodes that are accepted."""

    root: int
    paths: list[list[int]]
    accepted: list[int]


def drafts_for(mode: Mode, rounds: int, model: Any) -> list[Draft]:
    """Passes one after another: the second branch partly right, none, all wrong, the first branch right."""
    return list(_drafts(mode, rounds, ordinary_tokens(model), special_tokens(model.config)))


def special_tokens(config: Any) -> set[int]:
    """Tokens that stand for something else than text, as far as a config names them."""
    parts = (config, config.get_text_config(decoder=True))
    named = [
        value for part in parts for name, value in vars(part).items() if name.endswith(("_token_id", "_token_index"))
    ]
    return {value for value in named if isinstance(value, int)}


def _drafts(mode: Mode, rounds: int, tokens: range, special: set[int]) -> Iterator[Draft]:
    for i in range(rounds):
        a, b, c, d, e, f = _six(tokens, special, 100 * i)
        second, first = ([[a, b], [c, d, a]], [2, 3]) if mode == "tree" else ([[c, d, a, b]], [0, 1])
        yield Draft(f, second, first)
        yield Draft(e, [], [])
        if rounds == 1:
            return
        yield Draft(a, [[b, c], [d], [e, f]] if mode == "tree" else [[b, c, d]], [])
        yield Draft(d, [[e, f, c], [a]] if mode == "tree" else [[e, f, c]], [0, 1, 2])
    yield Draft(_six(tokens, special, 7)[0], [], [])


def _six(tokens: range, special: set[int], first: int) -> list[int]:
    """Six different tokens that are not special; of fewer than six, some again, but not twice below one node."""
    found: list[int] = []
    for avoided in (special, set[int]()):
        for n in range(first, first + len(tokens)):
            drawn = tokens[(n * 7919 + 131) % len(tokens)]
            if drawn not in avoided and drawn not in found:
                found.append(drawn)
            if len(found) == 6:
                return found
    return [found[min(n, len(found) - 1)] for n in ((0, 0, 1, 2, 1, 2) if len(found) > 2 else (0, 0, 1, 1, 1, 0))]


@dataclass(frozen=True, slots=True)
class Reference:
    """What single steps say.

    Attributes
    ----------
    rows
        (rows, vocab) logits in the order of the passes' rows.
    text
        The roots and the accepted tokens.
    kept
        (text, vocab) logits behind each of them.
    """

    rows: torch.Tensor
    text: list[int]
    kept: torch.Tensor


def by_single_steps(steps: SingleSteps, drafts: list[Draft]) -> Reference:
    """Read drafts token by token behind a text; a cache is held for as long as it is gone on from."""
    rows, text = [], []
    kept: list[torch.Tensor] = []
    for draft in drafts:
        kept.append(steps.feed(draft.root))
        rows.append(kept[-1])
        text.append(draft.root)
        tree = DraftTree.from_paths(draft.paths)
        at = {-1: steps}
        seen: dict[int, torch.Tensor] = {}
        last = draft.accepted[-1] if draft.accepted else -1
        for node in range(len(tree)):
            at[node] = at[int(tree.parent[node])].fork()
            seen[node] = at[node].feed(int(tree.token_ids[node]))
            rows.append(seen[node])
            ahead = {last, *map(int, tree.parent[node + 1 :])}
            at = {other: read for other, read in at.items() if other in ahead}
        for node in draft.accepted:
            kept.append(seen[node])
            text.append(int(tree.token_ids[node]))
        steps = at[last]
    return Reference(torch.stack(rows), text, torch.stack(kept))


def by_passes(verifier: Verifier, drafts: list[Draft]) -> torch.Tensor:
    """(rows, vocab) logits of a verifier's passes over drafts, behind what it has read."""
    rows = []
    for draft in drafts:
        tree = DraftTree.from_paths(draft.paths)
        if verifier.mode == "chain" and not tree.is_chain:
            raise RuntimeError(verifier.reason or "drafts must be chains here")
        logits = verifier.forward(np.array([draft.root], np.int32), tree if len(tree) else None).logits
        rows.append(logits.float().clone())  # the next pass may write over them
        verifier.commit(np.array(draft.accepted, np.int32))
    return torch.cat(rows)


def noise_of(model: Any, call: Captured, reference: Reference, padding: int = 0) -> float:
    """Largest difference between single steps and the same text read by `generate` as one prompt."""
    text = reference.text
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
    return float((logits - reference.kept).abs().max())


def spread_of(wanted: torch.Tensor) -> float:
    """How far logits lie from one another."""
    return float(wanted.std(dim=-1).mean())


def disagreement(got: torch.Tensor, wanted: torch.Tensor, noise: float, dtype: torch.dtype, mode: Mode) -> str:
    """Say how far logits are off; empty where it is rounding, given what plain decoding makes of `noise`."""
    spread, deviation = spread_of(wanted), float((got - wanted).abs().max())
    most = _MOST_NOISE.get(dtype, _MOST_NOISE_HALF) * spread
    noise = max(noise, torch.finfo(dtype).eps / 2 * float(wanted.abs().max()))  # two readings may agree by luck
    allowed = max(TOLERANCE.get(dtype, 0.0) * spread, min(_NOISE * noise, most))
    if not deviation <= allowed:
        return f"a {mode} pass gives other logits than single steps (off by {deviation:.2g})"
    return ""
