"""Comparison: one text by passes over drafts and by single steps from a cache; the logits of both must agree."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.interface import attention_implementation
from retrieve_spec.verify.number_format import Rounding, is_exact
from retrieve_spec.verify.steps import Captured, SingleSteps, ordinary_tokens, prepare_call, sample_tokens
from retrieve_spec.verify.verifier import Mode, Verifier

logger = logging.getLogger(__name__)


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


def row_texts(drafts: list[Draft]) -> Iterator[list[int]]:
    """By row of the passes over drafts, the tokens that lead to it: those committed before, and the path to it."""
    text: list[int] = []
    for draft in drafts:
        text.append(draft.root)
        yield list(text)
        tree = DraftTree.from_paths(draft.paths)
        paths: dict[int, list[int]] = {-1: []}
        for node in range(len(tree)):
            paths[node] = [*paths[int(tree.parent[node])], int(tree.token_ids[node])]
            yield text + paths[node]
        text += [int(tree.token_ids[node]) for node in draft.accepted]


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


@dataclass(frozen=True, slots=True)
class PlainText:
    """One text as plain decoding reads it.

    Attributes
    ----------
    call
        How `generate` begins with its prompt.
    drafts
        What passes verify behind the prompt.
    reference
        What single steps say.
    rounding
        How far other plain ways of reading it are from that.
    """

    call: Captured
    drafts: list[Draft]
    reference: Reference
    rounding: Rounding

    @classmethod
    def read(
        cls, model: Any, prompt: int, padding: int, drafts: list[Draft], pads: bool = True, pieces: bool = True
    ) -> PlainText:
        """Read a prompt of so many tokens, with padding in front of it, and the drafts behind.

        Where a model is not exact, texts are also read with padding and in pieces, if it takes them (`pads`, `pieces`).
        """
        ids = sample_tokens(model, prompt + padding)
        shown = torch.ones_like(ids)
        shown[:, :padding] = 0
        call = prepare_call(model, ids, shown)
        steps = SingleSteps.of(model, call)
        steps.feed()
        reference = by_single_steps(steps, drafts)
        ways = [_at_once]
        if not is_exact(model):
            ways += [_in_company, _eagerly] + [_in_pieces] * pieces + [_padded] * pads
        readings = []
        for way in ways:
            try:
                readings.append(way(model, ids, shown, reference.text))
            except Exception:  # whatever a model's own code raises: users do not read texts so either
                logger.debug("no reading %s", way.__name__, exc_info=True)
        return cls(call, drafts, reference, Rounding.of(model, reference.kept, readings))


def _at_once(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """(tokens, vocab) logits behind the tokens of a text, read with its prompt as one prompt."""
    more = torch.tensor([text], dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
    whole, seen = torch.cat([ids, more], dim=-1), torch.cat([shown, torch.ones_like(more)], dim=-1)
    return SingleSteps.of(model, prepare_call(model, whole, seen)).feed_at_once([])[-len(text) :]


def _in_company(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """The same as the first of four prompts."""
    others = [sample_tokens(model, ids.shape[1], which) for which in (1, 2, 3)]
    return _at_once(model, torch.cat([ids, *others]), shown.expand(4, -1), text)


def _eagerly(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """The same with transformers' plainest attention."""
    with attention_implementation(model, "eager"):
        return _at_once(model, ids, shown, text)


def _in_pieces(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """The same, prompt and text one behind the other."""
    steps = SingleSteps.of(model, prepare_call(model, ids, shown))
    steps.feed()
    return steps.feed_at_once(text)


def _padded(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """The same with padding in front."""
    front = ids[:, :5]
    return _at_once(model, torch.cat([front, ids], dim=-1), torch.cat([0 * front, shown], dim=-1), text)
