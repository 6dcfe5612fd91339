"""Acceptance: the target's own tokens down a verified tree, by the walk that makes drafting lossless.

At every node the target's next token is chosen, by argmax or by a sample from its processed distribution; if a child
carries it the walk steps down, else it stops and the token is the bonus token. The choice never looks at the draft, so
the emitted text is that of plain decoding whatever was drafted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from retrieve_spec.drafting.drafter import NoiseKey
from retrieve_spec.drafting.tree import ROOT, DraftTree
from retrieve_spec.errors import DistributionError, in_a_line
from retrieve_spec.kernels.sampling import draw_row, gumbel_argmax, truncate_row
from retrieve_spec.kernels.topk import BLOCK, row_topk
from retrieve_spec.kernels.treemask import find_child

logger = logging.getLogger(__name__)


class RowText:
    """Prompt and emitted tokens of one row.

    Parameters
    ----------
    input_ids
        (1, L) long, the prompt as `generate` got it. The buffer doubles when it is full.
    """

    def __init__(self, input_ids: torch.Tensor) -> None:
        self.prompt_length = input_ids.shape[1]
        self.length = self.prompt_length
        self._device = input_ids.device
        self._tensor = torch.empty((1, self.length + 256), dtype=torch.long)
        self._tensor[:, : self.length] = input_ids
        self._ids: NDArray[np.int64] = self._tensor.numpy()[0]

    def append(self, token_id: int) -> None:
        """Add one token."""
        if self.length == len(self._ids):
            self._tensor = torch.cat([self._tensor, torch.empty_like(self._tensor)], dim=-1)
            self._ids = self._tensor.numpy()[0]
        self._ids[self.length] = token_id
        self.length += 1

    def tensor(self) -> torch.Tensor:
        """(1, length) long on the prompt's device: a view on the CPU, a copy elsewhere; read only."""
        return self._tensor[:, : self.length].to(self._device)

    @property
    def ids(self) -> NDArray[np.int64]:
        """(length,) view of all tokens; read only."""
        row: NDArray[np.int64] = self._ids[: self.length]
        return row

    @property
    def last_ids(self) -> NDArray[np.int32]:
        """(1,) copy of the last token: the root of the next pass."""
        last: NDArray[np.int32] = self._ids[self.length - 1 : self.length].astype(np.int32)
        return last

    @property
    def new_ids(self) -> NDArray[np.int64]:
        """(emitted,) view of the tokens after the prompt."""
        emitted: NDArray[np.int64] = self._ids[self.prompt_length : self.length]
        return emitted


class Stopper:
    """Applies stopping criteria to every emitted token in order, as plain decoding does.

    Length and end-of-text tokens are checked without building tensors; every other criterion is called as it is.

    Parameters
    ----------
    criteria
        What `generate` prepared: the library's own and the user's stopping criteria.
    """

    def __init__(self, criteria: Iterable[Any]) -> None:
        self.max_length: int | None = None
        self._eos: set[int] = set()
        self._others: list[Any] = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                length = math.ceil(criterion.max_length)
                self.max_length = length if self.max_length is None else min(self.max_length, length)
            elif type(criterion) is EosTokenCriteria:
                self._eos.update(int(token) for token in criterion.eos_token_id.flatten())
            else:
                self._others.append(criterion)

    def __call__(self, text: RowText, token_id: int, scores: tuple[Any, ...] | None) -> bool:
        """Whether generation ends with `token_id`, the last token of `text`."""
        stop = token_id in self._eos or (self.max_length is not None and text.length >= self.max_length)
        if self._others:
            input_ids = text.tensor()
            for criterion in self._others:  # all are called, as in plain decoding, since some count their calls
                stop = bool(torch.as_tensor(criterion(input_ids, scores)).all()) or stop
        return stop


@dataclass(slots=True)
class PassLogits:
    """Logits of one pass, read to the host only as far as needed.

    Attributes
    ----------
    logits
        (rows, vocab), on the model's device, any float dtype.
    top_ids, top_logits
        (rows, k) int32 and float32, most probable first, k >= 1; column 0 is the argmax (the
        first NaN where there is one).
    chosen
        (rows,) int32 tokens that were chosen on the device, -1 where the host chooses; None when the host chooses all.
    """

    logits: torch.Tensor
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    _host: NDArray[np.float32] | None = None
    chosen: NDArray[np.int32] | None = None

    def row(self, i: int) -> NDArray[np.float32]:
        """(vocab,) float32 logits of one row on the host."""
        row: NDArray[np.float32]
        row = self._host[i] if self._host is not None else self.logits[i].float().cpu().numpy()
        return row


def read_logits(logits: torch.Tensor, top_k: int) -> PassLogits:
    """Find the `top_k` (at least 1) largest entries of every row, with one copy from the device."""
    if logits.device.type != "cpu":
        return read_packed(logits, top_k, None)
    k = min(max(top_k, 1), logits.shape[-1])
    rows = logits if logits.dtype == torch.float32 else logits.float()
    rows = rows if rows.is_contiguous() else rows.contiguous()
    host = rows.numpy()
    ids = np.empty((len(host), k), np.int32)
    values = np.empty((len(host), k), np.float32)
    full = host.shape[1] // BLOCK
    blocks = rows if full * BLOCK == host.shape[1] else rows[:, : full * BLOCK]
    maxima = blocks.view(len(host), full, BLOCK).amax(-1).numpy() if full else host[:, :0]
    if row_topk(host, maxima, ids, values):
        _put_nan_first(host, ids)
    return PassLogits(logits, ids, values, host)


def read_side_by_side(parts: Sequence[torch.Tensor], top_k: int) -> list[PassLogits]:
    """`read_logits` of the rows of several texts, at once for those that one pass left side by side in memory."""
    found = []
    for run in _runs(parts):
        rows, vocabulary = sum(map(len, run)), run[0].shape[1]
        whole = run[0] if len(run) == 1 else run[0].as_strided((rows, vocabulary), (vocabulary, 1))
        read, first = read_logits(whole, top_k), 0
        for part in run:
            at = slice(first, first + len(part))
            host = None if read._host is None else read._host[at]
            found.append(PassLogits(part, read.top_ids[at], read.top_logits[at], host))
            first += len(part)
    return found


def _runs(parts: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group the parts that are side by side in memory."""
    runs: list[list[torch.Tensor]] = []
    for part in parts:
        if runs and _follows(part, runs[-1][-1]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _follows(part: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a part begins in memory where the one before it ends."""
    alike = part.dtype == before.dtype and part.shape[1:] == before.shape[1:]
    beside = part.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    whole = part.is_contiguous() and before.is_contiguous()
    return alike and beside and whole and part.storage_offset() == before.storage_offset() + before.numel()


def _put_nan_first(host: NDArray[np.float32], ids: NDArray[np.int32]) -> None:
    """Make the first NaN of a row its argmax, as torch does, so that a model that overflows decodes as it does
    plainly.
    """
    for r in np.flatnonzero(np.isnan(host).any(axis=1)):
        nan = int(np.isnan(host[r]).argmax())
        ids[r] = np.concatenate([[nan], ids[r][ids[r] != nan]])[: ids.shape[1]]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one, to which kernels and graphs go; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


Pack = Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]
"""`kernels.triton_topk.pack_largest`, or what does the same."""


def read_packed(logits: torch.Tensor, top_k: int, chosen: torch.Tensor | None) -> PassLogits:
    """Copy the `top_k` largest entries of every row and the tokens `chosen` (rows,) on the device at once."""
    k = min(max(top_k, 1), logits.shape[-1])
    with on_device(logits.device):
        packed = packing(logits.device.type)(logits, k, chosen).cpu().numpy()  # the only synchronisation of a step
    ids = np.ascontiguousarray(packed[:, 1 : k + 1])
    for r in np.flatnonzero(ids[:, 0] != packed[:, 0]):
        ids[r] = np.concatenate([packed[r, :1], ids[r][ids[r] != packed[r, 0]]])[:k]
    values = np.ascontiguousarray(packed[:, k + 1 : 2 * k + 1]).view(np.float32)
    return PassLogits(logits, ids, values, chosen=None if chosen is None else packed[:, -1])


@functools.cache
def packing(device: str) -> Pack:
    """Return what packs the largest entries on a kind of device: on a GPU Triton's kernels, if they equal torch's."""
    if device != "cuda":
        return _pack
    try:
        from retrieve_spec.kernels.triton_topk import pack_largest

        logits = torch.arange(5000.0, device=device).roll(700).view(2, 2500)
        if not torch.equal(pack_largest(logits, 8, logits[:, 0].long()), _pack(logits, 8, logits[:, 0].long())):
            raise ValueError("other tokens than by torch")
    except Exception as error:  # the compiler may raise anything; torch computes the same
        logger.warning("the most probable tokens are found by torch: %s", in_a_line(error))
        return _pack
    return pack_largest


def _pack(logits: torch.Tensor, k: int, chosen: torch.Tensor | None) -> torch.Tensor:
    """Do what `pack_largest` does with torch; equal logits may be in another order."""
    values, ids = torch.topk(logits, k, dim=-1)
    best = logits.argmax(dim=-1)  # ties go to the lowest id, which topk does not guarantee
    parts = [best.int()[:, None], ids.int(), values.float().view(torch.int32)]
    return torch.cat([*parts, (best if chosen is None else chosen).int()[:, None]], dim=-1)


def check_drawable(scores: NDArray[np.float32]) -> None:
    """Refuse (vocab,) scores that are no distribution, as torch's sampling does.

    Raises
    ------
    DistributionError
        One is NaN or inf, or all are -inf.
    """
    highest = scores.max()  # NaN if any score is
    if not np.isfinite(highest):
        raise DistributionError(
            "scores to sample from",
            f"{highest} as the highest of them",
            "Load the model in bfloat16 or float32, or check the logits processors.",
        )


def _drawn(scores: NDArray[np.float32], temperature: float, seed: int, row: int, position: int) -> int:
    """Draw a token from (vocab,) scores; refuse scores that are no distribution."""
    token = int(draw_row(scores, temperature, seed, row, position))
    if token < 0:
        check_drawable(scores)
    return token


class Sampler(Protocol):
    """Chooses the target's next token after one row of a pass."""

    @property
    def reads_plainly(self) -> bool:
        """Whether `read` is `read_logits`, so that rows of other texts can be read in the same call."""

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
        """() float32: log-probability of the token that `choose` has just returned, under the scores it was chosen
        by.
        """

    def noise_at(self, text: RowText) -> NoiseKey | None:
        """Return the key of the noise for the token that follows `text`; None without noise."""


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
    """Rules that are applied without building tensors: penalty, minimum length, then the others in the order of the
    fields.

    Neutral values disable them. No token of `end_ids` is allowed before the text is `min_length` tokens long.
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
        """Whether a token can become impossible because it is improbable."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def must_go_on(self, length: int) -> bool:
        """Whether a text of so many tokens may not end."""
        return length < self.min_length and len(self.end_ids) > 0

    def ends_below(self, vocabulary: int) -> list[int]:
        """Those of `end_ids` that have a score."""
        return [token for token in self.end_ids if token < vocabulary]

    def edits(self, length: int) -> bool:
        """Whether `edited` changes scores after a text of so many tokens."""
        return self.penalty != 1.0 or self.must_go_on(length)

    def edited(self, scores: NDArray[np.float32], text: RowText) -> NDArray[np.float32]:
        """(vocab,) scores after CTRL's penalty (Keskar et al., 2019) and the minimum length: a copy where they
        change.
        """
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
    """The most probable token, after a repetition penalty and a minimum length if there are any."""

    def __init__(self, warpers: Warpers | None = None) -> None:
        self.warpers = warpers or Warpers()

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the argmax of the row."""
        best = int(logits.top_ids[row, 0])
        if self.warpers.penalty == 1.0 and not (self.warpers.must_go_on(text.length) and best in self.warpers.end_ids):
            return best
        return int(self.warpers.edited(logits.row(row), text).argmax())

    def log_prob(self, logits: PassLogits, row: int, text: RowText, token: int) -> torch.Tensor:
        """Log-probability after the penalty, among the tokens that are allowed, at temperature 1."""
        if not self.warpers.edits(text.length):
            return log_softmax_at(logits.logits[row], token)
        return log_softmax_at(torch.from_numpy(self.warpers.edited(logits.row(row), text)), token)

    def noise_at(self, text: RowText) -> None:
        """Greedy decoding has no noise."""


class RandomSampler(HostReading):
    """A sample from softmax(logits) under a penalty, a minimum length, temperature, top-k, top-p and min-p.

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
        key = self.noise_at(text)
        values = self.warpers.edited(logits.row(row), text)
        if not self.warpers.truncates:
            return _drawn(values, self.warpers.temperature, *key)
        count = self._truncate(values)
        if count == 0:
            check_drawable(values)
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
        """Write the tokens that stay and their scores to `_ids` and `_scores`; return how many there are."""
        if len(self._ids) < len(values):
            self._ids = np.empty(len(values), np.int32)
            self._scores = np.empty(len(values), np.float64)
        w = self.warpers
        return int(truncate_row(values, w.temperature, w.top_k, w.top_p, w.min_p, self._ids, self._scores))

    def noise_at(self, text: RowText) -> NoiseKey:
        """Key of the noise of the next token."""
        return NoiseKey(self._seed, self._row, text.length)


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

    def noise_at(self, text: RowText) -> NoiseKey | None:
        """Key of the noise of the next token, None when the processed argmax is taken."""
        return None if self._seed is None else NoiseKey(self._seed, self._row, text.length)


@dataclass(frozen=True, slots=True)
class Walk:
    """The result of a walk.

    Attributes
    ----------
    path
        (a,) int32, accepted nodes from the root down.
    emitted
        (e,) int32 tokens: the accepted ones and the bonus token (a + 1 = e). Where a stopping criterion ended the text,
        the last of them is the last visible token, and the path ends one node earlier.
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
