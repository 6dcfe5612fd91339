"""Seen pass: what one pass of the model computed for a sequence's draft, and how far the target follows the draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sampling.acceptance import Walk
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.verify.verifier import VerifierOutput


@dataclass(slots=True)
class SeenPass:
    """One pass, as one sequence sees it.

    Attributes
    ----------
    tree
        What was drafted.
    output
        What the model computed; None once it was learned from.
    first_row
        Row of it that follows the root.
    is_committed
        Whether the cache keeps what it keeps of the pass; there is nothing to keep before the first one.
    path
        Nodes that were walked, also of a walk that failed.
    logits
        What of the pass's was brought over, once it was.
    walked
        Where the walk went, once it did.
    """

    tree: DraftTree
    output: VerifierOutput | None = None
    first_row: int = 0
    is_committed: bool = True
    path: list[int] = field(default_factory=list)
    logits: PassLogits = field(init=False)
    walked: Walk = field(init=False)

    @property
    def every_logit(self) -> torch.Tensor:
        """(rows, vocab) of the pass."""
        assert self.output is not None
        return self.output.logits
