"""Budget of a pass, by the times of past ones: its cost T(n, L), its threads, and which nodes of all in it pay."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from operator import itemgetter
from statistics import median
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.calibration import learn_passes
from retrieve_spec.openmp import libgomp_of

_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NODE_KNOTS = np.array(_KNOTS)
_FIRST_CONTEXT = 7  # contexts up to 2**7 tokens share a bucket, then one bucket per factor of two
_CONTEXTS = 16
_REBUILD = 8  # passes between two rebuilds of a curve

_BALANCE, _MOST_BALANCE = 64.0, 4096.0
"""Nodes that cost as much as a plain pass: before anything is measured, and at most."""
_UNSURE = 1.5
"""Standard deviation of that number's logarithm."""
_NOISE = 0.12**2
"""Variance of the logarithm of one pass's time before it is measured."""
_NOISE_RULE = np.array([0.05, 0.05**2, 2.5])
"""How fast it is learned, the least it can be, and standard deviations beyond which a slow pass counts no further."""
_SPEED = 0.15**2
"""Variance by which the machine's speed changes from pass to pass."""
_MEMORY = 0.5 ** (1.0 / 512)
"""How much of what was measured is still believed a pass later."""
_FIRST_PLAIN, _FIRST_EVERY, _PLAIN_EVERY = 4, 8, 256
"""Plain passes that are wanted to learn their cost: so many after every eighth pass with drafts, then one in 256."""


class CostModel:
    """Seconds per pass by number of nodes and context length, learned from passes as they happen.

    A Kalman filter for each bucket of contexts follows the logarithm of a plain pass's time and its steps to 1, 2, 4 …
    1024 nodes. The machine's speed may change at any time and moves all widths together: a width that was not tried
    lately stays as much slower than the others as it was. The steps are taken to have one steepness, so that small
    widths say what to expect of wide ones. A pass far slower than expected counts as a slow one only, so that a hiccup
    of the machine does not switch drafting off. What is not measured again is forgotten, half of it in 512 passes: a
    width that was measured beside other load is not avoided for good. Contexts never seen begin with what is known of
    the nearest one.

    Parameters
    ----------
    known
        A model of passes of another kind to begin with; what it learned counts, but less surely.
    more
        Rows that every pass has beside those that `known` was learned from.
    """

    def __init__(self, known: CostModel | None = None, more: int = 0) -> None:
        self._filters: dict[int, _Filter] = {}
        self._balance: float = _BALANCE if known is None else known._balance + more
        self._passes = 0
        if known is not None:
            known._take_in()
            self._filters = {row: filter_.elsewhere(more) for row, filter_ in known._filters.items()}
        self._pending: list[tuple[int, int, float]] = []
        self._curves: dict[int, NDArray[np.float32]] = {}
        self._plain = self._drafted_since = 0  # plain passes observed, and others since the last of them

    @property
    def needs_plain_pass(self) -> bool:
        """Whether to take a plain pass, to learn its cost: an engine may run it in another way than all others."""
        return self._drafted_since >= (_FIRST_EVERY if self._plain < _FIRST_PLAIN else _PLAIN_EVERY)

    @property
    def measured(self) -> bool:
        """Whether anything has been observed."""
        return bool(self._filters or self._pending)

    def begin(self, context: int, seconds: Mapping[int, float]) -> None:
        """Begin with the seconds of passes over a few numbers of nodes, 0 among them, after `context` tokens.

        How the widest compares says what still wider ones may cost.
        """
        if widest := max(seconds):
            self._balance = widest / max(seconds[widest] / seconds[0] - 1.0, widest / _MOST_BALANCE)
        for nodes, took in seconds.items():
            self.observe(nodes, context, took)

    def observe(self, nodes: int, context: int, seconds: float) -> None:
        """Learn from one pass over `nodes` nodes after `context` tokens (taken in when a curve is next rebuilt)."""
        self._pending.append((nodes, context, seconds))
        self._plain += nodes == 0
        self._drafted_since = self._drafted_since + 1 if nodes else 0

    def seconds(self, context: int, max_nodes: int) -> NDArray[np.float32]:
        """(max_nodes + 1,) float32: seconds of a step with 0 … max_nodes nodes, the loop's own time included.

        Before anything was measured a plain pass takes a second: only ratios matter.
        """
        if len(self._pending) >= min(_REBUILD, 1 + self._passes // _REBUILD):
            self._take_in()
        row = _bucket(context)
        curve = self._curves.get(row)
        if curve is None:
            curve = self._curves[row] = self._filter(row).curve().astype(np.float32)
        return curve[: max_nodes + 1]

    def _take_in(self) -> None:
        """Learn from the passes seen since the last time."""
        buckets = [(_bucket(context), nodes, seconds) for nodes, context, seconds in self._pending]
        for row, passes in itertools.groupby(buckets, itemgetter(0)):
            filter_ = self._filters[row] = self._filter(row)
            filter_.learn(*zip(*[(nodes, seconds) for _, nodes, seconds in passes], strict=True))
        self._passes += len(self._pending)
        self._pending.clear()
        self._curves.clear()

    def _filter(self, row: int) -> _Filter:
        """Return the filter of a context bucket; a new one starts from the nearest bucket's, less certain."""
        known = self._filters.get(row)
        if known is not None:
            return known
        nearest = min(self._filters, key=lambda other: abs(other - row), default=None)
        return _Filter(self._balance) if nearest is None else self._filters[nearest].elsewhere()


class _Filter:
    """Mean and covariance of (log T(0), steps of log T from knot to knot) at contexts of about one length.

    To begin with, and where it is forgotten, T(n) is 1 + n / `balance` times T(0).
    """

    def __init__(self, balance: float = _BALANCE) -> None:
        self.balance, ratio = balance, NODE_KNOTS / balance
        self._usual = np.diff(np.log1p(ratio))
        self.mean = np.append(0.0, self._usual)
        steepness = _UNSURE * np.diff(ratio / (1.0 + ratio))
        self._first = np.diag(np.append(100.0, (0.1 + 0.3 * self._usual) ** 2))  # nothing is known about the speed
        self._first[1:, 1:] += np.outer(steepness, steepness)
        self.covariance = self._first.copy()
        self.noise = np.array([_NOISE])

    def elsewhere(self, more: int = 0) -> _Filter:
        """Return a filter for passes of another kind: over another context, or with `more` rows that are no nodes."""
        other = _Filter(self.balance + more)
        other.mean = self._with_more_rows(more) if more else self.mean.copy()
        other.noise[:] = self.noise
        other.covariance = self.covariance + 0.1 * other._first
        return other

    def learn(self, nodes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        """Learn from passes, by what each drafted and took."""
        growth = (1.0 - _MEMORY**2) * self._first
        growth[0, 0] = _SPEED
        learn_passes(
            self.mean,
            self.covariance,
            self.noise,
            NODE_KNOTS,
            self._usual,
            _MEMORY,
            growth,
            _NOISE_RULE,
            np.array(nodes, np.int64),
            np.array(seconds, np.float64),
        )

    def _with_more_rows(self, more: int) -> NDArray[np.float64]:
        """Return the mean where `more` rows cost as much as nodes, extrapolated linearly beyond the widest knot."""
        seconds, rows = np.exp(np.cumsum(self.mean)), NODE_KNOTS + more
        slope = max(seconds[-1] - seconds[-2], 0.0) / (_KNOTS[-1] - _KNOTS[-2])
        levels = np.log(np.interp(rows, _KNOTS, seconds) + slope * np.maximum(rows - MAX_NODES, 0))
        return np.diff(levels, prepend=0.0)

    def curve(self) -> NDArray[np.float64]:
        """(MAX_NODES + 1,) seconds of a step, non-decreasing."""
        knots = np.exp(_non_decreasing(np.cumsum(self.mean), np.cumsum(self.covariance, 0).cumsum(1).diagonal()))
        return np.interp(np.arange(MAX_NODES + 1), _KNOTS, knots)


def _bucket(context: int) -> int:
    return min(max((context - 1).bit_length() - _FIRST_CONTEXT, 0), _CONTEXTS - 1)


def _non_decreasing(values: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-decreasing weighted least-squares fit (pool adjacent violators; Ayer et al., 1955)."""
    sums: list[float] = []
    weights: list[float] = []
    counts: list[int] = []
    for value, variance in zip(values.tolist(), variances.tolist(), strict=True):
        sums.append(value / variance)
        weights.append(1.0 / variance)
        counts.append(1)
        while len(sums) > 1 and sums[-2] / weights[-2] > sums[-1] / weights[-1]:
            total, weight, count = sums.pop(), weights.pop(), counts.pop()
            sums[-1] += total
            weights[-1] += weight
            counts[-1] += count
    return np.repeat([s / w for s, w in zip(sums, weights, strict=True)], counts)


_PAIRS = 3
"""Passes with either number of threads that one comparison takes."""
_HOPELESS = 0.25
"""Logarithm of the ratio of two times from which one pair of passes is enough to give up on the other number."""
_PLAIN = 1.0
"""… from which one pair is enough to take it: a pass that waited for a taken core."""
_WORTH = 0.05
"""Logarithm of the ratio of two times that a change must gain."""
_FIRST_TRIAL, _NEXT_TRIAL, _LAST_TRIAL = 2, 64, 1024
"""Passes before the first comparison, after a change, and at most while nothing changes (doubled each time)."""
_TOLERATED, _ALARM = 0.15, 1.0
"""How much slower than expected a pass may be (logarithm), and the sum of what exceeds it that calls for a comparison.
"""
_SHARE = 1 / 32
"""Of the time of all passes, how much trials of more threads may lose: one pass that waits for a taken core can take as
long as a whole answer."""


class PassThreads:
    """How many threads passes use: the setting of the user, or fewer where passes turn out to be faster so.

    The number in use is compared with the user's setting, half of it, a quarter … in turn, pass by pass, so that a
    machine whose speed drifts favours neither; now and then, and at once when passes become slow.

    Parameters
    ----------
    most
        Threads at most: the user's setting. With 1 there is nothing to choose.
    set_threads, get_threads
        Set the number for the calling thread alone (OpenMP's own; `torch.set_num_threads` would reach every thread
        that computes for the first time meanwhile, and all of MKL for good), and tell the user's setting.

    Attributes
    ----------
    chosen
        Threads of the next pass unless it is one of a comparison.
    """

    def __init__(
        self, most: int, set_threads: Callable[[int], object] = bool, get_threads: Callable[[], int] = int
    ) -> None:
        self._set, self._get = set_threads, get_threads
        self._begin_with(most)

    def _begin_with(self, most: int) -> None:
        """Begin with the user's setting; nothing is known of fewer threads."""
        self.most = self.chosen = self._challenged = max(most, 1)
        self._numbers = [self.most >> i for i in range(self.most.bit_length())]
        self._other = 0  # number that `chosen` is compared with; 0 without a comparison
        self._scores: dict[int, list[float]] = {}
        self._times: dict[int, float] = {}  # of the passes of this comparison
        self._spent = 0.0  # by all passes
        self._not_before: dict[int, float] = {}  # by number of threads: earliest next trial, in time spent
        self._wait = self._interval = _FIRST_TRIAL
        self._excess = 0.0

    @property
    def comparing(self) -> bool:
        """Whether the next pass is one of a comparison: its time does not predict later ones."""
        return self._other != 0

    @property
    def next(self) -> int:
        """Threads of the next pass."""
        if self._other and len(self._scores[self._other]) <= len(self._scores[self.chosen]):
            return self._other
        return self.chosen

    @classmethod
    def of_torch(cls) -> Self | None:
        """The choice for passes on this machine's cores; None where torch's OpenMP runtime cannot be asked."""
        import torch  # imported here, since drafters inside other engines run without torch

        library, get_threads = libgomp_of(os.path.dirname(torch.__file__)), torch.get_num_threads
        return None if library is None else cls(get_threads(), library.omp_set_num_threads, get_threads)

    @contextlib.contextmanager
    def used(self, spare: int = 0) -> Iterator[None]:
        """Run passes of this thread with `next` threads; afterwards it has the user's setting again.

        So many threads as `spare` are left to another process: OpenMP's threads, which wait for one another, would take
        its time.
        """
        before = self._get()
        if before != self.most:  # the user has changed the setting
            self._begin_with(before)
        number = max(self.next - spare, 1)
        if number == before:
            yield
            return
        try:
            self._set(number)
            yield
        finally:  # even if Ctrl-C comes directly after setting it
            self._set(before)

    def observe(self, seconds: float, expected: float) -> None:
        """Learn from the pass that ran with `next` threads.

        Parameters
        ----------
        seconds
            What it took.
        expected
            What a pass of its width and context was expected to take (any unit, the same from pass to pass).
        """
        if self.most == 1:
            return
        score = math.log(max(seconds, 1e-9) / max(expected, 1e-9))
        self._spent += seconds
        if self._other:
            self._compare(score, seconds)
            return
        self._wait -= 1
        self._excess = max(0.0, self._excess + min(score, 3 * _TOLERATED) - _TOLERATED)
        if self._wait <= 0 or self._excess > _ALARM:
            self._begin(self._challenger())

    def _challenger(self) -> int:
        """What to compare with: the other numbers in turn, the next smaller one first; 0 where none may be tried yet.

        Fewer threads may always be: they lose little, and are the way out when a core is taken.
        """
        place = self._numbers.index(self._challenged) + 1
        for number in self._numbers[place:] + self._numbers[:place]:
            allowed = number < self.chosen or self._spent >= self._not_before.get(number, 0.0)
            if number != self.chosen and allowed:
                self._challenged = number
                return number
        return 0

    def _begin(self, other: int) -> None:
        """Begin a comparison with another number, if there is one."""
        self._other, self._excess = other, 0.0
        self._wait = self._interval
        self._scores = {other: [], self.chosen: []}
        self._times = dict.fromkeys(self._scores, 0.0)

    def _compare(self, score: float, seconds: float) -> None:
        """Record one pass of a comparison, and end the comparison once it is decided."""
        self._times[self.next] += seconds
        self._scores[self.next].append(score)
        others, own = self._scores[self._other], self._scores[self.chosen]
        if len(own) < len(others):
            return
        gain = median(b - a for a, b in zip(others, own, strict=True))
        if len(own) < _PAIRS and -_HOPELESS < gain < _PLAIN:
            return
        lost = self._times[self._other] - self._times[self.chosen]
        changed = gain > _WORTH
        self._not_before[self.chosen if changed else self._other] = self._spent + abs(lost) / _SHARE
        if changed:
            self.chosen = self._other
        self._other, self._scores = 0, {}
        self._interval = self._wait = _NEXT_TRIAL if changed else min(max(2 * self._interval, _NEXT_TRIAL), _LAST_TRIAL)


def using(threads: PassThreads | None, spare: int = 0) -> contextlib.AbstractContextManager[None]:
    """`PassThreads.used`; where there is nothing to choose, nothing changes."""
    return contextlib.nullcontext() if threads is None else threads.used(spare)


class Costs:
    """What passes cost, by the number of sequences in them and of nodes that these draft together.

    A pass in which none drafts may take another way through the model, so that its cost is no point of a line through
    those of others. Numbers of sequences within an eighth of one another share what is measured. What is not measured
    yet is taken from fewer sequences: the last token of one more costs what one more node does.
    """

    def __init__(self) -> None:
        self._models = {1: CostModel()}  # by sequences

    def of(self, sequences: int) -> CostModel:
        """Cost of passes over so many sequences."""
        digits = max(sequences.bit_length() - 4, 0)  # numbers with the same first four bits share a model
        sequences = sequences >> digits << digits
        if sequences not in self._models:
            fewer = max(count for count in self._models if count < sequences)
            self._models[sequences] = CostModel(self._models[fewer], more=sequences - fewer)
        return self._models[sequences]

    def doubt(self) -> None:
        """Make all costs less certain: passes run in another way from now on."""
        self._models = {sequences: CostModel(model) for sequences, model in self._models.items()}

    def seconds(self, sequences: int, context: int) -> NDArray[np.float32]:
        """(MAX_NODES + 1,) seconds of a step over so many sequences with 0 … MAX_NODES nodes."""
        return self.of(sequences).seconds(context, MAX_NODES)

    def expected(self, sequences: int, nodes: int, context: int) -> float:
        """Seconds of a step over so many sequences and drafted nodes."""
        return float(self.seconds(sequences, context)[min(nodes, MAX_NODES)])

    def learn(
        self, sequences: int, nodes: int, context: int, seconds: float, threads: PassThreads | None = None
    ) -> None:
        """Learn from a step, and let `threads` learn from it: a pass that they tried says nothing of passes to come.

        Parameters
        ----------
        sequences
            How many it served.
        nodes
            Rows of its pass beyond a last token of each, padding included.
        context
            Tokens in front, of all sequences.
        seconds
            What it took, from drafts to what was learned.
        threads
            What chose how many threads it used; None where nothing is chosen.
        """
        if threads is not None and threads.most > 1:
            is_trial, chosen = threads.comparing, threads.chosen
            threads.observe(seconds, self.expected(sequences, nodes, context))
            if threads.chosen != chosen:
                self.doubt()
            if is_trial:
                return
        self.of(sequences).observe(nodes, context, seconds)


Seconds = NDArray[np.float32]
T = TypeVar("T")
_SAME_FEW = 8
"""Passes in which the same few sequences of many draft before others do."""
_LOSS, _MOST_RESTS = 0.02, 64
"""Share of the passes' time that drafting may take without paying, and passes without drafts in a row at most."""


def row_cost(seconds: Seconds, sequences: int, padded: bool = False) -> Seconds:
    """Return (n + 1,) seconds of 0 … n nodes of one sequence, with its share of a plain pass.

    `seconds` are those of passes over all sequences with 0 … n nodes. The other sequences are assumed to draft nothing;
    where they do, `share_out` keeps fewer nodes of all trees. In a `padded` pass every sequence gets as many nodes.
    """
    if sequences == 1:
        return seconds
    if padded:
        each: Seconds = (seconds[::sequences] / sequences).astype(np.float32)
        return each
    others: Seconds = (seconds + float(seconds[0]) * (1.0 / sequences - 1.0)).astype(np.float32)
    return others


def share_out(trees: Many[DraftTree], seconds: Seconds | None, most: int) -> list[DraftTree]:
    """Keep the nodes that one pass has room for and that pay, the most probable ones of all trees first.

    Parameters
    ----------
    trees
        What the sequences would draft.
    seconds
        (m,) seconds of a pass with 0 … m - 1 nodes; None keeps all there is room for.
    most
        Nodes at most.
    """
    sizes = [len(tree) for tree in trees]
    total, sequences = sum(sizes), len(trees)
    if sequences == 1 or total == 0 or (seconds is None and total <= most):
        return list(trees)
    p = np.exp(np.concatenate([tree.log_p for tree in trees]), dtype=np.float64)
    order = np.argsort(-p, kind="stable")[:most]
    count = len(order)
    if seconds is not None:
        gained = sequences + np.concatenate([[0.0], np.cumsum(p[order])])
        count = int(np.argmax(gained / seconds[: len(order) + 1]))
    if count == total:
        return list(trees)
    kept = np.zeros(total, np.bool_)
    kept[order[:count]] = True
    return [pruned(tree, part) for tree, part in zip(trees, np.split(kept, np.cumsum(sizes)[:-1]), strict=True)]


def share_evenly(trees: Many[DraftTree], seconds: Seconds | None, most: int) -> list[DraftTree]:
    """Keep as many nodes of every tree as pay in a pass that is padded to the largest, its most probable ones first.

    Arguments are those of `share_out`; `most` is for each tree.
    """
    sequences = len(trees)
    widest = min(max((len(tree) for tree in trees), default=0), most)
    orders = [np.argsort(-tree.log_p, kind="stable") for tree in trees]
    if seconds is not None and widest:
        widest = min(widest, (len(seconds) - 1) // sequences)
        gained = np.full(widest + 1, float(sequences))
        for tree, order in zip(trees, orders, strict=True):
            gains = np.cumsum(np.exp(tree.log_p[order[:widest]], dtype=np.float64))
            gained[1:] += np.pad(gains, (0, widest - len(gains)), "edge") if len(gains) else 0.0
        widest = int(np.argmax(gained / seconds[::sequences][: widest + 1]))
    kept = []
    for tree, order in zip(trees, orders, strict=True):
        stays = np.zeros(len(tree), np.bool_)
        stays[order[:widest]] = True
        kept.append(pruned(tree, stays))
    return kept


def keep_best(tree: DraftTree, seconds: Seconds | None, most: int) -> DraftTree:
    """Return the nodes of one tree that pay, most probable first; `seconds` and `most` as for `share_evenly`."""
    return share_evenly([tree], seconds, most)[0]


def gain(trees: Many[DraftTree], seconds: Seconds, padded: bool) -> float:
    """Seconds of plain passes that verifying these trees is expected to save, less what it costs."""
    sizes = [len(tree) for tree in trees]
    nodes = len(trees) * max(sizes) if padded else sum(sizes)
    tokens = len(trees) + sum(tree.expected_accepted for tree in trees)
    saved: float = float(seconds[0]) * tokens / len(trees)
    return saved - float(seconds[min(nodes, len(seconds) - 1)])


class Backoff:
    """Decides which passes go without drafts: the longer drafting has not paid, the more.

    Drafting takes time even when it finds nothing, as for many sequences that are sampled at a high temperature. Until
    it has paid, only a few of many sequences draft.

    Parameters
    ----------
    longest
        Passes without drafts in a row, at most, where drafting is cheap. Where it is not, their number doubles.
    few
        Sequences that draft, of more that share passes.
    patience
        Drafts in a row that do not pay before the first pass without.
    """

    def __init__(self, longest: int = 8, few: int = 8, patience: int = 0) -> None:
        self._longest, self._few, self._patience = longest, few, patience
        self._left = self._misses = self._sampled = 0
        self._pays = False

    def rests(self) -> bool:
        """Whether the next pass goes without drafts; call it once a pass."""
        rests = self._left > 0
        self._left -= rests
        return rests

    def record_draft(self, pays: bool, share: float = 0.0) -> None:
        """Record whether drafting paid, and the `share` of a plain pass's time that it took."""
        self._pays = pays
        self._misses = 0 if pays else self._misses + 1
        misses = max(self._misses - self._patience, 0)
        if share < _LOSS:
            self._left = min(misses // 2, self._longest)
        else:
            longest = max(self._longest, min(math.ceil(share / _LOSS), _MOST_RESTS))
            self._left = min((1 << min(misses, _MOST_RESTS)) // 4, longest)

    def samples(self, sequences: int) -> bool:
        """Whether only a few of so many sequences draft."""
        return sequences > self._few and not self._pays

    def sample(self, batch: Many[T]) -> Many[T]:
        """Return the sequences of a batch that draft: neighbours, which may be siblings; others after a few passes."""
        if not self.samples(len(batch)):
            return batch
        self._sampled += 1
        first = self._sampled // _SAME_FEW % (len(batch) // self._few) * self._few
        return batch[first : first + self._few]


def within(tree: DraftTree, vocabulary: int) -> DraftTree:
    """Return the nodes of a tree whose tokens, and whose ancestors' tokens, a model of so many tokens has."""
    kept = tree.token_ids.astype(np.uint32) < vocabulary  # also excludes negative ids
    return pruned(tree, kept)


def pruned(tree: DraftTree, kept: NDArray[np.bool_]) -> DraftTree:
    """Return the nodes of a tree that are `kept`, (n,) bool, and whose ancestors are: a child may be rated higher."""
    count = int(kept.sum())
    if kept[:count].all():
        return tree if count == len(tree) else tree.first(count)
    while (orphans := kept & (tree.parent >= 0) & ~kept[tree.parent]).any():
        kept = kept & ~orphans
    number = np.cumsum(kept, dtype=np.int32) - 1
    left = tree.nodes(kept)
    left.parent = np.where(left.parent < 0, left.parent, number[left.parent]).astype(np.int32)
    return left
