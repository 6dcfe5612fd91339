"""The decoding loop: draft → verify → commit → learn, yielding the visible tokens of every pass."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Budget, Drafter, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.cost import CostModel
from retrieve_spec.engine.pass_log import PassLog
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.sampling.acceptance import Sampler, Walk, walk
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.stopping import Stopper
from retrieve_spec.sampling.text import RowText
from retrieve_spec.verify.verifier import Verifier, VerifierInputs, VerifierOutput

_NO_DRAFT = DraftTree()


@dataclass(slots=True)
class Limits:
    """How much one pass may draft.

    Attributes
    ----------
    nodes
        Draft nodes at most; None leaves it to the drafter and the measured cost.
    max_depth
        Longest drafted path.
    max_length
        Tokens the row may grow to.
    draft_end
        Length of the row that no drafted token may reach beyond (position limit, rotary switch); 0 for no limit.
    prefill_chunk
        Prompt tokens per pass at most; 0 feeds the prompt in one pass.
    prompt_logits
        Positions at the end of the prompt whose top tokens the drafter sees.
    provenance
        Note where accepted drafts came from.
    """

    nodes: int | None
    max_depth: int
    max_length: int
    draft_end: int = 0
    prefill_chunk: int = 0
    prompt_logits: int = 0
    provenance: bool = False


class Decoding:
    """One generation of one row.

    `run` yields (t,) int32 arrays: the visible tokens of each pass, once. Nothing about the draft can change them. The
    caller may stop at any point, and calls `finish` in any case.

    Parameters
    ----------
    inputs, verifier
        What the generation starts from, and what runs the model.
    drafter
        None decodes without drafts.
    sampler, stopper
        Which token is the target's next, and after which it ends.
    limits
        How much one pass may draft.
    cost
        What passes take: sizes drafts where `limits` leave it open, and learns. None where passes are not over this row
        alone.
    prediction_ids
        (m,) int32 text the output is expected to follow.
    context_ids
        (n,) int32 what the drafter reads in place of the prompt.
    on_pass
        Called with what each pass showed the drafter, the prompt's first.
    text
        The row, if someone has it already.
    """

    def __init__(
        self,
        inputs: VerifierInputs,
        verifier: Verifier,
        drafter: Drafter | None,
        sampler: Sampler,
        stopper: Stopper,
        limits: Limits,
        cost: CostModel | None,
        *,
        prediction_ids: NDArray[np.int32] | None = None,
        context_ids: NDArray[np.int32] | None = None,
        on_pass: Callable[[VerifiedPass], None] | None = None,
        text: RowText | None = None,
    ) -> None:
        self.text = RowText(inputs.input_ids, limits.max_length + 1) if text is None else text
        self.report = GenerationReport(mode=verifier.mode, reason=verifier.reason)
        self.log = PassLog(self.report, cost, self.text.prompt_length, limits.provenance)
        self.sampler = sampler
        self._inputs, self._verifier, self._stopper = inputs, verifier, stopper
        self._drafter, self._limits, self._cost, self._prediction_ids = drafter, limits, cost, prediction_ids
        self._context_ids = self.text.prompt_ids if context_ids is None else context_ids
        self._on_pass = on_pass
        self._started = False
        self.wants_hidden = None if drafter is None else drafter.wants_hidden

    def run(self) -> Generator[NDArray[np.int32], None, None]:
        """Decode until a stop; every item is what became visible since the last one."""
        verified = yield from self.prefill()
        while not verified.stopped:
            began = perf_counter()
            tree = self.draft(self._cost_of_nodes())
            drafted = perf_counter()
            output = self._verify(tree)
            self.log.take_down()  # the pass before, while a device works on this one
            logits = self.read(output, tree)  # waits for the device: its time is the pass's
            checked = perf_counter()
            verified = self.accept(tree, logits)
            committed = perf_counter()
            self.learn(tree, verified, logits, output)
            learned = perf_counter()
            seconds = drafted - began, checked - drafted, committed - checked, learned - committed
            self.log.note(tree, verified, seconds, self.text.length)
            yield verified.emitted

    def prefill(self) -> Generator[NDArray[np.int32], None, Walk]:
        """Feed the prompt, chunk by chunk; an empty item after each chunk lets the caller cancel."""
        began = perf_counter()
        self._verifier.start(self._inputs)
        self.report.mode, self.report.reason = self._verifier.mode, self._verifier.reason
        plain = self._verifier.mode == "plain"
        if plain:
            self._drafter = None
        elif self._drafter is None:
            self.report.mode, self.report.reason = "plain", "drafting is off"
        if self._drafter is not None:
            self._drafter.start(self._context_ids, self._prediction_ids)
            self._started = True
        prompt = self._inputs.uncached_ids
        size = len(prompt) if plain else (self._limits.prefill_chunk or len(prompt))
        while len(prompt) > size:
            with torch.no_grad():
                self._verifier.forward(prompt[:size], want_hidden=self.wants_hidden)
                self._verifier.commit(_NO_DRAFT.parent)
            prompt = prompt[size:]
            yield _NO_DRAFT.token_ids
        learns = self._drafter is not None and self._drafter.top_k > 0
        keep = min(max(self._limits.prompt_logits, 1), len(prompt)) if learns else 1
        with torch.no_grad():
            output = self._verifier.forward(prompt, keep=keep, want_hidden=self.wants_hidden)
        logits = self.read(output, _NO_DRAFT, keep - 1)
        verified = self.accept(_NO_DRAFT, logits, keep - 1)
        if self._drafter is not None:
            if learns:
                self._drafter.observe_prompt(prompt[-keep:], logits.top_ids, logits.top_logits)
            hidden = _host(output.hidden, keep - 1)
            self._drafter.observe(VerifiedPass(_NO_DRAFT, verified.path, verified.emitted, hidden=hidden))
            if self._on_pass is not None:
                top = (logits.top_ids[-1:], logits.top_logits[-1:]) if learns else (None, None)
                self._on_pass(VerifiedPass(_NO_DRAFT, verified.path, verified.emitted, *top))
        self.report.prefill_ms = (perf_counter() - began) * 1e3
        self.report.passes = self.report.new_tokens = 1
        yield verified.emitted
        return verified

    def _cost_of_nodes(self) -> NDArray[np.float32] | None:
        """Seconds of a pass by number of nodes, where the budget follows them."""
        if self._drafter is None or self._cost is None or self._limits.nodes is not None:
            return None
        return self._cost.seconds(self.text.length, MAX_NODES)

    def draft(self, cost: NDArray[np.float32] | None, most: int = MAX_NODES) -> DraftTree:
        """Ask the drafter for a tree that fits everything the row may still become.

        Parameters
        ----------
        cost
            (n + 1,) seconds of a pass over 0 … n drafted nodes, or None.
        most
            Nodes at most.
        """
        if self._drafter is None:
            return _NO_DRAFT
        limits = self._limits
        depth = min(limits.max_depth, limits.max_length - self.text.length - 1)
        if limits.draft_end:
            depth = min(depth, limits.draft_end - self.text.length)
        nodes = most if limits.nodes is None else min(limits.nodes, most)
        if depth < 1:
            nodes, cost = 0, None
        noise = self.sampler.noise_at(self.text)
        tree = self._drafter.propose(Budget(nodes, max(depth, 0), cost, noise))
        return tree.first_branch() if self._verifier.mode == "chain" and not tree.is_chain else tree

    def _verify(self, tree: DraftTree) -> VerifierOutput:
        root = self.text.last_ids
        with torch.no_grad():
            return self._verifier.forward(root, tree if len(tree) else None, want_hidden=self.wants_hidden)

    def read(self, output: VerifierOutput, tree: DraftTree, first_row: int = 0) -> PassLogits:
        """Bring over what the walk and the drafter need of a pass's logits; waits for the device."""
        top_k = self._drafter.top_k if self._drafter is not None else 1
        return self.sampler.read(output.logits, first_row, tree, self.text, top_k)

    def accept(self, tree: DraftTree, logits: PassLogits, first_row: int = 0) -> Walk:
        """Follow the target's choices down the tree and keep what it walked, even if something raises."""
        path: list[int] = []
        try:
            return walk(tree, logits, first_row, self.sampler, self.text, self._stopper, path)
        finally:
            self._verifier.commit(np.array(path, np.int32))

    def learn(self, tree: DraftTree, verified: Walk, logits: PassLogits, output: VerifierOutput) -> None:
        """Tell the drafter what the pass showed."""
        if self._drafter is None:
            return
        seen = self._drafter.top_k > 0
        shown = VerifiedPass(
            tree,
            verified.path,
            verified.emitted,
            logits.top_ids if seen else None,
            logits.top_logits if seen else None,
            _host(output.hidden, int(verified.path[-1]) + 1 if len(verified.path) else 0),
        )
        self._drafter.observe(shown)
        if self._on_pass is not None:
            self._on_pass(shown)

    def finish(self) -> Any:
        """End the generation, however far it got, and return the cache as `generate` leaves it (`Verifier.finish`)."""
        self.report.pass_kind, self.report.pass_reason = self._verifier.pass_kind, self._verifier.pass_reason
        cache = self._verifier.finish()
        if self._drafter is not None and self._started:
            self._drafter.finish()
        return cache


def _host(hidden: torch.Tensor | None, row: int) -> NDArray[np.float32] | None:
    if hidden is None:
        return None
    state: NDArray[np.float32] = hidden[row].float().cpu().numpy()
    return state
