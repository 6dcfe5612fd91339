"""Lent drafter: what drafts for one sequence, asked for trees that fit its text and told what passes showed.

Where so many sequences share passes that drafting hardly pays, one may wait for its drafter until it is first asked for
a tree: the drafter then reads at once what it would have been told pass by pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import Budget, Drafter, Layer, RemembersText, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.limits import Limits
from retrieve_spec.engine.seen_pass import SeenPass
from retrieve_spec.sampling.pass_logits import PassLogits

_NO_PATH = np.empty(0, np.int32)


class LentDrafter:
    """What drafts for one sequence, from its start to its end.

    Parameters
    ----------
    lend
        Lends a drafter, or says why the sequence goes without.
    context_ids
        (n,) int32 what the drafter reads in place of the prompt.
    prediction_ids
        (m,) int32 text the output is expected to follow.
    on_pass
        Called with what each pass showed the drafter, the prompt's first.
    may_wait
        Whether the drafter may come later than the text.

    Attributes
    ----------
    drafter
        None before the start, while one is waited for, and where nothing drafts, or nothing any more.
    wants_hidden
        The layer whose hidden states it is shown.
    started
        Whether it has read the text, or nothing drafts.
    waits
        Whether it comes when it is first asked for a tree.
    spoiled
        Whether an interruption hit it amid its work.
    """

    def __init__(
        self,
        lend: Callable[[], Drafter | str],
        context_ids: NDArray[np.int32],
        prediction_ids: NDArray[np.int32] | None,
        on_pass: Callable[[VerifiedPass], None] | None,
        may_wait: bool = False,
    ) -> None:
        self._lend, self._on_pass = lend, on_pass
        self._context_ids, self._prediction_ids = context_ids, prediction_ids
        self._lent: Drafter | None = None
        self.drafter: Drafter | None = None
        self.wants_hidden: Layer | None = None
        self.started = self.spoiled = self.waits = False
        self._may_wait, self._later = may_wait, False
        self._told: list[NDArray[np.int32]] = []  # emitted while it waits

    def wait(self) -> None:
        """Let the drafter come when it is first asked for a tree, if it may and has not come yet."""
        self._later = self._may_wait

    def start(self) -> str:
        """Take the drafter, and let it read the text; why there is none, else empty. It can be done twice."""
        self.waits = self._later and not self.started and not self.spoiled
        return "" if self.waits else self._begin()

    def _begin(self) -> str:
        lent = self._lent or self._lend()
        if isinstance(lent, str):
            self.waits = False
            return lent
        self.drafter = self._lent = lent
        self.wants_hidden = lent.wants_hidden
        lent.start(self._context_ids, self._prediction_ids)
        if self._told:
            lent.observe(VerifiedPass(DraftTree(), _NO_PATH, np.concatenate(self._told)))
        self._told, self.waits = [], False
        self.started = True
        return ""

    @property
    def drafts(self) -> bool:
        """Whether it may be asked for a tree."""
        return self.drafter is not None or self.waits

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens of every row it is shown."""
        return self.drafter.top_k if self.drafter is not None else 0

    def propose(
        self,
        limits: Limits,
        length: int,
        most: int,
        cost: NDArray[np.float32] | None,
        noise: tuple[int, int, int] | None,
    ) -> DraftTree:
        """A tree that fits everything a text of `length` tokens may still become; the others as for `Budget`."""
        if self.waits:
            self._begin()
        if self.drafter is None:
            return DraftTree()
        depth = min(limits.max_depth, limits.max_length - length - 1)
        if limits.draft_end:
            depth = min(depth, limits.draft_end - length)
        nodes = most if limits.nodes is None else min(limits.nodes, most)
        nodes = min(nodes, limits.most_nodes)
        if limits.slot_end:
            nodes = min(nodes, max(limits.slot_end - length, 0))
        if depth < 1:
            nodes, cost = 0, None
        return self.drafter.propose(Budget(nodes, max(depth, 0), cost, noise))

    def read(self, prompt: NDArray[np.int32], logits: PassLogits) -> None:
        """Show it the top tokens behind the last of the prompt's tokens, one row for each."""
        if self.drafter is not None and self.drafter.top_k > 0:
            self.drafter.observe_prompt(prompt[-len(logits.top_ids) :], logits.top_ids, logits.top_logits)

    def observe(self, seen: SeenPass, prompt: bool) -> None:
        """Tell it what a pass showed; of the `prompt` it has the top tokens."""
        path, emitted = seen.walked.path, seen.walked.emitted
        if self.waits:
            self._told.append(emitted)
        if self.drafter is None:
            return
        assert seen.output is not None
        top, first = self.drafter.top_k > 0, seen.first_row
        shown = VerifiedPass(
            seen.tree,
            path,
            emitted,
            seen.logits.top_ids[first:] if top else None,
            seen.logits.top_logits[first:] if top else None,
            _host(seen.output.hidden, first + (int(path[-1]) + 1 if len(path) else 0)),
        )
        self.drafter.observe(replace(shown, top_ids=None, top_logits=None) if prompt else shown)
        if self._on_pass is not None:
            self._on_pass(shown)

    def spoil(self) -> None:
        """Draft no more: an interruption hit the drafter amid its work."""
        self.drafter, self.spoiled, self.waits = None, True, False

    def _take_in(self) -> None:
        """Let the drafter that was waited for learn from what was said; one that cannot so has to read all of it."""
        lent = self._lent or self._lend()
        if isinstance(lent, str):
            return
        self._lent = lent
        if isinstance(lent, RemembersText):
            told, self._told, self.waits = self._told, [], False
            lent.remember(np.concatenate(told))
        else:
            self._begin()

    def finish(self) -> None:
        """Let the drafter finish its request; one that was waited for comes to take in what there is."""
        if self.waits and self._told:
            self._take_in()
        drafter, self.drafter, self.waits = self.drafter, None, False
        if drafter is not None and self.started and not self.spoiled:
            drafter.finish()


def _host(hidden: torch.Tensor | None, row: int) -> NDArray[np.float32] | None:
    if hidden is None:
        return None
    state: NDArray[np.float32] = hidden[row].float().cpu().numpy()
    return state
