"""Node budget of one pass: a draft tree for each of the sequences that share it.

Nodes go where they are most probably accepted, over all sequences, while the pass gives more tokens per second with
them than without. As sequences become many their last tokens alone fill a pass, and drafting fades out. The rows of one
call are waited for together, so that a token of the one that will end last is worth most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree

Seconds = NDArray[np.float32]
_DOUBT = 4.0
"""Passes of one token each that a sequence is taken to have behind it, so that a few passes say little of its pace."""
_LOOKS = 8
"""Looks at the same few sequences of many before others are looked at."""
_LOSS, _MOST_RESTS = 0.02, 64
"""Share of the passes' time that looks which find nothing may take, and passes without a look at most."""
_IMPATIENCE = 4.0
"""How much more a row counts that needs more passes to its end: this power of their number."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sequence is.

    Attributes
    ----------
    call
        Names the call whose rows are waited for together, None where it is waited for alone.
    left
        Tokens it may still write.
    written, passes
        Tokens it wrote, in so many passes.
    """

    call: str | None
    left: int
    written: int
    passes: int


def worth(progress: Many[Progress], seconds: Seconds | None) -> NDArray[np.float64]:
    """(sequences,) what one more token of each is worth, 1 on average; `seconds` are those of `share_out`.

    A token saves its sequence a place in one pass. Where it brings the end of a whole call nearer it saves a part of
    what passes cost anyway, too: of the rows of one call those count that will probably be the last.
    """
    count = len(progress)
    share = np.full(count, 1.0 / max(count, 1))
    if seconds is None or count < 2:
        return share * count
    passes_left = np.array([max(p.left, 1) * (p.passes + _DOUBT) / (p.written + _DOUBT) for p in progress])
    for call in {p.call for p in progress if p.call is not None}:
        rows = np.array([p.call == call for p in progress])
        late = (passes_left[rows] / passes_left[rows].max()) ** _IMPATIENCE
        share[rows] = late * (share[rows].sum() / late.sum())
    place = min(float(seconds[min(count, len(seconds) - 1)] - seconds[0]) / float(seconds[0]), 1.0) / count
    return count * (place + (1.0 - count * place) * share)


def row_cost(seconds: Seconds, sequences: int, padded: bool = False) -> Seconds:
    """(n + 1,) seconds that 0 … n nodes of one sequence cost, its share of what the pass costs anyway included.

    `seconds` are those of passes over all sequences and 0 … 256 nodes. The others are taken to draft nothing: what that
    promises too much `share_out` takes back. In a `padded` pass each of them gets as many.
    """
    if sequences == 1:
        return seconds
    if padded:
        each: Seconds = (seconds[::sequences] / sequences).astype(np.float32)
        return each
    others: Seconds = (seconds + float(seconds[0]) * (1.0 / sequences - 1.0)).astype(np.float32)
    return others


def share_out(
    trees: Many[DraftTree], seconds: Seconds | None, most: int, worths: NDArray[np.float64]
) -> list[DraftTree]:
    """Keep the nodes that one pass has room for and that pay, the most probable ones of all trees first.

    Parameters
    ----------
    trees
        What the sequences would draft.
    seconds
        (m,) seconds of a pass with 0 … m - 1 nodes; None keeps all there is room for.
    most
        Nodes at most.
    worths
        (sequences,) what a token of each is worth.
    """
    sizes = [len(tree) for tree in trees]
    total, sequences = sum(sizes), len(trees)
    if sequences == 1 or total == 0 or (seconds is None and total <= most):
        return list(trees)
    p = np.exp(np.concatenate([tree.log_p for tree in trees]), dtype=np.float64) * np.repeat(worths, sizes)
    order = np.argsort(-p, kind="stable")[:most]
    count = len(order)
    if seconds is not None:
        gained = worths.sum() + np.concatenate([[0.0], np.cumsum(p[order])])
        count = int(np.argmax(gained / seconds[: len(order) + 1]))
    if count == total:
        return list(trees)
    kept = np.zeros(total, np.bool_)
    kept[order[:count]] = True
    return [pruned(tree, part) for tree, part in zip(trees, np.split(kept, np.cumsum(sizes)[:-1]), strict=True)]


def share_evenly(
    trees: Many[DraftTree], seconds: Seconds | None, most: int, worths: NDArray[np.float64]
) -> list[DraftTree]:
    """Keep as many nodes of every tree as pay in a pass that is padded to the largest, its most probable ones first.

    Arguments are those of `share_out`; `most` is for each tree.
    """
    sequences = len(trees)
    widest = min(max((len(tree) for tree in trees), default=0), most)
    orders = [np.argsort(-tree.log_p, kind="stable") for tree in trees]
    if seconds is not None and widest:
        widest = min(widest, (len(seconds) - 1) // sequences)
        gained = np.full(widest + 1, worths.sum())
        for tree, order, value in zip(trees, orders, worths, strict=True):
            gains = value * np.cumsum(np.exp(tree.log_p[order[:widest]], dtype=np.float64))
            gained[1:] += np.pad(gains, (0, widest - len(gains)), "edge") if len(gains) else 0.0
        widest = int(np.argmax(gained / seconds[::sequences][: widest + 1]))
    kept = []
    for tree, order in zip(trees, orders, strict=True):
        stays = np.zeros(len(tree), np.bool_)
        stays[order[:widest]] = True
        kept.append(pruned(tree, stays))
    return kept


def keep_best(tree: DraftTree, seconds: Seconds | None, most: int) -> DraftTree:
    """The nodes of a sequence's own tree that pay, most probable first; `seconds` and `most` as for `share_evenly`."""
    return share_evenly([tree], seconds, most, np.ones(1))[0]


def gain(trees: Many[DraftTree], seconds: Seconds, worths: NDArray[np.float64], padded: bool) -> float:
    """Seconds of plain passes that verifying these trees is expected to save, less what it costs."""
    sizes = [len(tree) for tree in trees]
    nodes = len(trees) * max(sizes) if padded else sum(sizes)
    hoped = sum(value * tree.expected_accepted for tree, value in zip(trees, worths, strict=True))
    total: float = worths.sum()
    saved: float = float(seconds[0]) * (total + hoped) / total
    return saved - float(seconds[min(nodes, len(seconds) - 1)])


class Backoff:
    """Passes over several sequences without drafts, the more the longer drafting has not paid.

    Looking for drafts takes time, too: where many are sampled at a high temperature it is all that drafting would do.
    Until drafting has paid, a few of many sequences are asked in place of all.

    Parameters
    ----------
    longest
        Passes until drafts are looked for again, at most, where looks are cheap. Where they are not, rests double.
    few
        How many are asked where more share passes.
    patience
        Looks in a row that find nothing before the first rest is thought of.
    """

    def __init__(self, longest: int = 8, few: int = 8, patience: int = 0) -> None:
        self._longest, self._few, self._patience = longest, few, patience
        self._left = self._misses = self._looks = 0
        self._pays = False

    def rests(self) -> bool:
        """Whether the next pass goes without drafts; to be asked once a pass."""
        rests = self._left > 0
        self._left -= rests
        return rests

    def looked(self, pays: bool, share: float = 0.0) -> None:
        """Be told whether the drafts that were looked for pay, and what `share` of a plain pass the look took."""
        self._pays = pays
        self._misses = 0 if pays else self._misses + 1
        misses = max(self._misses - self._patience, 0)
        if share < _LOSS:
            self._left = min(misses // 2, self._longest)
        else:
            longest = max(self._longest, min(math.ceil(share / _LOSS), _MOST_RESTS))
            self._left = min((1 << min(misses, _MOST_RESTS)) // 4, longest)

    def samples(self, sequences: int) -> bool:
        """Whether some of so many sequences are asked in place of all."""
        return sequences > self._few and not self._pays

    def sample(self, batch: list[Any]) -> list[Any]:
        """Those of a batch to ask for drafts: neighbours, who may be siblings, and others after a few looks."""
        if not self.samples(len(batch)):
            return batch
        self._looks += 1
        first = self._looks // _LOOKS % (len(batch) // self._few) * self._few
        return batch[first : first + self._few]


def within(tree: DraftTree, vocabulary: int) -> DraftTree:
    """The nodes of a tree that a model of so many tokens can read, without those behind others."""
    kept = tree.token_ids.astype(np.uint32) < vocabulary  # one that is negative is no token either
    return pruned(tree, kept)


def pruned(tree: DraftTree, kept: NDArray[np.bool_]) -> DraftTree:
    """The nodes of a tree that are `kept`, (n,) bool, without those behind others: drafters may hope more of these."""
    count = int(kept.sum())
    if kept[:count].all():
        return tree if count == len(tree) else tree.first(count)
    while (orphans := kept & (tree.parent >= 0) & ~kept[tree.parent]).any():
        kept = kept & ~orphans
    number = np.cumsum(kept, dtype=np.int32) - 1
    left = tree.nodes(kept)
    left.parent = np.where(left.parent < 0, left.parent, number[left.parent]).astype(np.int32)
    return left
