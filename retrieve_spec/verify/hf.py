"""Tree verifier for any Hugging Face decoder, through its public forward, cache and mask arguments only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.config import MAX_NODES, PASS
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.verify.cache import cache_mode, finite_nodes
from retrieve_spec.verify.interface import ModelInterface, catch_hidden, input_device, weaker
from retrieve_spec.verify.pass_inputs import PassInputs
from retrieve_spec.verify.positions import DerivedPositions
from retrieve_spec.verify.recurrent import RecurrentState
from retrieve_spec.verify.sequence_cache import PendingPass, SequenceCache
from retrieve_spec.verify.signatures import InputSignature, SignatureModes
from retrieve_spec.verify.steps import SingleSteps, StepVerifier
from retrieve_spec.verify.verifier import (
    Batching,
    Mode,
    PassKind,
    SharedPasses,
    VerifierInputs,
    VerifierOutput,
)

_PADDED = "padding in front of a text changes what several tokens see"


class HFVerifier:
    """A `Verifier` on top of a model's own forward and a `DynamicCache`. Kept rows move on the accepted path only.

    Parameters
    ----------
    model, interface
        The model, and what its forward takes.
    mode, reason
        The mode that a probe found for the model, and why not better.
    signatures
        The modes of calls that give the model more than text; the first call of each kind is compared with single
        steps. None: calls are not examined.
    around
        The context that a pass runs in; None for none.

    Attributes
    ----------
    cache
        The cache of the generation.
    past
        Tokens that were committed.
    inputs
        The arguments of the generation's passes.
    batch
        The `PaddedBatch` that it may share passes through, or None.
    why_not_text
        Why the generation is more than a text over a `DynamicCache`; empty when it is not.
    is_plain_text
        Whether it is such a text, with positions that are one on all axes.
    """

    batching: Batching = "padded"

    def __init__(
        self,
        model: Any,
        interface: ModelInterface,
        mode: Mode = "tree",
        reason: str = "",
        signatures: SignatureModes | None = None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model, self.interface = model, interface
        self.around = around if around is not None else contextlib.nullcontext
        self.signatures = signatures
        self.mode, self.reason = self._model_mode = (mode, reason)
        self.most_rows = PASS.tree_rows if interface.scale_step else MAX_NODES + 1
        self.whole_prompts = interface.needs_whole_prompts
        self.batch: Any = None
        self.pass_reason = ""
        self._device = input_device(model)
        self._positions = DerivedPositions(interface.places) if interface.places else None
        state = None if interface.recurrence is None else RecurrentState(interface.recurrence)
        self.cache = SequenceCache(None, state)
        self._steps: StepVerifier | None = None  # continues the text if its kind of call allows no drafts

    @property
    def pass_kind(self) -> PassKind:
        """What runs the model."""
        return "model's own" if self._steps is None else "plain"

    def share(self, passes: SharedPasses) -> None:
        """See `Verifier.share`."""
        self.batch = passes

    def shared_passes(self, is_reading: bool, want_hidden: Layer | None = None) -> SharedPasses | None:
        """See `Verifier.shared_passes`."""
        if self.batch is None or is_reading or not self.batch.can_share(self):
            return None
        return self.batch  # type: ignore[no-any-return]

    def reads_rest(self, roots: int) -> bool:
        """Whether the rest of a prompt is read together with a draft after it: never."""
        return False

    def fresh(self) -> HFVerifier:
        """Return another verifier for another text, with what this one knows of the model."""
        verifier = HFVerifier(self.model, self.interface, *self._model_mode, self.signatures, self.around)
        verifier.pass_reason = self.pass_reason
        return verifier

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation; the mode may weaken when the cache cannot be rolled back, or by the kind of call."""
        kwargs = dict(inputs.model_kwargs)
        self._call: VerifierInputs | None = inputs  # until the prompt is processed
        self.cache = SequenceCache(kwargs.pop(self.interface.cache_name, None), self.cache.state)
        self.past = inputs.past_length
        self.inputs = PassInputs(
            self.model, self.interface, self._device, inputs.input_ids, kwargs, inputs.past_length, inputs.num_uncached
        )
        padded_state = self.cache.state is not None and self.inputs.is_padded  # layers ignore a single token's mask
        self.whole_prompts = self.interface.needs_whole_prompts or bool(self.inputs.names) or padded_state
        self.why_not_text = inputs.why_not_text(self.interface.cache_name)
        self.is_plain_text = not self.why_not_text and self.inputs.shifts_alike
        self._signature = InputSignature.of(self.model.config, self.inputs)
        self._call_mode = self._strongest_mode()
        self.mode, self.reason = self._call_mode
        self._steps = None
        self._pending = PendingPass()

    def _strongest_mode(self) -> tuple[Mode, str]:
        """Return the strongest mode that model, cache and trials of this kind of call allow, and why not better."""
        if self.inputs.is_padded and not self.interface.takes_padding:
            return "plain", _PADDED
        allowed = weaker(self._model_mode, cache_mode(self.cache.whole))
        known = None if self.signatures is None else self.signatures.known.get(self._signature)
        return allowed if known is None else weaker(allowed, known)

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run one pass (`Verifier.forward`)."""
        if self._steps is not None:
            return self._steps.forward(root_ids, tree, keep=keep, want_hidden=want_hidden)
        draft = NO_DRAFT if tree is None else tree
        roots, nodes = len(root_ids), len(draft)
        is_reading = self.inputs.is_reading(self.past)
        self.cache.begin(records=nodes > 0 or (self.cache.grows_by_rows and not is_reading))
        before = self.cache.copy_rows() if nodes and self._device.type == "cpu" else None
        if is_reading:
            kwargs = self.inputs.reading(self.cache.whole, self.past, roots, keep)
        else:
            masked = self.mode == "tree" and not self.interface.masks_inside
            kwargs = self.inputs.decoding(self.cache, self.past, root_ids, draft, keep, masked)
        with catch_hidden(self.model, want_hidden) as hidden, self._verifying(roots, draft), self.around():
            outputs = self.model(**kwargs, return_dict=True)
        self._pending = PendingPass(roots, nodes)
        cache = getattr(outputs, self.interface.cache_name, self.cache.whole)
        if cache is not self.cache.whole:
            self.cache.replace(cache)
        if is_reading and not self.inputs.is_reading(self.past + roots):
            self._end_prompt(self.past + roots, outputs)
        rows = keep + nodes
        states = hidden[-1][0, -rows:] if hidden else None
        output = VerifierOutput(outputs.logits[0, -rows:], states)
        if before is not None and bool(output.logits[:, 0].isnan().any()):
            return self._without_overflow(output, before, root_ids, draft, keep, want_hidden)
        return output

    def _verifying(self, roots: int, draft: DraftTree) -> contextlib.AbstractContextManager[None]:
        """The context in which modules that keep state, or count positions, follow the branches of a draft."""
        state, decoder = self.cache.state, self.cache.decoder
        if state is not None:
            return state.verifying(decoder, [decoder], [roots], [draft], self._device)
        if self._positions is not None and len(draft):
            return self._positions.verifying(self.past, roots, draft, self._device)
        return contextlib.nullcontext()

    def _without_overflow(
        self,
        output: VerifierOutput,
        before: DynamicCache,
        root_ids: NDArray[np.int32],
        draft: DraftTree,
        keep: int,
        want_hidden: Layer | None,
    ) -> VerifierOutput:
        """Repeat a pass without the nodes that overflowed, if any: torch's attention gives their infinities to rows
        that do not see them (0 · inf is NaN).

        Those nodes are NaN by themselves, and stay as `output` has them.
        """
        finite = finite_nodes(self.cache.decoder, draft)
        if finite.all():
            return output
        kept = np.flatnonzero(finite)
        self.cache.restore_rows(before)
        again = self.forward(root_ids, draft.subtree(kept), keep=keep, want_hidden=want_hidden)
        rows = np.concatenate([np.arange(keep), keep + kept])
        output.logits[rows] = again.logits
        if output.hidden is not None and again.hidden is not None:
            output.hidden[rows] = again.hidden
        inner = self._pending.kept
        self._pending = replace(self._pending, kept=kept if inner is None else kept[inner])
        return output

    def _end_prompt(self, past: int, outputs: Any) -> None:
        """Prepare for decoding after a prompt of `past` tokens, and examine a call that gives more than text."""
        if self.inputs.names:
            self.inputs.update_after_prompt(outputs)
        self.inputs.after_prompt(self.cache.whole, past)
        call, self._call = self._call, None
        if self.signatures is None or not (self._signature.names or self.reason == _PADDED):
            return
        assert call is not None
        if self.mode != "plain":
            self._call_mode = weaker(self._call_mode, self._examine(self.signatures, call, past, outputs))
            self.mode, self.reason = self._call_mode
        if self.mode == "plain":
            self._steps = StepVerifier(self.model, self.reason)
            self._steps.go_on(call.input_ids, call.model_kwargs, outputs)
            self.pass_reason = self.reason

    def _examine(self, signatures: SignatureModes, call: VerifierInputs, past: int, outputs: Any) -> tuple[Mode, str]:
        """Return the strongest mode of this kind of call, found by trials after its prompt of `past` tokens."""
        end = self.interface.rope_switch or self.interface.max_positions
        return signatures.examine(
            self._signature,
            self._call_mode,
            self.model,
            lambda: SingleSteps.after(self.model, call.input_ids, call.model_kwargs, outputs),
            lambda mode: self._fork(past, mode),
            end - past if end else None,
        )

    def _fork(self, past: int, mode: Mode) -> HFVerifier:
        """Return another verifier after the same prompt, over a cache of its own."""
        fork = copy.copy(self)
        fork.cache, fork.inputs, fork.past = self.cache.fork(), copy.copy(self.inputs), past
        fork.mode, fork.reason = fork._model_mode = fork._call_mode = (mode, "")
        return fork

    def commit(self, path: NDArray[np.int32]) -> None:
        """Keep the root tokens and the nodes of `path` (`Verifier.commit`)."""
        if self._steps is None:
            self.cache.commit(self._pending, path)
        self.past += self._pending.roots + len(path)
        if step := self.interface.scale_step:
            near = -self.past % step <= self.most_rows  # siblings may lie on both sides of it
            mode = self._call_mode[0]
            self.mode = "chain" if near and mode == "tree" else mode

    def begin_shared(self) -> Any:
        """Return the rows of the cache, for a pass that several texts share."""
        self.cache.begin()
        return self.cache.decoder

    def end_shared(self, roots: int, nodes: int, state: RecurrentState | None, text: int) -> None:
        """Take over a shared pass whose rows are in the cache.

        Parameters
        ----------
        roots, nodes
            Root tokens and draft nodes of this text.
        state, text
            The recurrent states of all texts of the pass, and the number of this one.
        """
        self._pending = PendingPass(roots, nodes, shared=(state, text))

    def copy_rows(self) -> DynamicCache | None:
        """Return a cache of the same tensors, which nothing writes to; None where it holds more than rows."""
        return self.cache.copy_rows()

    def finish(self) -> Any:
        """Return the cache as plain `generate` leaves it."""
        cache = self.cache.finish()
        if self._steps is not None:
            cache = self._steps.finish()
        self._steps, self._call = None, None
        self.cache = SequenceCache(None, self.cache.state)
        return cache
