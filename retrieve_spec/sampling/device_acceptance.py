"""Acceptance on the device: the target's token at every row of a verified tree, where its logits are.

The rules are those of the host's samplers and so are the results: the noise of a token is the same 53 bits, and a row
is left to the host (-1) where the last digits of a logarithm or of a sum could decide it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.sampling import noise_key
from retrieve_spec.sampling.acceptance import GreedySampler, RandomSampler, Warpers
from retrieve_spec.sampling.pass_logits import PassLogits, read_packed
from retrieve_spec.sampling.text import RowText

_MARGIN = 1e-9
"""Distance at which two float64 results may be ordered differently on two devices."""
_CANDIDATES = 1024
"""Tokens of a row that top-p and min-p look at; a row that needs more is left to the host."""
_TIES = 64
"""Tokens looked at beyond `top_k`, as all that equal the last one stay."""
_ELEMENTS = 1 << 22
"""Noise values computed at once."""


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise of tokens under keys, float64 in (0, 1), bit for bit that of `kernels.sampling.uniform`.

    `keys` holds the bits of unsigned numbers as int64, as torch's integer products wrap around; both broadcast.
    """
    x = keys + (token_ids + 1) * _GOLDEN
    x = (x ^ _logical_shift(x, 30)) * _FIRST
    x = (x ^ _logical_shift(x, 27)) * _SECOND
    x = x ^ _logical_shift(x, 31)
    return (_logical_shift(x, 11).double() + 0.5) * (1.0 / 9007199254740992.0)


def _number(value: float, device: torch.device) -> torch.Tensor:
    """() float32, filled on the device: `torch.tensor` would copy it there and wait for what runs."""
    return torch.full((), value, dtype=torch.float32, device=device)


def sample_rows(scores: torch.Tensor, keys: torch.Tensor, warpers: Warpers) -> torch.Tensor:
    """Draw one token per row (Gumbel-max with counted noise).

    Parameters
    ----------
    scores
        (rows, vocab) float32.
    keys
        (rows,) int64, the noise key of each row.
    warpers
        Temperature and truncation; the penalty has been applied.

    Returns
    -------
    Tensor
        (rows,) int64; -1 where the host must decide.
    """
    heat = _number(warpers.temperature, scores.device)  # a GPU multiplies by the inverse of a number
    vocab = scores.shape[1]
    if 0 < warpers.top_k < vocab or warpers.top_p < 1.0 or warpers.min_p > 0.0:
        ids, scaled, sure = _truncate(scores, heat, warpers)
        return _draw(ids, scaled, keys, sure)
    ids = torch.arange(vocab, device=scores.device)[None]
    step = max(1, _ELEMENTS // vocab)
    parts = []
    for first in range(0, len(scores), step):
        part = scores[first : first + step]
        sure = torch.ones(len(part), dtype=torch.bool, device=scores.device)
        parts.append(_draw(ids, (part / heat).double(), keys[first : first + step], sure))
    return torch.cat(parts)


def _draw(ids: torch.Tensor, scaled: torch.Tensor, keys: torch.Tensor, sure: torch.Tensor) -> torch.Tensor:
    """Token with the largest score plus noise in each row, -1 where that is not sure."""
    noisy = scaled - torch.log(-torch.log(uniform(keys[:, None], ids)))
    best, at = noisy.max(dim=1, keepdim=True)
    sure = sure & torch.isfinite(best[:, 0]) & ((noisy >= best - _MARGIN).sum(dim=1) == 1)
    return torch.where(sure, ids.expand_as(noisy).gather(1, at)[:, 0], -1)


def _truncate(
    scores: torch.Tensor, heat: torch.Tensor, warpers: Warpers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidates by falling score: ids and scaled scores (rows, m), -inf where dropped, and (rows,) whether certain."""
    vocab = scores.shape[1]
    top_k = warpers.top_k if warpers.top_k < vocab else 0
    m = min(vocab, top_k + _TIES if top_k else _CANDIDATES)
    values, ids = torch.topk(scores, m, dim=1)
    ids, order = ids.sort(dim=1)  # equal values by id, as the host orders them
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    scaled = (values / heat).double()
    top = scaled[:, :1]
    keep = torch.ones_like(values, dtype=torch.bool)
    sure = torch.isfinite(values[:, 0])  # else the host says what is wrong
    last = values[:, -1]  # tokens not among the candidates are at most this
    if top_k:
        floor = values[:, top_k - 1 : top_k]
        keep = values >= floor
        if m < vocab:
            sure &= last < floor[:, 0]
    if warpers.top_p < 1.0:
        mass = torch.where(keep, torch.exp(scaled - top), 0.0)
        total = mass if top_k else torch.exp((scores / heat).double() - top)
        reached = torch.cumsum(mass / total.sum(dim=1, keepdim=True), dim=1)
        sure &= ((reached - warpers.top_p).abs() > _MARGIN).all(dim=1)
        keep[:, 1:] &= reached[:, :-1] < warpers.top_p
        if m < vocab and not top_k:
            sure &= (reached[:, -1] > warpers.top_p) & (torch.where(keep, values, math.inf).amin(dim=1) > last)
    elif not top_k:
        limit = ((top + math.log(warpers.min_p)) * warpers.temperature).float()
        keep = values >= limit
        if m < vocab:
            sure &= last < limit[:, 0]
    if warpers.min_p > 0.0:
        distance = scaled - top - math.log(warpers.min_p)
        keep &= distance >= 0.0
        sure &= (distance.abs() > _MARGIN).all(dim=1)
    return ids, torch.where(keep, scaled, -math.inf), sure


class DeviceSampler:
    """Chooses on the device what a host sampler would choose; one copy per pass brings tokens and top logits over.

    Parameters
    ----------
    host
        The rules, and who decides rows that the device is not sure of.
    """

    reads_plainly = False
    scores = None
    raw = None

    def __init__(self, host: GreedySampler | RandomSampler) -> None:
        self.host, self.log_prob, self.noise_at = host, host.log_prob, host.noise_at
        self._warpers = host.warpers
        self._seen: torch.Tensor | None = None
        self._marked = 0

    def read(self, logits: torch.Tensor, first_row: int, tree: DraftTree, text: RowText, top_k: int) -> PassLogits:
        """Choose at every row and read the result (`Sampler.read`)."""
        scores = logits[first_row:].float()
        if self._warpers.penalty != 1.0:
            scores = self._penalise(scores, tree, text)
        if self._warpers.must_go_on(text.length):
            scores = self._forbid_end(scores, tree, text.length)
        if (noise := self.host.noise_at(text)) is not None:
            chosen = sample_rows(scores, noise_keys(noise, tree).to(scores.device, non_blocking=True), self._warpers)
        else:
            chosen = scores.argmax(dim=-1)
        before = chosen.new_full((first_row,), -1)
        return read_packed(logits, top_k, torch.cat([before, chosen]))

    def alike(self, text: RowText) -> Warpers | None:
        """The rules that rows of other texts can be read by along with this one's (`read_sampled`); None for none."""
        return None if self._warpers.edits(text.length) or self.host.noise_at(text) is None else self._warpers

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return what was chosen at the row."""
        assert logits.chosen is not None
        token = int(logits.chosen[row])
        return token if token >= 0 else self.host.choose(logits, row, text)

    def _penalise(self, scores: torch.Tensor, tree: DraftTree, text: RowText) -> torch.Tensor:
        """Penalise in each row the tokens of the text and those on the path to the row's node."""
        vocab, device = scores.shape[1], scores.device
        if self._seen is None:
            self._seen = torch.zeros(vocab + 1, dtype=torch.bool, device=device)  # the last one: ids without a logit
        written = torch.from_numpy(np.minimum(text.ids[self._marked :], vocab))
        self._seen.index_fill_(0, written.to(device, non_blocking=True), True)
        self._marked = text.length
        paths = torch.from_numpy(np.minimum(path_tokens(tree, int(text.last_ids[0])), vocab))
        paths = paths.to(device, non_blocking=True)
        seen = self._seen.repeat(len(scores), 1).scatter_(1, paths, True)[:, :vocab]
        factor: torch.Tensor | float = self._warpers.penalty
        if isinstance(self.host, RandomSampler):  # divided by as on the host
            factor = _number(self._warpers.penalty, device)
        return torch.where(seen, torch.where(scores < 0, scores * factor, scores / factor), scores)

    def _forbid_end(self, scores: torch.Tensor, tree: DraftTree, length: int) -> torch.Tensor:
        """Forbid the tokens that end a text in the rows of nodes behind which it is too short; a copy."""
        short = np.concatenate([[0], tree.depth]) + length < self._warpers.min_length
        device = scores.device
        ends = torch.tensor(self._warpers.ends_below(scores.shape[1]), dtype=torch.long)
        forbidden = torch.zeros(scores.shape, dtype=torch.bool, device=device)
        forbidden.index_fill_(1, ends.to(device, non_blocking=True), True)
        forbidden &= torch.from_numpy(short).to(device, non_blocking=True)[:, None]
        return scores.masked_fill(forbidden, -math.inf)


def read_sampled(
    parts: Sequence[torch.Tensor],
    first_rows: Sequence[int],
    trees: Sequence[DraftTree],
    noises: Sequence[tuple[int, int, int]],
    warpers: Warpers,
    top_k: int,
) -> list[PassLogits]:
    """`DeviceSampler.read` for several texts with the same rules, none of which look at the text, at once.

    Parameters
    ----------
    parts, first_rows, trees
        By text, its (rows, vocab) logits, which of these rows follows the root, and the draft.
    noises
        By text, `Sampler.noise_at`.
    """
    logits = torch.cat(list(parts))
    keys = torch.cat([
        torch.cat([torch.zeros(first, dtype=torch.long), noise_keys(noise, tree)])
        for first, noise, tree in zip(first_rows, noises, trees, strict=True)
    ])  # fmt: skip
    chosen = sample_rows(logits.float(), keys.to(logits.device, non_blocking=True), warpers)
    read, found, begin = read_packed(logits, top_k, chosen), [], 0
    assert read.chosen is not None
    for part, first in zip(parts, first_rows, strict=True):
        at = slice(begin, begin + len(part))
        own = read.chosen[at].copy()
        own[:first] = -1
        found.append(PassLogits(part, read.top_ids[at], read.top_logits[at], chosen=own))
        begin += len(part)
    return found


def noise_keys(noise: tuple[int, int, int], tree: DraftTree) -> torch.Tensor:
    """(1 + n,) int64: keys of the noise of the tokens that follow the root and each node.

    `noise` is (seed, row, position) of the token that follows the root.
    """
    seed, row, position = noise
    deepest = int(tree.depth.max()) if len(tree) else 0
    by_depth = np.array([int(noise_key(seed, row, position + d)) for d in range(deepest + 1)], np.uint64)
    return torch.from_numpy(by_depth[np.concatenate([[0], tree.depth])].view(np.int64))


def path_tokens(tree: DraftTree, root: int) -> NDArray[np.int64]:
    """(1 + n, depth) int64: the tokens on the path to the root and to each node, filled up with the root's token."""
    deepest = int(tree.depth.max()) if len(tree) else 0
    paths = np.full((1 + len(tree), max(deepest, 1)), root, np.int64)
    for i in range(len(tree)):
        paths[1 + i] = paths[1 + tree.parent[i]]
        paths[1 + i, tree.depth[i] - 1] = tree.token_ids[i]
    return paths
