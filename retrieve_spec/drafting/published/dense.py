"""A rule that copies what followed similar hidden states: DReSD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import Layer, VerifiedPass
from retrieve_spec.drafting.published.base import DENSE, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.errors import MissingSourceError
from retrieve_spec.sources.dense import DenseIndexes
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore


class Dresd(PublishedDrafter):
    """Preset `dresd`: what followed the nearest hidden states in a store.

    Follows DReSD (Gritta et al. 2025): the target's hidden state at the last verified token, standardised, reduced (to
    64 dimensions unless the store was built with others) and normalised, is looked up in every step; of its 50 nearest
    neighbours those that go on with the last generated token are kept, and the first ten give drafts of ten tokens.
    Where none is kept, nothing is drafted.

    Differs: the drafts are merged into one tree instead of ten rows with repeated caches, so that what they share is
    verified once; the index is FAISS's instead of ScaNN; drafts end where documents do; ties go to the earlier place.
    """

    neighbours, drafts, length = 50, 10, 10
    nodes = drafts * length

    def __init__(self, datastores: Sequence[Datastore], session: SessionMemory | None = None) -> None:
        super().__init__(session)
        self.indexes = DenseIndexes(datastores)
        if self.indexes.layer is None:
            got = "none" if not datastores else "only stores without one"
            raise MissingSourceError(
                "a datastore with a dense index for draft='dresd'", got, "Build one with --dense MODEL."
            )
        self.wants_hidden: Layer | None = self.indexes.layer
        self._hidden: NDArray[np.float32] | None = None

    def _reset(self) -> None:
        self._hidden = None

    def _learn(self, verified: VerifiedPass) -> None:
        self._hidden = verified.hidden

    def _draft(self, builder: TreeBuilder) -> None:
        if self._hidden is None:
            return
        last = int(self.text.ids[-1])
        near = self.indexes.search(self._hidden, self.neighbours)
        runs = 0
        for place, position in zip(near.segment.tolist(), near.position.tolist(), strict=True):
            found = self.indexes.continuation(place, position, self.length + 1)
            if len(found) and found[0] == last and runs < self.drafts:
                builder.add_run(ROOT, found[1:].tolist(), DENSE)
                runs += 1
