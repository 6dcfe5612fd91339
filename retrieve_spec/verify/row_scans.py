"""Row scans: recurrences over the rows of draft trees, in which each row continues from its parent's state.

No row's state is computed. What a row adds to one below it is a product of the two, weighed by the decay in between, so
that all rows of a pass are a few products of matrices, as within one chunk of a chunked scan; what the state in front
of the pass adds is one more. The state after a row is computed when that row is accepted, from the rows above it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention import visible_rows
from retrieve_spec.drafting.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Level:
    """The rows of a text at one depth.

    Attributes
    ----------
    rows
        (n,) long.
    above
        (n,) long, which rows of the depth above they follow, by their places there.
    places
        By row, its place here.
    """

    rows: torch.Tensor
    above: torch.Tensor
    places: dict[int, int]


@dataclass
class RowTree:
    """The rows of a pass over one text or several, and the parent of each.

    Attributes
    ----------
    texts, width
        The pass takes (texts, width) rows; texts of fewer rows are padded on the right.
    parent
        (texts, width) row of the same text in front of it, -1 for the state in front of the pass.
    above
        (texts, width, width) float32, 1 where a row (second axis) is reached through one (third axis), or is it.
    shut
        (texts, 1, width, width) 0 there, elsewhere -inf.
    """

    texts: int
    width: int
    parent: NDArray[np.int64]
    above: torch.Tensor
    shut: torch.Tensor
    _windows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device) -> RowTree:
        """Rows of a pass over so many root tokens of each text, and the trees after them."""
        sizes = [count + len(tree) for count, tree in zip(roots, trees, strict=True)]
        texts, width = len(sizes), max(sizes)
        parent, seen = np.full((texts, width), -1), np.zeros((texts, width, width), np.bool_)
        seen[:, np.arange(width), np.arange(width)] = True
        for text, (count, tree, size) in enumerate(zip(roots, trees, sizes, strict=True)):
            parent[text, 1:count] = np.arange(count - 1)
            parent[text, count:size] = np.where(tree.parent < 0, count - 1, tree.parent + count)
            seen[text, :size, :size] = visible_rows(count, tree)
        return cls._seeing(parent, seen, device)

    @classmethod
    def chain(cls, texts: int, width: int, device: torch.device) -> RowTree:
        """Return rows that follow one another."""
        seen = np.broadcast_to(np.tri(width, dtype=np.bool_), (texts, width, width))
        return cls._seeing(np.tile(np.arange(width) - 1, (texts, 1)), seen, device)

    @classmethod
    def _seeing(cls, parent: NDArray[np.int64], seen: NDArray[np.bool_], device: torch.device) -> RowTree:
        shut = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
        above, closed = (torch.from_numpy(part).to(device) for part in (seen.astype(np.float32), shut))
        texts, width = parent.shape
        return cls(texts, width, parent, above, closed)

    def windows(self, held: int, length: int) -> torch.Tensor:
        """(texts · width · length,) rows that a convolution sees, oldest first, among all texts' states and rows.

        A text's `held` columns of state come first, then its rows.
        """
        if (held, length) not in self._windows:
            back = np.empty((self.texts, self.width, length), np.int64)
            base = (np.arange(self.texts) * (held + self.width))[:, None]
            at = np.tile(np.arange(self.width) + held, (self.texts, 1))
            for place in range(length - 1, -1, -1):
                back[:, :, place] = at + base
                above = np.take_along_axis(self.parent, np.maximum(at - held, 0), 1) + held
                at = np.maximum(np.where(at >= held, above, at - 1), 0)
            self._windows[held, length] = torch.from_numpy(back.reshape(-1)).to(self.above.device)
        return self._windows[held, length]

    @functools.cached_property
    def levels(self) -> list[Level]:
        """The rows of a lone text by depth."""
        parent = self.parent[0].tolist()
        depths: list[int] = []
        places: list[dict[int, int]] = []
        for row, above in enumerate(parent):
            depths.append(depths[above] + 1 if above >= 0 else 0)
            if depths[row] == len(places):
                places.append({})
            places[depths[row]][row] = len(places[depths[row]])
        levels = []
        for depth, here in enumerate(places):
            followed = [places[depth - 1][parent[row]] if depth else 0 for row in here]
            rows, above = (torch.tensor(numbers, device=self.above.device) for numbers in (list(here), followed))
            levels.append(Level(rows, above, here))
        return levels

    def decays(self, logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of (texts, width, heads) logarithms of decays at every row, those since the state, and between rows.

        Returns
        -------
        since
            (texts, heads, width) logarithms.
        between
            (texts, heads, width, width) factors; 0 where a row (third axis) is not reached through one (last axis).
        """
        since = torch.matmul(self.above, logs).transpose(1, 2)
        return since, (since.unsqueeze(-1) - since.unsqueeze(-2)).add_(self.shut).exp_()


_CHUNK = 32
"""Rows of a text without branches that are scanned at once."""
_ALL = slice(None)
P = ParamSpec("P")
T = TypeVar("T")


def in_full(scan: Callable[Concatenate[RowTree, P], T]) -> Callable[Concatenate[RowTree, P], T]:
    """A scan whose products have the type of what it is given, under autocast too: a system has no solver in 16 bits,
    and sums of logarithms need more."""

    @functools.wraps(scan)
    def scanned(tree: RowTree, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_autocast_enabled(device := tree.above.device.type):
            return scan(tree, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return scan(tree, *args, **kwargs)

    return scanned


@dataclass(frozen=True, slots=True)
class ConvRows:
    """Rows of a causal convolution after its state, as one matrix per text.

    Attributes
    ----------
    rows
        (texts, held + width, channels), the state's columns first.
    held
        Columns of the state.
    """

    rows: torch.Tensor
    held: int

    def state_after(self, tree: RowTree, text: int, row: int) -> torch.Tensor:
        """(1, channels, held) the state after a row."""
        at = tree.windows(self.held, self.held).view(tree.texts, tree.width, -1)[text, row]
        return self.rows.flatten(0, 1).index_select(0, at).t()[None]


def convolve(
    tree: RowTree, x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ConvRows]:
    """Causal depthwise convolution of rows (texts, channels, width) after states (texts, channels, held).

    Returns
    -------
    out
        (texts, channels, width).
    rows
        What states after rows are made from.
    """
    channels, length = weight.shape
    joined = torch.cat([state.transpose(1, 2), x.transpose(1, 2).to(state.dtype)], 1)
    seen = joined.flatten(0, 1).index_select(0, tree.windows(state.shape[-1], length))
    out = convolved(seen.view(tree.texts, tree.width, length, channels), weight.t(), bias, 2)
    return out.transpose(1, 2), ConvRows(joined, state.shape[-1])


def convolved(seen: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: int) -> torch.Tensor:
    """Apply a convolution and round once, as torch's does."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = (seen.to(wide) * weight.to(wide)).sum(axis)
    return (out if bias is None else out + bias).to(weight.dtype)


@dataclass(frozen=True, slots=True)
class SsdRows:
    """Rows of a state space with one decay per head (Mamba-2).

    Attributes
    ----------
    added
        (texts, width, heads, p) what each row adds, times its time step.
    keys
        (texts, width, groups, n) where it adds it (B).
    since
        (texts, heads, width) logarithms of decays since the state.
    """

    added: torch.Tensor
    keys: torch.Tensor
    since: torch.Tensor

    def state_after(self, state: torch.Tensor, text: Any = _ALL, rows: Any = _ALL) -> torch.Tensor:
        """The states (…, heads, p, n) of some texts after the last of some rows that follow one another."""
        added, keys, since = self.added[text][:, rows], self.keys[text][:, rows], self.since[text][..., rows]
        texts, count = added.shape[:2]
        groups, size = keys.shape[2:]
        weights = (since[..., -1:] - since).exp_()
        after = state * since[..., -1].exp()[..., None, None]
        added = (added * weights.transpose(1, 2).unsqueeze(-1)).view(texts, count, groups, -1)
        onto = after.view(texts * groups, -1, size)
        onto.baddbmm_(added.permute(0, 2, 3, 1).flatten(0, 1), keys.transpose(1, 2).reshape(-1, count, size))
        return after


@in_full
def scan_ssd(
    tree: RowTree,
    x: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    state: torch.Tensor,
    decay: torch.Tensor,
) -> tuple[torch.Tensor, SsdRows]:
    """Mamba-2's recurrence over rows.

    Parameters
    ----------
    tree
        The rows.
    x
        (texts, width, heads, p).
    steps
        (texts, width, heads) time steps.
    keys, queries
        (texts, width, groups, n), B and C.
    state
        (texts, heads, p, n) in front of the pass.
    decay
        (heads,) the logarithm of a decay per unit of time (A).

    Returns
    -------
    out
        (texts, width, heads, p).
    rows
        What states after rows are made from.
    """
    texts, width, _, p = x.shape
    groups, n = keys.shape[2:]
    since, between = tree.decays(steps * decay)
    added = x * steps.unsqueeze(-1)
    asked = queries.transpose(1, 2)
    between.view(texts, groups, -1, width, width).mul_(torch.matmul(asked, keys.permute(0, 2, 3, 1)).unsqueeze(2))
    out = torch.matmul(between, added.transpose(1, 2))
    before = torch.matmul(asked, state.reshape(texts, groups, -1, n).transpose(-1, -2))
    before = before.view(texts, groups, width, -1, p).transpose(2, 3)
    out.view(texts, groups, -1, width, p).addcmul_(before, since.exp().view(texts, groups, -1, width, 1))
    return out.transpose(1, 2), SsdRows(added, keys, since)


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of a gated delta rule.

    Attributes
    ----------
    keys, values
        (texts, heads, width, dk) where each row writes, and (texts, heads, width, dv) what.
    since
        (texts, heads, width) logarithms of decays since the state.
    """

    keys: torch.Tensor
    values: torch.Tensor
    since: torch.Tensor

    def state_after(self, state: torch.Tensor, text: Any = _ALL, rows: Any = _ALL) -> torch.Tensor:
        """The states (…, heads, dk, dv) of some texts after the last of some rows that follow one another."""
        keys, values = self.keys[text][:, :, rows], self.values[text][:, :, rows]
        since = self.since[text][..., rows]
        weighed = keys * (since[..., -1:] - since).exp_().unsqueeze(-1)
        after = state * since[..., -1].exp()[..., None, None]
        after.view(-1, *state.shape[2:]).baddbmm_(weighed.flatten(0, 1).transpose(1, 2), values.flatten(0, 1))
        return after


@in_full
def scan_delta(
    tree: RowTree,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, DeltaRows]:
    """The gated delta rule over rows.

    Parameters
    ----------
    tree
        The rows.
    query, key
        (texts, width, heads, dk).
    value
        (texts, width, heads, dv).
    decay, beta
        (texts, width, heads) the logarithm of each row's decay, and how much of the old value it replaces.
    state
        (texts, heads, dk, dv) in front of the pass.

    Returns
    -------
    out
        (texts, width, heads, dv).
    rows
        What states after rows are made from.
    """
    width = query.shape[1]
    since, between = tree.decays(decay)
    key = key.transpose(1, 2)
    both = torch.cat([query.transpose(1, 2), key], 2)
    before = torch.matmul(both, state).mul_(torch.cat([since, since], 2).exp_().unsqueeze(-1))
    alike = torch.matmul(both, key.transpose(-1, -2))
    share = beta.transpose(1, 2).unsqueeze(-1)
    written = (value.transpose(1, 2) - before[:, :, width:]).mul_(share)
    if width > 1:
        system = (alike[:, :, width:] * between).mul_(share)
        written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    out = torch.matmul(between.mul_(alike[:, :, :width]), written).add_(before[:, :, :width])
    return out.transpose(1, 2), DeltaRows(key, written, since)


def scan_long(
    scan: Callable[..., tuple[torch.Tensor, SsdRows | DeltaRows]], parts: Sequence[torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of any number that follow one another, and the states after them.

    Parameters
    ----------
    scan
        Takes rows, `parts` of them, and a state.
    parts
        (texts, length, …) each.
    state
        (texts, …) in front of the rows.
    """
    texts, length = parts[0].shape[:2]
    tree, said = None, []
    for start in range(0, length, _CHUNK):
        cut = [part[:, start : start + _CHUNK] for part in parts]
        width = cut[0].shape[1]
        if tree is None or tree.width != width:
            tree = RowTree.chain(texts, width, state.device)
        out, rows = scan(tree, *cut, state)
        state = rows.state_after(state)
        said.append(out)
    return torch.cat(said, 1) if len(said) > 1 else said[0], state


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows (…, d) of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
