"""The node budget of one pass: sequences that share it in, a draft tree for each out.

Nodes go where they are most probably accepted, over all sequences, while the pass gives more tokens per second with
them than without. As sequences become many their last tokens alone fill a pass, and drafting fades out.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.cost import CostModel

Seconds = NDArray[np.float32]


class Costs:
    """What passes cost, by the number of sequences in them and of nodes that these draft together.

    A pass in which none drafts may take another way through the model, so that its cost is no point of a line through
    those of others. Numbers of sequences within an eighth of one another share what is measured. What is not measured
    yet is taken from fewer sequences: the last token of one more costs what one more node does.

    Attributes
    ----------
    alone
        Cost of passes over one sequence.
    """

    def __init__(self) -> None:
        self.alone = CostModel()
        self._shared: dict[int, CostModel] = {}

    def of(self, sequences: int) -> CostModel:
        """Cost of passes over so many sequences."""
        if sequences == 1:
            return self.alone
        sequences = _alike(sequences)
        if sequences not in self._shared:
            fewer = max((count for count in self._shared if count < sequences), default=1)
            self._shared[sequences] = CostModel(self.of(fewer), more=sequences - fewer)
        return self._shared[sequences]


def _alike(sequences: int) -> int:
    """The least of the numbers of sequences that share what is measured: the first four binary digits of one."""
    digits = max(sequences.bit_length() - 4, 0)
    return sequences >> digits << digits


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


def pruned(tree: DraftTree, kept: NDArray[np.bool_]) -> DraftTree:
    """The nodes of a tree that are `kept`, (n,) bool; parents of kept nodes are kept."""
    if kept.all():
        return tree
    number = np.cumsum(kept, dtype=np.int32) - 1
    parts = {field.name: getattr(tree, field.name)[kept] for field in fields(tree) if field.init}
    parts["parent"] = np.where(parts["parent"] < 0, parts["parent"], number[parts["parent"]]).astype(np.int32)
    return DraftTree(**parts)


def room(sequences: int, rows: int) -> int:
    """Nodes that a pass of at most `rows` rows has room for beside the sequences' last tokens."""
    return max(min(MAX_NODES + 1, rows) - sequences, 0)
