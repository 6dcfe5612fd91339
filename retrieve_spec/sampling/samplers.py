"""Samplers: the cheapest one that applies a call's logits processors exactly, on the device where it can."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as hf

from retrieve_spec.drafting.drafter import NoiseKey
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.errors import ConfigError, in_a_line
from retrieve_spec.kernels.sampling import noise_key
from retrieve_spec.sampling.acceptance import (
    GreedySampler,
    HostReading,
    PassLogits,
    ProcessorSampler,
    RandomSampler,
    RowText,
    Sampler,
    Warpers,
    log_softmax_at,
    on_device,
    read_logits,
    read_packed,
)
from retrieve_spec.sampling.guides import GrammarProcessor

logger = logging.getLogger(__name__)

RULES = np.dtype([
    ("key", np.uint64), ("temperature", np.float64), ("top_k", np.int64), ("top_p", np.float64),
    ("log_min_p", np.float64),
])  # fmt: skip
"""What the token of a row is drawn by: the key of its noise and its rules; 0, 1 and -inf disable truncations."""


def draw(scores: torch.Tensor, rules: NDArray[np.void]) -> torch.Tensor:
    """(rows,) int64 drawn on the device from (rows, vocab) scores by (rows,) `RULES`; -1 where the host must decide."""
    from retrieve_spec.kernels.triton_sampling import sample_rows

    with on_device(scores.device):
        return sample_rows(scores, rules)


@functools.cache
def draws_alike(device: str) -> bool:
    """Whether tokens drawn on a kind of device equal those of the host; tried once, on one row for each of several
    rules.
    """
    if device != "cuda":
        return False
    scores, text = 4.0 * torch.arange(3000.0).sin()[None], RowText(torch.zeros((1, 1), dtype=torch.long))
    try:
        for warpers in (Warpers(0.7), Warpers(0.7, top_k=40), Warpers(top_p=0.9, min_p=0.01)):
            host = RandomSampler(warpers, seed=0)
            drawn = int(draw(scores.to(device), DeviceSampler(host).rules(text, NO_DRAFT))[0])
            if drawn != (expected := host.choose(read_logits(scores, 1), 0, text)):
                raise ValueError(f"token {drawn} instead of {expected} by {warpers}")
    except Exception as error:  # the compiler may raise anything; the host draws the same
        logger.warning("tokens are drawn on the host: %s", in_a_line(error))
        return False
    return True


class DeviceSampler:
    """Chooses on the device what a host sampler would choose; one copy per pass brings tokens and top logits to the
    host.

    Parameters
    ----------
    host
        Has the rules, and chooses for rows of which the device is not sure.

    Attributes
    ----------
    truncates
        Whether the rules make any token impossible; such texts are best read apart from others.
    """

    reads_plainly = False
    scores = None
    raw = None

    def __init__(self, host: GreedySampler | RandomSampler) -> None:
        self.host, self.log_prob, self.noise_at = host, host.log_prob, host.noise_at
        self._warpers, self.truncates = host.warpers, host.warpers.truncates
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
        """Whether rows of other texts can be read in the same call (`read_sampled`): the rules do not depend on the
        text.
        """
        return isinstance(self.host, RandomSampler) and not self._warpers.edits(text.length)

    def rules(self, text: RowText, tree: DraftTree) -> NDArray[np.void]:
        """(1 + n,) `RULES` for the draws after the root and after each node."""
        assert isinstance(self.host, RandomSampler)
        seed, row, position = self.host.noise_at(text)
        deepest = int(tree.depth.max(initial=0))
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
            self._seen = torch.zeros(vocab + 1, dtype=torch.bool, device=device)  # the last: ids without a logit
        written = torch.from_numpy(np.minimum(text.ids[self._marked :], vocab))
        self._seen.index_fill_(0, written.to(device, non_blocking=True), True)
        self._marked = text.length
        paths = torch.from_numpy(np.minimum(path_tokens(tree, int(text.last_ids[0])), vocab))
        paths = paths.to(device, non_blocking=True)
        seen = self._seen.repeat(len(scores), 1).scatter_(1, paths, True)[:, :vocab]
        factor: torch.Tensor | float = self._warpers.penalty
        if isinstance(self.host, RandomSampler):  # same division as on the host
            factor = torch.full((), self._warpers.penalty, device=device)
        return torch.where(seen, torch.where(scores < 0, scores * factor, scores / factor), scores)

    def _forbid_end(self, scores: torch.Tensor, tree: DraftTree, length: int) -> torch.Tensor:
        """Forbid the tokens that end a text in the rows of nodes after which it is too short; a copy."""
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
    """`DeviceSampler.read` for several texts at once, whose rules do not depend on the text.

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
    paths = np.full((1 + len(tree), tree.depth.max(initial=1)), root, np.int64)
    for i in range(len(tree)):
        paths[1 + i] = paths[1 + tree.parent[i]]
        paths[1 + i, tree.depth[i] - 1] = tree.token_ids[i]
    return paths


_SEEDS = -(1 << 63), (1 << 64) - 1
"""The least and the largest seed, as of torch's generators."""


class LogProbSampler:
    """Chooses what another sampler chooses, and records its log-probability; no row of logits is kept."""

    def __init__(self, chooser: Sampler) -> None:
        self.chooser = chooser
        self.reads_plainly, self.scores, self.raw = chooser.reads_plainly, chooser.scores, chooser.raw
        self.read, self.log_prob, self.noise_at = chooser.read, chooser.log_prob, chooser.noise_at
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the logits' device, without synchronisation

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the other sampler's choice."""
        token = self.chooser.choose(logits, row, text)
        raw = log_softmax_at(logits.logits[row], token)
        self._noted.append((self.chooser.log_prob(logits, row, text, token), raw))
        return token

    def log_probs(self, first: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """(2, n) float32 of the new tokens from `first` on: by the processed scores, and by the raw logits."""
        noted = self._noted[first : None if count is None else first + count]
        if not noted:
            return np.empty((2, 0), np.float32)
        both = [torch.stack([pair[i].to(noted[0][1].device) for pair in noted]).cpu().numpy() for i in (0, 1)]
        return np.stack(both)


class OpeningSampler(HostReading):
    """One sampler while guides act, another one for the rest of the text.

    Parameters
    ----------
    guides
        Processors whose `acts_on`, called with the (n,) int32 text, returns whether they change what may follow it. One
        that returns False for a text does so for every longer one.
    opening
        Applies the guides and what comes after them.
    rest
        Applies only what comes after them.
    """

    def __init__(self, guides: Sequence[Any], opening: Sampler, rest: Sampler) -> None:
        self._guides, self._opening, self._rest = guides, opening, rest
        self._rest_from: int | None = None

    def _chooser(self, text: RowText) -> Sampler:
        if self._rest_from is None and not any(guide.acts_on(text.ids) for guide in self._guides):
            self._rest_from = text.length
        return self._opening if self._rest_from is None or text.length < self._rest_from else self._rest

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the token that follows the text, given the logits at `row`."""
        return self._chooser(text).choose(logits, row, text)

    def log_prob(self, logits: PassLogits, row: int, text: RowText, token: int) -> torch.Tensor:
        """() float32: log-probability of what `choose` has just returned."""
        return self._chooser(text).log_prob(logits, row, text, token)

    def noise_at(self, text: RowText) -> NoiseKey | None:
        """Key of the noise of the next token, None without noise."""
        return self._chooser(text).noise_at(text)


def whole_seed(given: Any) -> int | None:
    """Return a seed, given as any kind of whole number, as a Python integer that is signed as in 64 bits; None stays
    None.

    Raises
    ------
    ConfigError
        It is no whole number, or has more than 64 bits.
    """
    if given is None:
        return None
    if not isinstance(given, Integral) or not _SEEDS[0] <= int(given) <= _SEEDS[1]:
        raise ConfigError(
            "seed to be a whole number of 64 bits", repr(given)[:60], "Leave it out to draw from torch's generator."
        )
    return (int(given) - _SEEDS[0]) % (1 << 64) + _SEEDS[0]


def make_sampler(
    processors: Any,
    seed: int | None,
    *,
    row: int = 0,
    keep_scores: bool = False,
    keep_raw: bool = False,
    log_probs: bool = False,
    device: torch.device | None = None,
) -> Sampler:
    """Pick a sampler for a generation.

    Parameters
    ----------
    processors
        Logits processors in order.
    seed
        Of the sampling noise; None chooses greedily.
    row
        Of the batch; its noise is its own.
    keep_scores, keep_raw
        Keep processed scores or raw logits of every chosen token.
    log_probs
        Note the log-probabilities of every chosen token: the sampler is a `LogProbSampler`.
    device
        Where the logits are. On a GPU with Triton known rules are applied there, to all rows at once; on the host,
        rows are looked at one by one as the walk gets to them, which is less work.
    """
    if log_probs:
        chooser = make_sampler(processors, seed, row=row, keep_scores=keep_scores, keep_raw=keep_raw, device=device)
        return LogProbSampler(chooser)
    guides = [] if keep_scores or keep_raw else list(itertools.takewhile(lambda p: hasattr(p, "acts_on"), processors))
    if guides:
        rest = make_sampler(LogitsProcessorList(processors[len(guides) :]), seed, row=row)
        return OpeningSampler(guides, ProcessorSampler(processors, seed, row=row), rest)
    warpers = None if keep_scores or keep_raw else _read_warpers(processors)
    if warpers is None or (seed is None and (warpers.truncates or warpers.temperature != 1.0)):
        return ProcessorSampler(processors, seed, row=row, keep_scores=keep_scores, keep_raw=keep_raw)
    host = GreedySampler(warpers) if seed is None else RandomSampler(warpers, seed, row)
    if isinstance(host, GreedySampler) and warpers.penalty == 1.0:
        return host  # the argmax of every row is available anyway
    return DeviceSampler(host) if device is not None and draws_alike(device.type) else host


def processors_of_row(processors: Any, row: int) -> LogitsProcessorList:
    """The processors of a batch for one of its rows."""
    own = LogitsProcessorList()
    for processor in processors:
        if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        if type(processor) is hf.PrefixConstrainedLogitsProcessor:
            processor = hf.PrefixConstrainedLogitsProcessor(_of_row(processor._prefix_allowed_tokens_fn, row), 1)
        own.append(processor.fresh() if isinstance(processor, GrammarProcessor) else processor)
    return own


def _of_row(allowed: Callable[[int, torch.Tensor], Any], row: int) -> Callable[[int, torch.Tensor], Any]:
    """Return a `prefix_allowed_tokens_fn` that is always called for one row of a batch; alone that row would be row
    0.
    """
    return lambda _row, input_ids: allowed(row, input_ids)


def _read_warpers(processors: Any) -> Warpers | None:
    """Read the rules from a list of plain warpers in their usual order; None when it has anything else."""
    readers: list[tuple[type, Callable[[Any], dict[str, Any]]]] = [
        (hf.RepetitionPenaltyLogitsProcessor, lambda p: {"penalty": float(p.penalty)}),
        (hf.MinLengthLogitsProcessor, lambda p: _min_length(p, p.min_length)),
        (hf.MinNewTokensLengthLogitsProcessor, lambda p: _min_length(p, p.prompt_length_to_skip + p.min_new_tokens)),
        (hf.TemperatureLogitsWarper, lambda p: {"temperature": float(p.temperature)}),
        (hf.TopKLogitsWarper, lambda p: {"top_k": int(p.top_k)}),
        (hf.TopPLogitsWarper, lambda p: {"top_p": float(p.top_p)}),
        (hf.MinPLogitsWarper, lambda p: {"min_p": float(p.min_p)}),
    ]
    rules: dict[str, Any] = {}
    at = 0
    for processor in processors:
        while at < len(readers) and type(processor) is not readers[at][0]:
            at += 1
        if at == len(readers) or getattr(processor, "min_tokens_to_keep", 1) > 1:
            return None
        if getattr(processor, "filter_value", -float("inf")) != -float("inf"):
            return None
        ignored = getattr(processor, "prompt_ignore_length", None)  # zeros, since the prompt has no padding
        if ignored is not None and not (isinstance(ignored, torch.Tensor) and not ignored.any()):
            return None
        rule = readers[at][1](processor)
        if "end_ids" in rule and rules.get("end_ids", rule["end_ids"]) != rule["end_ids"]:
            return None  # the lengths differ by token
        rules |= rule | {"min_length": max(rule.get("min_length", 0), rules.get("min_length", 0))}
        at += 1
    return Warpers(**rules)


def _min_length(processor: Any, length: int) -> dict[str, Any]:
    """Rules of a processor that lets no text end before it is `length` tokens long; negative ids are no token's."""
    ends = (int(token) for token in processor.eos_token_id.flatten())
    return {"min_length": length, "end_ids": tuple(token for token in ends if token >= 0)}
