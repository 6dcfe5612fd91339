"""Acceptance: the target's own tokens down a verified tree, by the walk that makes drafting lossless.

At every node the target's next token is chosen, by argmax or by a sample from its processed distribution; if a child
carries it the walk steps down, else it stops and the token is the bonus token. The choice never looks at the draft, so
the emitted text is that of plain decoding whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import ROOT, DraftTree
from retrieve_spec.errors import DistributionError
from retrieve_spec.kernels.sampling import draw_row, gumbel_argmax, truncate_row
from retrieve_spec.kernels.treemask import find_child
from retrieve_spec.sampling.pass_logits import PassLogits, read_logits
from retrieve_spec.sampling.text import RowText


def check_drawable(scores: NDArray[np.float32]) -> None:
    """Refuse (vocab,) scores that are no distribution, as torch's sampling does.

    Raises
    ------
    DistributionError
        One is NaN or infinite, or all are -inf.
    """
    highest = scores.max()  # NaN if one is
    if not np.isfinite(highest):
        raise DistributionError(
            "scores to sample from",
            f"{highest} as the highest of them",
            "Load the model in bfloat16 or float32, or check the logits processors.",
        )


def _drawn(scores: NDArray[np.float32], temperature: float, seed: int, row: int, position: int) -> int:
    """A token drawn from (vocab,) scores, which are refused where they are no distribution."""
    token = int(draw_row(scores, temperature, seed, row, position))
    if token < 0:
        check_drawable(scores)
    return token


class Sampler(Protocol):
    """Chooses the target's next token after one row of a pass."""

    @property
    def reads_plainly(self) -> bool:
        """Whether `read` is `read_logits`, so that rows of other texts can be read along."""

    @property
    def scores(self) -> list[torch.Tensor] | None:
        """Processed scores (1, vocab) of every chosen token, where they are asked for."""

    @property
    def raw(self) -> list[torch.Tensor] | None:
        """Raw logits (1, vocab) of every chosen token, where they are asked for."""

    def read(self, logits: torch.Tensor, first_row: int, tree: DraftTree, text: RowText, top_k: int) -> PassLogits:
        """Read what `choose` and the drafter need of the (rows, vocab) logits of a pass.

        `first_row` follows the root, which is the last token of `text`; `first_row + 1 + i` follows node i of `tree`.
        """

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the token that follows `text`, given the logits at `row`."""

    def log_prob(self, logits: PassLogits, row: int, text: RowText, token: int) -> torch.Tensor:
        """() float32: log-probability of what `choose` has just returned, under the scores it was chosen by."""

    def noise_at(self, text: RowText) -> tuple[int, int, int] | None:
        """(seed, row, position) of the noise the token that follows `text` is drawn with, None without noise."""


class HostReading:
    """Reading for samplers that work on the host; they keep nothing unless they say so."""

    reads_plainly = True
    scores: list[torch.Tensor] | None = None
    raw: list[torch.Tensor] | None = None

    def read(self, logits: torch.Tensor, first_row: int, tree: DraftTree, text: RowText, top_k: int) -> PassLogits:
        """Read the most probable tokens of every row (`Sampler.read`)."""
        return read_logits(logits, top_k)


def log_softmax_at(scores: torch.Tensor, place: int) -> torch.Tensor:
    """() float32: log-probability of one place under softmax of (n,) scores, on their device."""
    scores = scores.detach()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return (scores[place] - torch.logsumexp(scores, dim=-1)).float()


@dataclass(frozen=True, slots=True)
class Warpers:
    """The rules that are applied without building tensors: penalty, least length, then the others as they stand here.

    Neutral values switch them off. Before the text is `min_length` tokens long none of `end_ids` may come.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    min_length: int = 0
    end_ids: tuple[int, ...] = ()

    @property
    def truncates(self) -> bool:
        """Whether any token may become impossible by how probable it is."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def must_go_on(self, length: int) -> bool:
        """Whether a text of so many tokens may not end."""
        return length < self.min_length and len(self.end_ids) > 0

    def ends_below(self, vocabulary: int) -> list[int]:
        """Those of `end_ids` that have a score."""
        return [token for token in self.end_ids if token < vocabulary]

    def edits(self, length: int) -> bool:
        """Whether `edited` changes scores behind a text of so many tokens."""
        return self.penalty != 1.0 or self.must_go_on(length)

    def edited(self, scores: NDArray[np.float32], text: RowText) -> NDArray[np.float32]:
        """(vocab,) scores after CTRL's penalty (Keskar et al., 2019) and the least length: a copy where they change."""
        if not self.edits(text.length):
            return scores
        edited = scores.copy()
        if self.penalty != 1.0:
            ids = text.ids
            ids = ids[ids < len(scores)]
            before, factor = scores[ids], np.float32(self.penalty)
            edited[ids] = np.where(before < 0, before * factor, before / factor)
        if self.must_go_on(text.length):
            edited[self.ends_below(len(scores))] = -np.inf
        return edited


class GreedySampler(HostReading):
    """The most probable token, after a repetition penalty and a least length if there are any."""

    def __init__(self, warpers: Warpers | None = None) -> None:
        self.warpers = warpers or Warpers()

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the argmax of the row."""
        best = int(logits.top_ids[row, 0])
        if self.warpers.penalty == 1.0 and not (self.warpers.must_go_on(text.length) and best in self.warpers.end_ids):
            return best
        return int(self.warpers.edited(logits.row(row), text).argmax())

    def log_prob(self, logits: PassLogits, row: int, text: RowText, token: int) -> torch.Tensor:
        """Log-probability after the penalty and among the tokens that may come, at temperature 1."""
        if not self.warpers.edits(text.length):
            return log_softmax_at(logits.logits[row], token)
        return log_softmax_at(torch.from_numpy(self.warpers.edited(logits.row(row), text)), token)

    def noise_at(self, text: RowText) -> None:
        """Greedy decoding has no noise."""


class RandomSampler(HostReading):
    """A sample from softmax(logits) under a penalty, a least length, temperature, top-k, top-p and min-p.

    Gumbel-max with counted noise: the noise of a token depends on (seed, row, position, token) alone, so the sample
    is the same whether the row came from a tree, a chain or a pass over one token.
    """

    def __init__(self, warpers: Warpers, seed: int, row: int = 0) -> None:
        self.warpers = warpers
        self._seed = seed
        self._row = row
        self._ids = np.empty(0, np.int32)
        self._scores = np.empty(0, np.float64)

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return a sample."""
        key = (self._seed, self._row, text.length)
        values = self.warpers.edited(logits.row(row), text)
        if not self.warpers.truncates:
            return _drawn(values, self.warpers.temperature, *key)
        check_drawable(values)
        count = self._truncate(values)
        return int(gumbel_argmax(self._ids, self._scores, count, *key))

    def log_prob(self, logits: PassLogits, row: int, text: RowText, token: int) -> torch.Tensor:
        """Log-probability among the tokens that the rules leave."""
        if not self.warpers.truncates and not self.warpers.edits(text.length):
            return log_softmax_at(logits.logits[row].float() / self.warpers.temperature, token)
        values = self.warpers.edited(logits.row(row), text)
        if not self.warpers.truncates:
            return log_softmax_at(torch.from_numpy(values / np.float32(self.warpers.temperature)), token)
        count = self._truncate(values)
        left = torch.from_numpy(self._scores[:count].copy())
        return log_softmax_at(left, int(np.flatnonzero(self._ids[:count] == token)[0]))

    def _truncate(self, values: NDArray[np.float32]) -> int:
        """Write the tokens that stay and their scores to `_ids` and `_scores`; how many they are."""
        if len(self._ids) < len(values):
            self._ids = np.empty(len(values), np.int32)
            self._scores = np.empty(len(values), np.float64)
        w = self.warpers
        return int(truncate_row(values, w.temperature, w.top_k, w.top_p, w.min_p, self._ids, self._scores))

    def noise_at(self, text: RowText) -> tuple[int, int, int]:
        """Key of the noise of the next token."""
        return self._seed, self._row, text.length


def prepare_sampling() -> None:
    """Compile the kernels of sampling, or load them from Numba's cache, before a request waits for them."""
    logits, text = read_logits(torch.arange(8.0)[None], 1), RowText(torch.zeros((1, 1), dtype=torch.long))
    for warpers in (Warpers(0.5), Warpers(0.5, top_k=4, top_p=0.9)):
        RandomSampler(warpers, 0).choose(logits, 0, text)


class ProcessorSampler(HostReading):
    """Any list of logits processors, called once per emitted token in order, as plain decoding calls them."""

    def __init__(
        self, processors: Any, seed: int | None, *, row: int = 0, keep_scores: bool = False, keep_raw: bool = False
    ) -> None:
        self._processors = processors
        self._seed = seed
        self._row = row
        self.scores = [] if keep_scores else None
        self.raw = [] if keep_raw else None
        self._processed = torch.empty(0)

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the argmax of, or a sample from, the processed scores (`seed` None: argmax)."""
        input_ids = text.tensor()
        raw = logits.logits[row : row + 1].to(copy=True, dtype=torch.float32, device=input_ids.device)
        scores = self._processed = self._processors(input_ids, raw)
        if self.scores is not None:
            self.scores.append(scores)
        if self.raw is not None:
            self.raw.append(raw)
        if self._seed is None:
            return int(torch.argmax(scores, dim=-1))
        host = np.ascontiguousarray(scores[0].detach().float().cpu().numpy())
        return _drawn(host, 1.0, self._seed, self._row, text.length)

    def log_prob(self, logits: PassLogits, row: int, text: RowText, token: int) -> torch.Tensor:
        """Log-probability under the processed scores, which are not computed again."""
        return log_softmax_at(self._processed[0], token)

    def noise_at(self, text: RowText) -> tuple[int, int, int] | None:
        """Key of the noise of the next token, None when the processed argmax is taken."""
        return None if self._seed is None else (self._seed, self._row, text.length)


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a walk went.

    Attributes
    ----------
    path
        (a,) int32, accepted nodes from the root down.
    emitted
        (e,) int32 tokens: the accepted ones and the bonus token (a + 1 = e). When a stop cut the run the last of them
        is the last visible token, and the path ends one node earlier.
    stopped
        Whether generation is over.
    """

    path: NDArray[np.int32]
    emitted: NDArray[np.int32]
    stopped: bool


def walk(
    tree: DraftTree,
    logits: PassLogits,
    first_row: int,
    sampler: Sampler,
    text: RowText,
    stop: Callable[[RowText, int, tuple[Any, ...] | None], bool],
    path: list[int] | None = None,
) -> Walk:
    """Follow the target's own choices down a tree, appending each to `text` (modified in place).

    `first_row` is the row of `logits` that follows the root; row `first_row + 1 + i` follows node i. Accepted nodes
    are appended to `path`, which tells how far the walk got when a processor or a criterion raises.
    """
    path = [] if path is None else path
    begun, at = text.length, ROOT
    while True:
        token = sampler.choose(logits, first_row + 1 + at, text)
        text.append(token)
        stopped = stop(text, token, tuple(sampler.scores) if sampler.scores is not None else None)
        child = ROOT if stopped or not len(tree) else find_child(tree.parent, tree.token_ids, at, token)
        if child < 0:
            return Walk(np.array(path, np.int32), text.ids[begun:].astype(np.int32), stopped)
        at = child
        path.append(child)
