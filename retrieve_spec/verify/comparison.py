"""Comparison: one text by passes over drafts and by single steps from a cache; the logits of both must agree."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.cpu import FLOATS
from retrieve_spec.quantized import Int8Embedding, PackedLinear
from retrieve_spec.verify.interface import attention_implementation
from retrieve_spec.verify.steps import Captured, SingleSteps, ordinary_tokens, prepare_call, sample_tokens
from retrieve_spec.verify.verifier import Mode, Verifier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draft:
    """One pass: the root's token, a draft after it, and the nodes that are accepted."""

    root: int
    paths: list[list[int]]
    accepted: list[int]


def drafts_for(mode: Mode, rounds: int, model: Any) -> list[Draft]:
    """Passes one after another: the second branch partly right, none, all wrong, the first branch right."""
    tokens, special = ordinary_tokens(model), special_tokens(model.config)
    trees, drafts = mode == "tree", []
    for i in range(rounds):
        a, b, c, d, e, f = _six_tokens(tokens, special, 100 * i)
        second, first = ([[a, b], [c, d, a]], [2, 3]) if trees else ([[c, d, a, b]], [0, 1])
        drafts += [Draft(f, second, first), Draft(e, [], [])]
        if rounds == 1:
            return drafts
        drafts.append(Draft(a, [[b, c], [d], [e, f]] if trees else [[b, c, d]], []))
        drafts.append(Draft(d, [[e, f, c], [a]] if trees else [[e, f, c]], [0, 1, 2]))
    return [*drafts, Draft(_six_tokens(tokens, special, 7)[0], [], [])]


def special_tokens(config: Any) -> set[int]:
    """Return the tokens that a config names as special."""
    parts = (config, config.get_text_config(decoder=True))
    named = [
        value for part in parts for name, value in vars(part).items() if name.endswith(("_token_id", "_token_index"))
    ]
    return {value for value in named if isinstance(value, int)}


def _six_tokens(tokens: range, special: set[int], first: int) -> list[int]:
    """Return six different tokens that are not special. Where there are fewer, some repeat, but not below one node."""
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
    """The logits of single steps.

    Attributes
    ----------
    rows
        (rows, vocab) logits in the order of the passes' rows.
    text
        The roots and the accepted tokens.
    kept
        (text, vocab) logits after each of them.
    """

    rows: torch.Tensor
    text: list[int]
    kept: torch.Tensor


def by_single_steps(steps: SingleSteps, drafts: list[Draft]) -> Reference:
    """Read drafts token by token after a text; a cache is held only while a node still continues it."""
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
    """Yield the tokens before each row of the passes over drafts: those committed earlier, and the path to it."""
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
    """(rows, vocab) logits of a verifier's passes over drafts, after what it has read."""
    rows = []
    for draft in drafts:
        tree = DraftTree.from_paths(draft.paths)
        if verifier.mode == "chain" and not tree.is_chain:
            raise RuntimeError(verifier.reason or "drafts must be chains here")
        logits = verifier.forward(np.array([draft.root], np.int32), tree if len(tree) else None).logits
        rows.append(logits.float().clone())  # the next pass may overwrite them
        verifier.commit(np.array(draft.accepted, np.int32))
    return torch.cat(rows)


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text as plain decoding reads it.

    Attributes
    ----------
    call
        How `generate` begins with its prompt.
    drafts
        What passes verify after the prompt.
    reference
        The logits of single steps.
    rounding
        How far other plain ways of reading the text are from these logits.
    """

    call: Captured
    drafts: list[Draft]
    reference: Reference
    rounding: Rounding

    @classmethod
    def read(
        cls, model: Any, prompt: int, padding: int, drafts: list[Draft], pads: bool = True, pieces: bool = True
    ) -> PlainText:
        """Read a prompt of so many tokens, with padding in front of it, and the drafts after it.

        Where a model is not exact, the text is also read with padding and in pieces, if the model takes these.
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
            except Exception:  # a model's own code may raise anything: users cannot process texts this way either
                logger.debug("no reading %s", way.__name__, exc_info=True)
        return cls(call, drafts, reference, Rounding.of(model, reference.kept, readings))


def _at_once(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """(tokens, vocab) logits after the tokens of a text, read with its prompt as one prompt."""
    more = torch.tensor([text], dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
    whole, seen = torch.cat([ids, more], dim=-1), torch.cat([shown, torch.ones_like(more)], dim=-1)
    return SingleSteps.of(model, prepare_call(model, whole, seen)).feed_at_once([])[-len(text) :]


def _in_company(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Return the logits of `_at_once`, read as the first of four prompts."""
    others = [sample_tokens(model, ids.shape[1], which) for which in (1, 2, 3)]
    return _at_once(model, torch.cat([ids, *others]), shown.expand(4, -1), text)


def _eagerly(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Return the logits of `_at_once` with transformers' plainest attention."""
    with attention_implementation(model, "eager"):
        return _at_once(model, ids, shown, text)


def _in_pieces(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Return the logits of `_at_once`, the text read after the prompt."""
    steps = SingleSteps.of(model, prepare_call(model, ids, shown))
    steps.feed()
    return steps.feed_at_once(text)


def _padded(model: Any, ids: torch.Tensor, shown: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Return the logits of `_at_once` with padding in front."""
    front = ids[:, :5]
    return _at_once(model, torch.cat([front, ids], dim=-1), torch.cat([0 * front, shown], dim=-1), text)


_LARGEST = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference, as a share of the logits' spread, that rounding makes in the exact formats …"""
_MOST = {torch.float64: 1e-6, torch.float32: 2e-3}
_READINGS = 4.0
"""… or this many times the difference between two plain readings, but not more than `_MOST`."""
_ROWS = (4, 5, 7, 8, 9, 16, 17, 33, 64, 65, 129, 257)
_MOST_ROWS = 8
"""Numbers of rows whose products are compared with each other, and how many a pass is filled up to at most."""
_NUMBERS, _MOST_TRIED = 1 << 20, 1 << 13
"""Numbers of a product that are compared, and rows at most: two orders seldom round one of them differently."""
_VECTOR = 64
_ROOT_MEAN_SQUARE = 2.0
"""In the other formats a pass may be off by this many times the largest root mean square of plain readings."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far logits are off, and how far they may be, as shares of their spread."""

    measured: float
    allowed: float

    @property
    def is_rounding(self) -> bool:
        """Whether the logits are the same up to rounding; never with NaN."""
        return self.measured <= self.allowed

    @property
    def excess(self) -> float:
        """By which factor they are farther off than allowed."""
        return self.measured / self.allowed if self.measured == self.measured else math.inf

    def __str__(self) -> str:
        return f"off by {self.measured:.2g} of their spread, {self.allowed:.2g} allowed"


@dataclass(frozen=True, slots=True)
class Rounding:
    """How much rounding changes the logits of plain decoding.

    Attributes
    ----------
    dtype
        Of the model.
    exact
        Whether all of its arithmetic is in float32 or float64.
    largest, rms
        How far plain readings of a text are from single steps, as shares of the logits' spread: the largest difference,
        and the largest root mean square.
    """

    dtype: torch.dtype
    exact: bool
    largest: float = 0.0
    rms: float = 0.0

    @classmethod
    def of(cls, model: Any, wanted: torch.Tensor, readings: Sequence[torch.Tensor]) -> Rounding:
        """Return that of a model; several readings of a text, (rows, vocab) each, should have given `wanted`."""
        spread = spread_of(wanted)
        differences = [reading - wanted for reading in readings]
        largest = max((float(d.abs().max()) for d in differences), default=0.0) / spread
        rms = max((float(d.square().mean().sqrt()) for d in differences), default=0.0) / spread
        return cls(model.dtype, is_exact(model), largest, rms)

    def compare(self, got: torch.Tensor, wanted: torch.Tensor) -> Deviation:
        """Compare the logits of passes with those of single steps, (rows, vocab) each."""
        spread, difference = spread_of(wanted), got - wanted
        last_place = torch.finfo(self.dtype).eps / 2 * float(wanted.abs().max()) / spread  # results may agree by chance
        if self.exact:
            noise = min(_READINGS * max(self.largest, last_place), _MOST[self.dtype])
            return Deviation(float(difference.abs().max()) / spread, max(_LARGEST[self.dtype], noise))
        allowed = max(_LARGEST.get(self.dtype, 0.0), _ROOT_MEAN_SQUARE * max(self.rms, last_place))
        return Deviation(float(difference.square().mean().sqrt()) / spread, allowed)


def spread_of(logits: torch.Tensor) -> float:
    """Return the spread of logits."""
    return float(logits.std(dim=-1).mean())


def is_exact(model: Any) -> bool:
    """Whether a model computes in float32 or float64 throughout."""
    floats = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    return model.dtype in _LARGEST and all(p.dtype in _LARGEST for p in floats) and not any(_quantised(model))


def _quantised(model: Any) -> Iterator[nn.Module]:
    """Yield the linear layers whose weights are not plain floating-point tensors."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.is_floating_point()
        wraps = hasattr(module, "base_layer")  # an adapter, whose wrapped layer is also a module
        if hasattr(module, "in_features") and not plain and not wraps:
            yield module


def rows_change_one_another(model: Any) -> str:
    """Name the layers whose output for a row depends on the other rows of a pass; empty where none does.

    This is so where inputs are quantised with one scale for all rows of a pass: every draft would change the text.
    """
    tried: set[tuple[type, type]] = set()
    for module in _quantised(model):
        kind = (type(module), type(getattr(module, "weight", None)))
        if kind in tried:
            continue
        tried.add(kind)
        # not by its state dict: bitsandbytes unpacks 4-bit weights for it, and packs them less exactly afterwards
        tensors = chain(module.parameters(), module.buffers())
        device = next((tensor.device for tensor in tensors), model.device)
        generator = torch.Generator().manual_seed(0)
        rows = 0.1 * torch.randn((2, int(module.in_features)), generator=generator)  # type: ignore[arg-type]
        others = rows * torch.tensor([[1.0], [3.0]])
        first, again = (module(given.to(device, model.dtype))[0] for given in (rows, others))
        if not torch.equal(first, again):
            return f"{type(module).__name__} layers scale their inputs over all rows of a pass"
    return ""


def why_not_one_order(model: Any) -> str:
    """Say why the order of a row's sums depends on the other rows of a pass; empty where it need not.

    The vectors of elementwise operations end where a row ends if its width is a multiple of theirs. Products with
    packed integers always have one order; of experts and layers of other kinds nothing is known.
    """
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"it is for 16 bits, the model is in {model.dtype}"
    layers = [module for module in model.modules() if type(module) in (nn.Linear, PackedLinear)]
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, Int8Embedding))]
    linear = {id(module.weight) for module in (*layers, *tables)}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in linear:
            return f"{name} is not the weight of a linear layer"
        if parameter.is_floating_point() and parameter.dtype != model.dtype:
            return f"{name} is in {parameter.dtype}"
    odd = [layer.in_features for layer in layers if layer.in_features % _VECTOR]
    return f"a layer is {odd[0]} wide, which is no multiple of {_VECTOR}" if odd else ""


@torch.inference_mode()
def rows_for_one_order(model: Any) -> int:
    """Return the fewest rows from which linear layers sum up each row in one order, whatever the other rows are; 0
    where there is no such number.

    Libraries choose the order by the shape of a product. oneDNN's order in 16 bits is the same for all but small
    numbers of rows.
    """
    fewest, most, tried = _ROWS[0], _ROWS[-1], set[torch.Size]()
    for module in model.modules():
        unpacks = isinstance(module, PackedLinear) and module.weight.dtype == FLOATS
        if not (unpacks or type(module) is nn.Linear) or module.weight.shape in tried:
            continue
        tried.add(module.weight.shape)
        many = most * max(min(_NUMBERS // module.out_features, _MOST_TRIED) // most, 1)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn((1, many, module.in_features), generator=generator).to(model.device, model.dtype)
        whole = _in_parts(module, rows, most)
        for count in reversed(_ROWS[:-1]):
            parts = _in_parts(module, rows[:, : many if count <= _MOST_ROWS else most], count)
            if count >= fewest and not torch.equal(parts, whole[: len(parts)]):
                fewest = _ROWS[_ROWS.index(count) + 1]
                break
        if fewest > _MOST_ROWS:
            return 0
    return fewest


def _in_parts(layer: nn.Module, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return (rows, out), a layer's output for (1, rows, in), computed for a fixed number of rows at a time."""
    whole = rows.shape[1] // count * count
    return torch.cat([layer(rows[:, i : i + count])[0] for i in range(0, whole, count)])
