"""Seen pass: what one pass of the model computed for a sequence's draft, and how far the target follows the draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sampling.acceptance import Sampler, Walk, walk
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.stopping import Stopper
from retrieve_spec.sampling.text import RowText
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
    begun
        Tokens of the text before the walk.
    place
        Of what the pass shows, among what the sequence's reader is shown.
    borrowed
        Another sequence ran the pass: it has left nothing in this one's cache.
    path
        Nodes that were walked, also of a walk that was cut short.
    logits
        What of the pass's was brought over, once it was looked at.
    walked
        Where the walk went, once it did.
    """

    tree: DraftTree
    output: VerifierOutput | None
    first_row: int
    begun: int
    place: int
    borrowed: bool
    path: list[int] = field(default_factory=list)
    logits: PassLogits = field(init=False)
    walked: Walk = field(init=False)

    @property
    def every_logit(self) -> torch.Tensor:
        """(rows, vocab) of the pass."""
        assert self.output is not None
        return self.output.logits

    def look(self, sampler: Sampler, text: RowText, top_k: int, read: PassLogits | None = None) -> None:
        """Bring over what the walk and the drafter need of the logits, unless they are `read` already.

        Waits for the device.
        """
        self.logits = read or sampler.read(self.every_logit, self.first_row, self.tree, text, top_k)

    def walk(self, sampler: Sampler, text: RowText, stopper: Stopper) -> None:
        """Follow the target's choices down the tree; a walk that was cut short goes on where it was."""
        self.walked = walk(self.tree, self.logits, self.first_row, sampler, text, stopper, self.path, self.begun)
