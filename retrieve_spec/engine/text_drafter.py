"""Text drafter: what drafts for one sequence, from its start to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import Budget, Drafter, Layer, RemembersText, VerifiedPass
from retrieve_spec.drafting.forced import Guide
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.engine.drafters import Drafters, DraftOptions, NotDraftedError
from retrieve_spec.sampling.acceptance import PassLogits


class TextDrafter:
    """Drafts for one sequence with a drafter of the model's.

    Where so many sequences share passes that drafting hardly pays, it may be deferred: the drafter is opened when it is
    first asked for a tree, and then reads at once what it would have observed pass by pass.

    Parameters
    ----------
    drafters
        Of the model.
    options
        How the text is drafted for.
    context_ids
        (n,) int32 what the drafter reads in place of the prompt.
    prediction_ids
        (m,) int32 text the output is expected to follow.
    on_pass
        Called with what each pass showed the drafter, the prompt's first.
    wrap
        Wraps the drafter that was opened; None uses it as it is.
    may_defer
        Whether the drafter may be opened later than the text.
    guide
        Knows where the text has no choice, or None.

    Attributes
    ----------
    drafter
        The drafter, once it has read the text; None before, after the end, and where nothing drafts.
    """

    def __init__(
        self,
        drafters: Drafters,
        options: DraftOptions,
        context_ids: NDArray[np.int32],
        prediction_ids: NDArray[np.int32] | None = None,
        *,
        on_pass: Callable[[VerifiedPass], None] | None = None,
        wrap: Callable[[Drafter], Drafter] | None = None,
        may_defer: bool = False,
        guide: Guide | None = None,
    ) -> None:
        self.guide = guide
        self._drafters, self._options, self._on_pass, self._wrap = drafters, options, on_pass, wrap
        self._context_ids, self._prediction_ids = context_ids, prediction_ids
        self.drafter: Drafter | None = None
        self._opened: Drafter | None = None
        self._may_defer = may_defer
        self._defers = False  # whether the start of the text opens no drafter
        self._is_deferred = False  # whether the text has started, and the drafter is to be opened
        self._observed: list[NDArray[np.int32]] = []  # while it is deferred
        self._forgotten = drafters.times_forgotten(options.scope)

    def defer(self) -> None:
        """Open the drafter only when a tree is first asked for, if that is allowed and it has not started."""
        self._defers = self._may_defer

    def start(self) -> str:
        """Open the drafter and let it read the text; return why there is none, else an empty text."""
        self._is_deferred = self._defers
        return "" if self._is_deferred else self._begin()

    def _open(self) -> Drafter:
        if self._is_forgotten:  # a deferred one would otherwise learn the forgotten text
            raise NotDraftedError("the text of its scope was forgotten meanwhile")
        self._opened = drafter = self._drafters.open(self._options)
        return drafter if self._wrap is None else self._wrap(drafter)

    @property
    def _is_forgotten(self) -> bool:
        """Whether what belongs to its scope was forgotten since the sequence was made."""
        return self._drafters.times_forgotten(self._options.scope) > self._forgotten

    def _begin(self) -> str:
        self._is_deferred = False
        try:
            drafter = self._open()
        except NotDraftedError as why:
            return str(why)
        self._read(drafter)
        self.drafter, self._observed = drafter, []
        return ""

    def _read(self, drafter: Drafter) -> None:
        """Let a drafter read the text so far."""
        drafter.start(self._context_ids, self._prediction_ids)
        if self._observed:
            drafter.observe(VerifiedPass(NO_DRAFT, np.empty(0, np.int32), np.concatenate(self._observed)))

    @property
    def drafts(self) -> bool:
        """Whether it may be asked for a tree."""
        return self.drafter is not None or self._is_deferred

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens of every row it observes."""
        return self.drafter.top_k if self.drafter is not None else 0

    @property
    def wants_hidden(self) -> Layer | None:
        """The layer whose hidden states the drafter observes, or `on_pass`."""
        if self.drafter is None:
            return None
        return self.drafter.wants_hidden or ("last" if self._on_pass is not None else None)

    def draft(self, budget: Budget) -> DraftTree:
        """Return a tree within a budget; an empty one where nothing drafts."""
        if self._is_deferred:
            self._begin()
        return NO_DRAFT if self.drafter is None else self.drafter.propose(budget)

    def observe_prompt(self, prompt: NDArray[np.int32], logits: PassLogits) -> None:
        """Observe the top tokens after the last of the prompt's tokens, one row for each."""
        if self.drafter is not None and self.drafter.top_k > 0:
            self.drafter.observe_prompt(prompt[-len(logits.top_ids) :], logits.top_ids, logits.top_logits)

    def observe(self, verified: VerifiedPass, prompt: bool = False) -> None:
        """Observe a pass; of the `prompt` the top tokens are known."""
        if self._is_deferred:
            self._observed.append(verified.emitted)
        if self.drafter is None:
            return
        self.drafter.observe(replace(verified, top_ids=None, top_logits=None) if prompt else verified)
        if self._on_pass is not None:
            self._on_pass(verified)

    def finish(self, failed: bool = False) -> None:
        """Finish drafting and keep what may be kept; nothing where the sequence `failed`, maybe inside the drafter."""
        try:
            if failed:
                return
            if self._is_deferred and self._observed:
                self._remember()
            if self.drafter is not None:
                self.drafter.finish()
        finally:
            self.drafter, self._is_deferred = None, False
            if self._opened is not None:
                opened, self._opened = self._opened, None
                self._drafters.close(opened, failed)

    def _remember(self) -> None:
        """Let a deferred drafter learn from the text; one that cannot has to read all of it."""
        with contextlib.suppress(NotDraftedError):
            drafter = self._open()
            if isinstance(drafter, RemembersText):
                drafter.remember(np.concatenate(self._observed))
            else:
                self._read(drafter)
                self.drafter = drafter

    def keep_answer(self, token_ids: NDArray[np.int64]) -> None:
        """Keep a whole answer (m,) to the prompt for later calls, where they are kept and were not forgotten."""
        if self._options.siblings is not None and not self._is_forgotten:
            self._options.siblings.answer(token_ids)
