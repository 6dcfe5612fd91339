"""Samplers: the cheapest one that applies a call's logits processors exactly."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as hf

from retrieve_spec.errors import ConfigError
from retrieve_spec.sampling.acceptance import (
    GreedySampler,
    HostReading,
    ProcessorSampler,
    RandomSampler,
    Sampler,
    Warpers,
    log_softmax_at,
)
from retrieve_spec.sampling.device_acceptance import DeviceSampler, draws_alike
from retrieve_spec.sampling.guides import GrammarProcessor
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.text import RowText

_SEEDS = -(1 << 63), (1 << 64) - 1
"""The least and the largest seed, as of torch's generators."""


class LogProbSampler:
    """Chooses what another sampler chooses, and notes how probable that was; no row of logits is kept."""

    def __init__(self, chooser: Sampler) -> None:
        self.chooser = chooser
        self.reads_plainly, self.scores, self.raw = chooser.reads_plainly, chooser.scores, chooser.raw
        self.read, self.log_prob, self.noise_at = chooser.read, chooser.log_prob, chooser.noise_at
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the logits' device: nothing waits for them

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
        Processors that say in `acts_on`, given (n,) int32 the text, whether they change what may follow it; one that
        does not does not act on anything longer either.
    opening
        Applies the guides and what comes behind them.
    rest
        Applies only what comes behind them.
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

    def noise_at(self, text: RowText) -> tuple[int, int, int] | None:
        """Key of the noise of the next token, None without noise."""
        return self._chooser(text).noise_at(text)


def whole_seed(given: Any) -> int | None:
    """A seed as a Python number with the sign that 64 bits give it, of any kind of whole number; None stays.

    Raises
    ------
    ConfigError
        It is something else, or has more than 64 bits.
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
        return host  # the argmax of every row is read anyway
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
    """What tells the tokens that are allowed in one row of a batch; alone, it would be asked for row 0."""
    return lambda _row, input_ids: allowed(row, input_ids)


def _read_warpers(processors: Any) -> Warpers | None:
    """Read the rules off a list of plain warpers in their usual order; None when anything else is in it."""
    readers: list[tuple[type, Callable[[Any], dict[str, Any]]]] = [
        (hf.RepetitionPenaltyLogitsProcessor, lambda p: {"penalty": float(p.penalty)}),
        (hf.MinLengthLogitsProcessor, lambda p: _least(p, p.min_length)),
        (hf.MinNewTokensLengthLogitsProcessor, lambda p: _least(p, p.prompt_length_to_skip + p.min_new_tokens)),
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
        ignored = getattr(processor, "prompt_ignore_length", None)  # a tensor of zeros: the prompt has no padding
        if ignored is not None and not (isinstance(ignored, torch.Tensor) and not ignored.any()):
            return None
        rule = readers[at][1](processor)
        if "end_ids" in rule and rules.get("end_ids", rule["end_ids"]) != rule["end_ids"]:
            return None  # one length for some tokens, another for others
        rules |= rule | {"min_length": max(rule.get("min_length", 0), rules.get("min_length", 0))}
        at += 1
    return Warpers(**rules)


def _least(processor: Any, length: int) -> dict[str, Any]:
    """Rules of a processor that lets no text end before it is `length` tokens long; negative ids are no token's."""
    ends = (int(token) for token in processor.eos_token_id.flatten())
    return {"min_length": length, "end_ids": tuple(token for token in ends if token >= 0)}
