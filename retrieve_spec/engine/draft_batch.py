"""Drafts for all texts of a pass: each drafts for itself, and the nodes that pay over all of them stay.

The engine and `integrations.serving.ServingDrafter` both draft this way.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.engine.budget import Backoff, Seconds, gain, row_cost, share_evenly, share_out

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """What a pass over several texts may draft.

    Attributes
    ----------
    seconds
        (m,) seconds of the pass with 0 … m - 1 nodes; None where cost does not decide how many are drafted.
    most_nodes
        Nodes at most: of all texts together, of each in a padded pass.
    is_padded
        Whether each text takes as many rows as the widest.
    """

    seconds: Seconds | None
    most_nodes: int
    is_padded: bool = False

    def cost_of_one(self, texts: int) -> Seconds | None:
        """Return (n + 1,) seconds that 0 … n nodes of one of so many texts cost, as `row_cost` does."""
        return None if self.seconds is None else row_cost(self.seconds, texts, self.is_padded)

    def share(self, trees: Many[DraftTree]) -> list[DraftTree]:
        """Return the trees with the nodes that pay and for which there is room."""
        return (share_evenly if self.is_padded else share_out)(trees, self.seconds, self.most_nodes)


def draft_batch(
    texts: Many[T],
    budget: BatchBudget,
    draft: Callable[[T, int, Seconds | None], DraftTree],
    backoff: Backoff | None = None,
) -> list[DraftTree]:
    """Draft for texts that share a pass.

    Parameters
    ----------
    texts
        Whatever `draft` takes.
    budget
        What the pass may draft.
    draft
        Returns the tree of one text, given the most nodes it may have and their cost (`BatchBudget.cost_of_one`).
    backoff
        Decides whether the pass drafts, and for which texts; it learns whether that paid. None drafts for all.

    Returns
    -------
    list of DraftTree
        One for each text.
    """
    if backoff is not None and backoff.rests():
        return [NO_DRAFT] * len(texts)
    began = perf_counter()
    cost = budget.cost_of_one(len(texts))
    asked = range(len(texts)) if backoff is None else backoff.sample(range(len(texts)))
    trees = [NO_DRAFT] * len(texts)
    for i in asked:
        trees[i] = draft(texts[i], budget.most_nodes, cost)
    trees = budget.share(trees)
    if backoff is not None and budget.seconds is not None:
        took = perf_counter() - began
        pays = gain(trees, budget.seconds, budget.is_padded) > took
        backoff.record_draft(pays, took / float(budget.seconds[0]))
    return trees
