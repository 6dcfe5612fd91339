"""Verifier factory: the fastest verifier that stands for a model as it is now, found anew when the model has changed.

What was found holds for one state of the model (`ModelState`). A few states are remembered, so that switching an
adapter back and forth records each once; recording again is paid for by generations in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from retrieve_spec.config import PASS, SpeculationConfig
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.recorded.model_state import ModelState
from retrieve_spec.recorded.packed_layers import PackedLayers
from retrieve_spec.recorded.recordable import why_single_steps
from retrieve_spec.recorded.recorded_pass import RECORDER
from retrieve_spec.recorded.recording import Recording, try_recording, why_not_recorded, why_unasked
from retrieve_spec.recorded.weight_layout import Layouts
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import attention_implementation, input_device
from retrieve_spec.verify.kept_texts import reads_what_it_keeps
from retrieve_spec.verify.plain import StepVerifier, keeping_texts
from retrieve_spec.verify.probe import Finding, check_verifier
from retrieve_spec.verify.verifier import PassKind, Verifier

logger = logging.getLogger(__name__)

STATES = 8
"""States of a model that are remembered; also, recordings that may follow one another at once."""
PER_RECORDING = 8
"""Generations that pay for one more recording."""


_CHANGING = "a forward changes {}"
_COPIED = "%d weights have changed since they were copied"


@dataclass(slots=True)
class _Known:
    """What was found out about a model in one state.

    `packed` are the layers that passes of its own forward multiply faster with; `due`: it is to be recorded once that
    is paid for.
    """

    state: ModelState
    finding: Finding
    recording: Recording | None = None
    why: str = ""
    due: bool = False
    packed: PackedLayers | None = None

    def release(self) -> None:
        """Give back what is kept for the next generation in this state."""
        if self.recording is not None and self.recording.graphs is not None:
            self.recording.graphs.clear()


class VerifierFactory:
    """Makes the verifier of each generation of one model.

    Parameters
    ----------
    model
        The model.
    config
        `recorded_pass` says whether to record.
    layer
        The layer whose hidden states are recorded.
    find_mode
        Probes the model as it is.
    finding
        What it found just now.

    Attributes
    ----------
    finding
        How the model is verified through its own forward, as last seen.
    layouts
        Copies of its weights.
    """

    def __init__(
        self, model: Any, config: SpeculationConfig, layer: Layer, find_mode: Callable[[Any], Finding], finding: Finding
    ) -> None:
        self._model, self._config, self._layer, self._find_mode = model, config, layer, find_mode
        self.layouts = Layouts(PASS.layout_bytes, sum(weight.nbytes for weight in model.parameters()))
        self._credit = float(STATES)
        self._is_let_be = False
        self.finding = finding
        self._known: list[_Known] = []
        self._examine(finding)

    @property
    def pass_kind(self) -> PassKind:
        """Which pass verifies, as last seen."""
        if not self._known:
            return "model's own"
        known = self._known[0]
        return "plain" if known.finding.mode == "plain" else "model's own" if known.recording is None else "recorded"

    @property
    def pass_reason(self) -> str:
        """Why no faster pass verifies; empty for the recorded one."""
        if not self._known:
            return "the model is examined at the next generation"
        known = self._known[0]
        return known.finding.reason if known.finding.mode == "plain" else known.why

    @property
    def recording(self) -> Recording | None:
        """The recording that verifies, as last seen."""
        return self._known[0].recording if self._known else None

    def __call__(self) -> Verifier:
        """A verifier for a generation that begins now."""
        self._credit = min(self._credit + 1 / PER_RECORDING, STATES)
        autocast = torch.is_autocast_enabled(input_device(self._model).type)
        if self._is_let_be and not autocast and (recording := self.recording) is not None:
            return recording(None, self._known[0].finding.kinds)
        known = self._current()
        if autocast:
            known = _Known(known.state, known.finding, None, "autocast is on")
        if known.finding.mode == "plain":
            return StepVerifier(self._model, known.finding.reason)
        if known.recording is None:
            found, packed = known.finding, known.packed
            if packed is not None and (copied := packed.follow()):
                logger.debug(_COPIED, copied)
            own = HFVerifier(self._model, found.interface, found.mode, found.reason, found.kinds, packed)
            own.pass_reason = known.why
            return own
        if known.recording.graphs is not None and known.state.has_moved():
            known.recording.graphs.clear()  # they kept addresses
        if copied := known.recording.recorded.follow():
            logger.debug(_COPIED, copied)
        return known.recording(known.state, known.finding.kinds)

    def let_be(self) -> None:
        """Take a model that is recorded for what it is, without a look at it and its weights before generations."""
        self._is_let_be = True

    def invalidate(self) -> None:
        """Forget what was found and recorded: the next generation looks at the model anew, whatever that costs."""
        self._is_let_be = False
        self._known.clear()
        self._credit = float(STATES)

    def _current(self) -> _Known:
        """What is known of the model's state, found out now if need be."""
        for known in self._known:
            if known.state.holds(self._model):
                break
        else:
            if not self._known or not self._only_texts_differ():
                return self._examine()
            known = self._known[0]
        if known is not self._known[0]:
            self._known[0].release()
            self._known.remove(known)
            self._known.insert(0, known)
        return self._examine() if known.due and self._credit >= 1 else known

    def _only_texts_differ(self) -> bool:
        """Whether the model, as last seen, has changed in nothing but what it keeps of texts; no longer followed then.

        It stays recorded where its passes do not read that: else the recording might have read what a text had left.
        """
        known = self._known[0]
        kept = known.state.let_go(self._model)
        if kept and (known.recording is None or self._reads(known, kept)):
            known.release()
            known.recording, known.why = None, known.why or _CHANGING.format(kept[0])
        return bool(kept)

    def _reads(self, known: _Known, kept: list[str]) -> bool:
        """Whether passes of the model read what it keeps of texts."""
        names = frozenset(name.rpartition(".")[2] for name in kept)
        with keeping_texts(self._model):  # the call at hand may have been prepared already
            return reads_what_it_keeps(self._model, known.finding.interface, names)

    def _examine(self, finding: Finding | None = None) -> _Known:
        """Probe the model, record it if it may be, and remember both for its state."""
        if why := why_single_steps(self._model):  # for this call only: nothing to remember
            return _Known(ModelState(self._model), Finding("plain", why, self.finding.interface))
        if self._known and logger.isEnabledFor(logging.DEBUG):
            logger.debug("the model has changed: %s", ", ".join(self._known[0].state.changes(self._model)[:5]))
        with keeping_texts(self._model), torch.autocast(input_device(self._model).type, enabled=False):
            if finding is not None:
                known = _Known(ModelState(self._model), finding)
            elif self._credit < 1:
                finding = Finding("plain", "the model changes too often to be probed each time", self.finding.interface)
                known = _Known(ModelState(self._model), finding, due=True)
            else:
                self._credit -= 1
                known = self._probe()
            known.why = known.why or known.state.problem
            if not known.why:
                self._record(known)
            if known.recording is None and known.finding.mode != "plain":
                known.packed = self._pack(known.finding)
            known.finding.texts.clear()
        self.finding = known.finding
        for other in self._known:
            other.release()
        others = [other for other in self._known if known.state.keeps(other.state) and not other.due]
        self._known = [known, *others[: STATES - 1]]
        return known

    def _probe(self) -> _Known:
        """Probe the model; what its forward changes each time is not followed, and keeps it from being recorded."""
        for _ in range(2):
            state = ModelState(self._model)
            finding = self._find_mode(self._model)
            if state.holds(self._model) or state.let_go(self._model):
                return _Known(state, finding)
        return _Known(state, finding, None, _CHANGING.format(state.settle(self._model)[0]))

    def _pack(self, finding: Finding) -> PackedLayers | None:
        """Layers that multiply by copies of their weights in passes of the model's own forward, if these agree."""
        if self._model.training or why_unasked(self._model, self._config):
            return None
        packed = PackedLayers(self._model, self.layouts)
        if not len(packed):
            return None
        own = HFVerifier(self._model, finding.interface, finding.mode, around=packed)
        if why := check_verifier(self._model, own, finding.mode, finding.texts):
            logger.debug("layers are not packed: %s", why)
            return None
        return packed

    def _record(self, known: _Known) -> None:
        """Record the model in the state it is in, and look whether it still is."""
        known.why = why_not_recorded(self._model, known.finding, self._config)
        if known.why:
            return
        with attention_implementation(self._model, RECORDER):  # transformers notes on the class that it can be set
            pass
        known.state = ModelState(self._model)
        known.recording, known.why = try_recording(self._model, known.finding, self._config, self._layer, self.layouts)
        kept = known.state.let_go(self._model)
        changing = kept if kept and self._reads(known, kept) else known.state.settle(self._model)
        if changing:
            known.recording, known.why = None, _CHANGING.format(changing[0])
