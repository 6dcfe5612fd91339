"""Seen pass: what one pass of the model computed for a sequence's draft, and how far the target follows the draft."""

from __future__ import annotations

import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.sampling.acceptance import Sampler, Walk, walk
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.stopping import Stopper
from retrieve_spec.sampling.text import RowText
from retrieve_spec.verify.verifier import VerifierOutput


class SeenPass:
    """One pass, as one sequence sees it.

    Parameters
    ----------
    tree
        What was drafted.
    output
        What the model computed.
    first_row
        Row of it that follows the root.
    begun
        Tokens of the text before the walk.
    place
        Of what the pass shows, among what the sequence's reader is shown.
    borrowed
        Another sequence ran the pass: it has left nothing in this one's cache.

    Attributes
    ----------
    path
        Nodes that were walked, also of a walk that was cut short.
    """

    __slots__ = ("_begun", "_logits", "_walked", "borrowed", "first_row", "output", "path", "place", "tree")

    def __init__(
        self, tree: DraftTree, output: VerifierOutput, first_row: int, begun: int, place: int, borrowed: bool
    ) -> None:
        self.tree, self.first_row, self.place, self.borrowed = tree, first_row, place, borrowed
        self.output: VerifierOutput | None = output
        self.path: list[int] = []
        self._begun = begun
        self._logits: PassLogits | None = None
        self._walked: Walk | None = None

    @property
    def every_logit(self) -> torch.Tensor:
        """(rows, vocab) of the pass."""
        assert self.output is not None
        return self.output.logits

    @property
    def logits(self) -> PassLogits:
        """What of them was brought over."""
        assert self._logits is not None
        return self._logits

    @property
    def walked(self) -> Walk:
        """Where the walk went."""
        assert self._walked is not None
        return self._walked

    def look(self, sampler: Sampler, text: RowText, top_k: int, read: PassLogits | None = None) -> None:
        """Bring over what the walk and the drafter need of the logits, unless they are `read` already.

        Waits for the device.
        """
        if read is None:
            read = sampler.read(self.every_logit, self.first_row, self.tree, text, top_k)
        self._logits = read

    def walk(self, sampler: Sampler, text: RowText, stopper: Stopper) -> None:
        """Follow the target's choices down the tree; a walk that was cut short goes on where it was."""
        self._walked = walk(self.tree, self.logits, self.first_row, sampler, text, stopper, self.path, self._begun)
