"""Acceptance on the device: the target's token at every row of a verified tree, where its logits are.

The rules are those of the host's samplers and so are the results (`kernels.triton_sampling`): a row that the device is
not sure of is left to the host (-1).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import in_a_line
from retrieve_spec.kernels.sampling import noise_key
from retrieve_spec.sampling.acceptance import GreedySampler, RandomSampler, Warpers
from retrieve_spec.sampling.pass_logits import PassLogits, on_device, read_logits, read_packed
from retrieve_spec.sampling.text import RowText

logger = logging.getLogger(__name__)

RULES = np.dtype([
    ("key", np.uint64), ("temperature", np.float64), ("top_k", np.int64), ("top_p", np.float64),
    ("log_min_p", np.float64),
])  # fmt: skip
"""What the token of a row is drawn by: the key of its noise and its rules; 0, 1 and -inf switch truncations off."""


def draw(scores: torch.Tensor, rules: NDArray[np.void]) -> torch.Tensor:
    """(rows,) int64 drawn on the device from (rows, vocab) scores by (rows,) `RULES`; -1 where the host must decide."""
    from retrieve_spec.kernels.triton_sampling import sample_rows

    with on_device(scores.device):
        return sample_rows(scores, rules)


@functools.cache
def draws_alike(device: str) -> bool:
    """Whether tokens drawn on a kind of device are those of the host, tried once on a row for each of several rules."""
    if device != "cuda":
        return False
    scores, text = 4.0 * torch.arange(3000.0).sin()[None], RowText(torch.zeros((1, 1), dtype=torch.long))
    try:
        for warpers in (Warpers(0.7), Warpers(0.7, top_k=40), Warpers(top_p=0.9, min_p=0.01)):
            host = RandomSampler(warpers, seed=0)
            drawn = int(draw(scores.to(device), DeviceSampler(host).rules(text, DraftTree()))[0])
            if drawn != (expected := host.choose(read_logits(scores, 1), 0, text)):
                raise ValueError(f"token {drawn} instead of {expected} by {warpers}")
    except Exception as error:  # whatever the compiler raises: the host draws the same
        logger.warning("tokens are drawn on the host: %s", in_a_line(error))
        return False
    return True


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
        scores = logits[first_row:]
        if self._warpers.penalty != 1.0:
            scores = self._penalise(scores.float(), tree, text)
        if self._warpers.must_go_on(text.length):
            scores = self._forbid_end(scores, tree, text.length)
        greedy = isinstance(self.host, GreedySampler)
        chosen = scores.argmax(dim=-1) if greedy else draw(scores, self.rules(text, tree))
        if first_row:
            chosen = torch.cat([chosen.new_full((first_row,), -1), chosen])
        return read_packed(logits, top_k, chosen)

    def reads_along(self, text: RowText) -> bool:
        """Whether rows of other texts can be read along (`read_sampled`): the rules do not look at the text."""
        return isinstance(self.host, RandomSampler) and not self._warpers.edits(text.length)

    @property
    def truncates(self) -> bool:
        """Whether the rules make any token impossible; texts where they do are best read apart."""
        return self._warpers.truncates

    def rules(self, text: RowText, tree: DraftTree) -> NDArray[np.void]:
        """(1 + n,) `RULES`: what is drawn by behind the root and behind each node."""
        assert isinstance(self.host, RandomSampler)
        seed, row, position = self.host.noise_at(text)
        deepest = int(tree.depth.max()) if len(tree) else 0
        by_depth = np.array([int(noise_key(seed, row, position + d)) for d in range(deepest + 1)], np.uint64)
        warpers = self._warpers
        rules = np.empty(1 + len(tree), RULES)
        rules["key"] = by_depth[np.concatenate([[0], tree.depth])]
        rules["temperature"], rules["top_k"], rules["top_p"] = warpers.temperature, warpers.top_k, warpers.top_p
        rules["log_min_p"] = math.log(warpers.min_p) if warpers.min_p > 0.0 else -math.inf
        return rules

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
            factor = torch.full((), self._warpers.penalty, device=device)
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
    parts: Sequence[torch.Tensor], first_rows: Sequence[int], rules: Sequence[NDArray[np.void]], top_k: int
) -> list[PassLogits]:
    """`DeviceSampler.read` for several texts at once, whose rules do not look at the text.

    Parameters
    ----------
    parts, first_rows, rules
        By text, its (rows, vocab) logits, which of these rows follows the root, and `DeviceSampler.rules`.
    """
    logits = torch.cat(list(parts))
    by_row = [np.repeat(own, [first + 1, *[1] * (len(own) - 1)]) for first, own in zip(first_rows, rules, strict=True)]
    chosen = draw(logits, np.concatenate(by_row))
    read, found, begin = read_packed(logits, top_k, chosen), [], 0
    assert read.chosen is not None
    for part, first in zip(parts, first_rows, strict=True):
        at = slice(begin, begin + len(part))
        own = read.chosen[at].copy()
        own[:first] = -1
        found.append(PassLogits(part, read.top_ids[at], read.top_logits[at], chosen=own))
        begin += len(part)
    return found


def path_tokens(tree: DraftTree, root: int) -> NDArray[np.int64]:
    """(1 + n, depth) int64: the tokens on the path to the root and to each node, filled up with the root's token."""
    deepest = int(tree.depth.max()) if len(tree) else 0
    paths = np.full((1 + len(tree), max(deepest, 1)), root, np.int64)
    for i in range(len(tree)):
        paths[1 + i] = paths[1 + tree.parent[i]]
        paths[1 + i, tree.depth[i] - 1] = tree.token_ids[i]
    return paths
