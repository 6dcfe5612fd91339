"""Tree verifier for any Hugging Face decoder, through its public forward, cache and mask arguments only."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.config import MAX_NODES, PASS
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.verify.cache import (
    KeptRows,
    apart,
    cache_mode,
    decoder_cache,
    finite_nodes,
    record_past,
    recording,
    same_rows,
    set_recording,
)
from retrieve_spec.verify.comparison import Rounding, by_passes, by_single_steps, drafts_for
from retrieve_spec.verify.interface import ModelInterface, catch_hidden, input_device, weaker
from retrieve_spec.verify.pass_inputs import PassInputs
from retrieve_spec.verify.positions import DerivedPositions
from retrieve_spec.verify.recurrent import RecurrentState
from retrieve_spec.verify.shrink import lengths_of
from retrieve_spec.verify.steps import SingleSteps, StepVerifier, keeping_texts
from retrieve_spec.verify.verifier import (
    Batching,
    Mode,
    PassKind,
    SharedPasses,
    Verifier,
    VerifierInputs,
    VerifierOutput,
)

logger = logging.getLogger(__name__)

_AHEAD = 12
"""Positions that the drafts take behind the prompt, and a few more."""


@dataclass(frozen=True, slots=True)
class InputSignature:
    """What is alike of calls that are alike.

    Attributes
    ----------
    names
        Arguments that say something about the prompt; none for text alone.
    padded
        Whether the prompt is padded.
    beyond
        How many of the lengths at which layers begin to see less it exceeds.
    """

    names: frozenset[str]
    padded: bool
    beyond: int

    @classmethod
    def of(cls, config: Any, inputs: PassInputs, length: int) -> InputSignature:
        """That of a call with a prompt of `length` tokens, cached ones included, of a model of this `config`."""
        beyond = sum(length > other for other in lengths_of(config).values())
        return cls(inputs.names, inputs.is_padded, beyond)


@dataclass(slots=True)
class SignatureModes:
    """What is known of calls of one model in one state, by their signatures.

    Attributes
    ----------
    rounding
        How far passes may be from single steps; None for a model that is not drafted for.
    known
        The strongest mode for each signature, and why not better.
    """

    rounding: Rounding | None = None
    known: dict[InputSignature, tuple[Mode, str]] = field(default_factory=dict)

    def examine(
        self,
        signature: InputSignature,
        at_most: tuple[Mode, str],
        model: Any,
        steps: Callable[[], SingleSteps],
        verifier: Callable[[Mode], Verifier],
        room: int | None,
    ) -> tuple[Mode, str]:
        """The strongest mode for a signature: known, or found out behind the prompt that was just read.

        Parameters
        ----------
        at_most
            The strongest that the model and the cache allow.
        steps, verifier
            Make single steps, and a verifier in some mode, over copies of the cache.
        room
            Positions behind the prompt that the model was made for, None if unknown.
        """
        if (known := self.known.get(signature)) is not None:
            return known
        names = ", ".join(sorted(signature.names))
        if room is not None and room < _AHEAD:
            return "plain", f"too few positions are left to see what {names} changes"
        began = perf_counter()
        try:
            with torch.no_grad(), keeping_texts(model):
                found = self.known[signature] = self._strongest(names, at_most, model, steps, verifier)
        except Exception as error:  # a lack of memory, or of positions: no fault of the drafts
            logger.debug("single steps behind %s fail", names, exc_info=True)
            return "plain", f"what {names} changes cannot be seen ({type(error).__name__})"
        seconds = perf_counter() - began
        logger.info("calls with %s: %s mode%s (found in %.0f ms)", names, found[0],
                    f", {found[1]}" if found[1] else "", seconds * 1e3)  # fmt: skip
        return found

    def _strongest(
        self,
        names: str,
        at_most: tuple[Mode, str],
        model: Any,
        steps: Callable[[], SingleSteps],
        verifier: Callable[[Mode], Verifier],
    ) -> tuple[Mode, str]:
        """The mode, and why not better."""
        mode, reason = at_most
        modes: list[Mode] = ["tree", "chain"] if mode == "tree" else ["chain"]
        for tried in modes:
            drafts = drafts_for(tried, 1, model)
            wanted = by_single_steps(steps(), drafts).rows
            try:
                got = by_passes(verifier(tried), drafts)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model's own code raises
                logger.debug("a %s pass behind %s fails", tried, names, exc_info=True)
                reason = f"behind {names}, a {tried} pass fails ({type(error).__name__})"
                continue
            assert self.rounding is not None  # a model that is not drafted for is not examined
            deviation = self.rounding.compare(got, wanted)
            if deviation.is_rounding:
                return tried, reason
            reason = f"behind {names}, a {tried} pass gives other logits than single steps ({deviation})"
        return "plain", reason


_PADDED = "padding in front of a text changes what several tokens see"


class HFVerifier:
    """A `Verifier` on top of a model's own forward and a `DynamicCache`. Kept rows move on the accepted path only.

    Parameters
    ----------
    model, interface
        The model, and what its forward takes.
    mode, reason
        How a probe found that it verifies, and why not better.
    signatures
        What is known of calls that give the model more than text; the first of each kind is held to single steps.
        None: nothing is looked at.
    around
        What a pass runs in; None for nothing.

    Attributes
    ----------
    cache
        The cache in use: the caller's, or one that the model put in its place (LongRoPE models do).
    past
        Tokens that were committed.
    inputs
        What the model is given in each pass of the generation.
    batch
        The `PaddedBatch` that it may share passes through, or None.
    is_plain_text
        Whether the generation is a text over a `DynamicCache`, with positions that are one on all axes.
    """

    def __init__(
        self,
        model: Any,
        interface: ModelInterface,
        mode: Mode = "tree",
        reason: str = "",
        signatures: SignatureModes | None = None,
        around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model = model
        self.around = around if around is not None else contextlib.nullcontext
        self.interface = interface
        self.mode: Mode = mode
        self.most_rows = PASS.tree_rows if interface.scale_step else MAX_NODES + 1
        self.reason = reason
        ignores_state = interface.recurrence is not None and interface.recurrence.way == "steps"
        counts = any(place.kind == "past" for place in interface.places)  # padding tokens inside may be left out
        self._reads_whole = ignores_state or counts or not interface.takes_pieces
        self.whole_prompts = self._reads_whole
        self._device = input_device(model)
        self._model_mode: tuple[Mode, str] = (mode, reason)
        self.signatures = signatures
        self._state = None if interface.recurrence is None else RecurrentState(interface.recurrence)
        self._derived = DerivedPositions(interface.places) if interface.places else None
        self._take_cache(None)
        self._was_recording: list[bool] = []
        self._asked = self._records = False  # layers to record their past, and some do
        self._steps: StepVerifier | None = None  # takes the text on where its kind of call allows no drafts
        self._shared: tuple[Any, int] | None = None  # the state of a pass that texts shared, and which text this is
        self.batch: Any = None
        self.pass_reason = ""

    @property
    def pass_kind(self) -> PassKind:
        """What runs the model."""
        return "model's own" if self._steps is None else "plain"

    batching: Batching = "padded"

    def share(self, passes: SharedPasses) -> None:
        """See `Verifier.share`."""
        self.batch = passes

    def shared_passes(self, is_reading: bool, want_hidden: Layer | None = None) -> SharedPasses | None:
        """See `Verifier.shared_passes`."""
        if self.batch is None or is_reading or not self.batch.takes(self):
            return None
        return self.batch  # type: ignore[no-any-return]

    def reads_rest(self, roots: int) -> bool:
        """Whether the rest of a prompt is read with a draft behind it: never."""
        return False

    def fresh(self) -> HFVerifier:
        """Another verifier that knows what this one does of the model, for another text."""
        verifier = HFVerifier(self.model, self.interface, *self._model_mode, self.signatures, self.around)
        verifier.pass_reason = self.pass_reason
        return verifier

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation; the mode may weaken when the cache cannot be rolled back, or by the kind of call."""
        self._given, self._returns_cache = dict(inputs.model_kwargs), inputs.returns_cache
        kwargs = {name: value for name, value in self._given.items() if name != self.interface.cache_name}
        self._take_cache(self._given.get(self.interface.cache_name))
        self._prompt = inputs.input_ids
        self.past = inputs.past_length
        self._fed = 0  # tokens given to forward since start
        self._uncached = inputs.input_ids.shape[1] - (inputs.past_length if inputs.holds_past else 0)
        self.inputs = PassInputs(
            self.model, self.interface, self._device, inputs.input_ids, kwargs, inputs.past_length, self._uncached
        )
        padded_state = self._state is not None and self.inputs.is_padded  # layers ignore the mask of a lone token
        self.whole_prompts = self._reads_whole or bool(self.inputs.names) or padded_state
        self._signature = InputSignature.of(self.model.config, self.inputs, self.past + self._uncached)
        self._steps = None
        self._mode_here = weaker(self._model_mode, cache_mode(self.cache))
        if self.inputs.is_padded and not self.interface.takes_padding:
            self._mode_here = "plain", _PADDED
        if self.signatures is not None and (known := self.signatures.known.get(self._signature)) is not None:
            self._mode_here = weaker(self._mode_here, known)
        self.mode, self.reason = self._mode_here
        self.is_plain_text = self.inputs.shifts_alike and not inputs.why_not_text(self.interface.cache_name)
        self._was_recording = recording(self._rows) if self._rows is not None else []
        self._asked = self._records = any(self._was_recording)
        self._pending = (0, 0)  # root tokens and nodes of the last pass
        self._left: NDArray[np.int64] | None = None  # numbers of these nodes in the draft, if some overflowed

    def _take_cache(self, cache: Any) -> None:
        """Keep to a cache: `_rows` is the part of it that grows with the text."""
        self.cache, self._rows = cache, decoder_cache(cache)
        self._kept = KeptRows(self._rows) if isinstance(self._rows, DynamicCache) else None

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
        self._left = None
        if self._kept is not None:
            self._kept.begin()
        before = None
        if nodes and self._kept is not None and self._kept.grows_by_rows and self._state is None:
            before = same_rows(self._rows) if self._device.type == "cpu" else None
        reading = self._fed < self._uncached
        by_rows = self._kept is not None and self._kept.grows_by_rows
        if not self._asked and self._rows is not None and (nodes or (by_rows and not reading)):
            record_past(self._rows)
            self._asked, self._records = True, any(recording(self._rows))
        if reading:
            kwargs = self.inputs.reading(self.cache, self.past, self._fed, roots, keep)
        else:
            masked = self.mode == "tree" and not self.interface.masks_inside
            kwargs = self.inputs.decoding(self.cache, self._rows, self.past, root_ids, draft, keep, masked)
        verifying: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._state is not None:  # stays as it is until it is committed
            verifying = self._state.verifying(self._rows, [self._rows], [roots], [draft], self._device)
        elif nodes and self._derived is not None:
            verifying = self._derived.verifying(self.past, roots, draft, self._device)
        with catch_hidden(self.model, want_hidden) as hidden, verifying, self.around():
            outputs = self.model(**kwargs, return_dict=True)
        cache = getattr(outputs, self.interface.cache_name, self.cache)
        if cache is not self.cache:
            self._take_cache(cache)
        if reading and self._fed + roots == self._uncached:
            self._behind_prompt(roots, outputs)
        self._pending = (roots, nodes)
        rows = keep + nodes
        logits = outputs.logits[0]
        states = hidden[-1][0, -rows:] if hidden else None
        output = VerifierOutput(logits if logits.shape[0] == rows else logits[-rows:], states)
        if before is not None and bool(output.logits[:, 0].isnan().any()):
            finite = finite_nodes(self._rows, draft)
            if not finite.all():
                return self._without(np.flatnonzero(finite), before, root_ids, draft, output, keep, want_hidden)
        return output

    def _without(
        self,
        left: NDArray[np.int64],
        before: DynamicCache,
        root_ids: NDArray[np.int32],
        draft: DraftTree,
        output: VerifierOutput,
        keep: int,
        want_hidden: Layer | None,
    ) -> VerifierOutput:
        """Run a pass again without nodes that overflowed: infinities that a row does not see make it NaN (0 · inf).

        Those nodes are NaN by themselves, and stay as `output` has them.
        """
        assert self._rows is not None
        self._rows.layers = before.layers
        again = self.forward(root_ids, draft.subtree(left), keep=keep, want_hidden=want_hidden)
        rows = np.concatenate([np.arange(keep), keep + left])
        output.logits[rows] = again.logits
        if output.hidden is not None and again.hidden is not None:
            output.hidden[rows] = again.hidden
        self._left = left if self._left is None else left[self._left]
        return output

    def _behind_prompt(self, roots: int, outputs: Any) -> None:
        """See how a text goes on whose prompt has just been read, and what its kind of call allows."""
        past = self.past + roots
        if self.inputs.names:
            self.inputs.has_read(outputs)
        self.inputs.behind_prompt(self.cache, past)
        if self.signatures is None or not (self._signature.names or self.reason == _PADDED):
            return
        if self.mode != "plain":

            def steps() -> SingleSteps:
                return SingleSteps.behind(self.model, self._prompt, self._given, outputs)

            end = self.interface.rope_switch or self.interface.max_positions
            found = self.signatures.examine(
                self._signature,
                self._mode_here,
                self.model,
                steps,
                lambda mode: self._twin(past, mode),
                end - past if end else None,
            )
            self._mode_here = weaker(self._mode_here, found)
            self.mode, self.reason = self._mode_here
        if self.mode == "plain":
            self._steps = StepVerifier(self.model, self.reason)
            self._steps.go_on(self._prompt, self._given, outputs)
            self.pass_reason = self.reason
        self._given = {}

    def _twin(self, past: int, mode: Mode) -> HFVerifier:
        """Another verifier behind the same prompt, over a cache of its own."""
        twin = copy.copy(self)
        twin._state = None if self._state is None else self._state.apart()
        twin._take_cache(apart(self.cache))
        twin.inputs = copy.copy(self.inputs)
        twin.mode, twin.reason = twin._model_mode = twin._mode_here = (mode, "")
        twin.past, twin._fed = past, self._uncached
        twin._asked = twin._records = False
        return twin

    def commit(self, path: NDArray[np.int32]) -> None:
        """Keep the root tokens and the nodes of `path` (`Verifier.commit`)."""
        roots, nodes = self._pending
        if self._left is not None:
            path = np.searchsorted(self._left, path).astype(np.int32)
        if self._rows is not None and self._steps is None:
            state, text = self._shared or (self._state, 0)
            if state is not None:
                state.commit(self._rows, path, text)
            if self._kept is not None and (nodes or self._records or self._shared):
                self._kept.commit(path, nodes)
        self._shared = None
        self.past, self._fed = self.past + roots + len(path), self._fed + roots + len(path)
        if self.interface.scale_step and self._model_mode[0] == "tree":
            room = -self.past % self.interface.scale_step
            here = self._mode_here[0]
            self.mode = "chain" if room <= self.most_rows and here == "tree" else here

    def begin_shared(self) -> Any:
        """The cache, up to the text, for a pass that several texts share."""
        if self._kept is not None:
            self._kept.begin()
        return self._rows

    def end_shared(self, roots: int, nodes: int, state: Any, text: int) -> None:
        """Take over a pass over so many root tokens and nodes whose rows are in the cache; `state` has those of every
        text, of which this is the one of that number."""
        self._pending, self._left, self._shared = (roots, nodes), None, (state, text)

    def copy_rows(self) -> DynamicCache | None:
        """What the cache holds, in another of the same tensors, which nothing writes to; None where it is not rows."""
        if self._kept is None or not self._kept.grows_by_rows or self._state is not None:
            return None
        return same_rows(self.cache)

    def finish(self) -> Any:
        """Return the cache as plain `generate` leaves it."""
        if self._state is not None:
            self._state.forget()
        if self._rows is not None and self._records:
            set_recording(self._rows, self._was_recording)
        cache = self.cache if self._steps is None else self._steps.finish()
        self._steps, self._given = None, {}
        self._take_cache(None)
        return cache
