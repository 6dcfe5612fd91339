"""Verifier factory: the fastest verifier for a model as it is now, found again when the model has changed.

What was found is valid for one state of the model (`ModelState`). A few states are kept, so that switching an adapter
back and forth records each once.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrieve_spec.config import AUTO, PASS, SpeculationConfig
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.kernels.cpu import CAN_RUN, LIKE, is_fast_for_many, layer_rows, row_product, serves
from retrieve_spec.recorded.kv_buffer import cache_windows
from retrieve_spec.recorded.layer_copies import copied_layers
from retrieve_spec.recorded.model_state import Attribute, ModelState
from retrieve_spec.recorded.packed_pass import PassGraphs, why_not_triton
from retrieve_spec.recorded.recorded_pass import RecordedPass, RecordingError, check_recordable, has_adapters_of_a_call
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.recorded.verdicts import KeptFindings, Verdict
from retrieve_spec.verify.cache import GROW_BY_ROWS
from retrieve_spec.verify.comparison import Rounding, is_exact, rows_for_one_order, why_not_one_order
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, input_device, new_cache, read_interface
from retrieve_spec.verify.probe import REACH, Finding, call_once
from retrieve_spec.verify.shrink import float32_copy, shrunk
from retrieve_spec.verify.signatures import SignatureModes
from retrieve_spec.verify.steps import StepVerifier, held_by, keeping_texts
from retrieve_spec.verify.tensor_parallel import Ranks
from retrieve_spec.verify.trials import PROMPT, Trial, VerificationError, check_exact, check_verifier
from retrieve_spec.verify.verifier import PassKind, Verifier
from retrieve_spec.verify.ways import layout_of, same_way, way_of_layout

logger = logging.getLogger(__name__)


def try_recording(
    model: Any, finding: Finding, config: SpeculationConfig, layer: Layer = "last"
) -> tuple[RecordedVerifier | None, str]:
    """Record a model's pass if that is wanted and possible, and the recording agrees with the model.

    Parameters
    ----------
    model
        The model.
    finding
        How an `HFVerifier` verifies it.
    config
        `recorded_pass` says whether to record.
    layer
        The layer whose hidden states are recorded.

    Returns
    -------
    recording
        A verifier that makes others of the same recording (`RecordedVerifier.fresh`), or None.
    reason
        Why there is none.
    """
    try:
        check_recorded(model, finding, config)
        exact = _rows_of_exact_passes(model) if config.exact else 0
        _check_structure(model, finding.interface, layer, exact)
        *ways, last = _ways(model, layer)
        for kernels, like in ways:
            try:
                return _record(model, finding, layer, kernels, exact, like), ""
            except VerificationError as error:
                if isinstance(error, RecordingError) and not like:
                    raise  # the trace failed, not the kernels for rows
                logger.info("the pass is recorded in another way: %s", error)
        return _record(model, finding, layer, last[0], exact, last[1]), ""
    except VerificationError as error:
        return None, str(error)


def record_again(model: Any, finding: Finding, layer: Layer, verdict: Verdict) -> RecordedVerifier:
    """Record a model as in the process that kept a verdict about its recording.

    Raises
    ------
    RecordingError
        It cannot be recorded, or the trace is not the one that was examined.
    """
    kernels = _row_kernels(model) if verdict.by_kernels else None
    like = copied_layers(model) if verdict.by_copies else []
    recording = _recorded(model, finding, layer, kernels, verdict.rows, like, verdict.has_graphs)
    if recording.recorded.traced != verdict.traced:
        raise RecordingError("another forward was traced")
    return recording


def _rows_of_exact_passes(model: Any) -> int:
    """Return the fewest rows of an exact pass; 1 where torch's products have no single order. Those of a GPU's kernels
    and of row programs have.
    """
    return (input_device(model).type == "cpu" and rows_for_one_order(model)) or 1


def _ways(model: Any, layer: Layer) -> list[tuple[Any, list[int]]]:
    """Return how to record a model, fast ways first: the kernels for rows, and which layers stand for others."""
    kernels = _row_kernels(model)
    ways: list[tuple[Any, list[int]]] = [(kernels, [])]
    if layer == "last" and (like := copied_layers(model)):
        ways.insert(0, (kernels, like))
    return ways if kernels is None else [*ways, (None, [])]


def _row_kernels(model: Any) -> Any:
    """Return the module of kernels that replace a model's row operations; None where there is none."""
    device = input_device(model).type
    if not PASS.fused_rows or (device == "cpu" and model.dtype not in LIKE):
        return None
    if device == "cpu":
        return layer_rows
    return None if why_not_triton(device) else importlib.import_module("retrieve_spec.kernels.triton_rows")


def _record(
    model: Any, finding: Finding, layer: Layer, row_kernels: Any, exact: int, like: list[int]
) -> RecordedVerifier:
    """Return a recording that agrees with the model, with CUDA graphs where these agree."""
    recording = _recorded(model, finding, layer, row_kernels, exact, like, PASS.cuda_graphs)
    for trial in _trials(model) if is_exact(model) else [Trial(PROMPT, 0)]:
        try:
            check_verifier(model, recording, "tree", finding.texts, trial)
        except VerificationError as error:
            if recording.graphs is None:
                raise
            logger.debug("the recorded pass with graphs is not used: %s", error)
            recording.graphs = None
            check_verifier(model, recording, "tree", finding.texts, trial)
    if exact:
        check_exact(model, recording.fresh, finding.texts)
    return recording


def _recorded(
    model: Any, finding: Finding, layer: Layer, row_kernels: Any, exact: int, like: list[int], graphs: bool
) -> RecordedVerifier:
    """Return a recording, with CUDA graphs if they are wanted and there is a CUDA device."""
    windows = cache_windows(new_cache(model))
    recorded = RecordedPass(model, len(windows), layer, row_kernels, exact, like)
    if exact == 1 and recorded.device.type == "cpu" and not recorded.attends_rows:
        raise RecordingError("linear layers add up a row in another order when there are more of them")
    for at, (rule, window) in enumerate(zip(recorded.rules, windows, strict=True)):
        if window and rule.window != window:
            raise RecordingError(f"the attention of layer {at} does not name the window of its cache")
    own = HFVerifier(model, finding.interface)
    return RecordedVerifier(
        model, own, recorded, PassGraphs(recorded) if graphs and recorded.device.type == "cuda" else None
    )


def _check_structure(model: Any, interface: ModelInterface, layer: Layer, exact: int) -> None:
    """Look for faults of recorded passes of float32 copies of a model, past windows that its own trial is not past."""
    copies = [] if is_exact(model) else [float32_copy(model)]
    windows = cache_windows(new_cache(model))
    if any(windows) and (max(windows) > REACH or not is_exact(model)):
        copies.append(shrunk(model))
    for copied in (copied for copied in copies if copied is not None):
        recorded = RecordedPass(copied, len(new_cache(copied).layers), layer, exact=exact)
        verifier = RecordedVerifier(copied, HFVerifier(copied, same_way(copied, interface)), recorded)
        for trial in _trials(copied):
            check_verifier(copied, verifier, trial=trial)


def _trials(model: Any) -> list[Trial]:
    """A short text, and one that is longer than a model's windows where these are short."""
    longest = max(cache_windows(new_cache(model)), default=0)
    return [Trial(PROMPT, 0)] + [Trial(longest + 3, 0, 2)] * (0 < longest <= REACH)


def check_recorded(model: Any, finding: Finding, config: SpeculationConfig) -> None:
    """Check whether a model can be recorded, as far as that is known without trying.

    Raises
    ------
    RecordingError
        It cannot.
    """
    if finding.mode != "tree":
        raise RecordingError(f"drafts are verified in {finding.mode} mode")
    check_asked(model, config)
    if model.config.is_encoder_decoder:
        raise RecordingError("the model has an encoder")
    device = input_device(model).type
    if config.exact and (why := why_not_one_order(model) or (device != "cpu" and why_not_triton(device))):
        raise RecordingError(why)
    if finding.interface.places:
        raise RecordingError("the model derives positions itself")
    if Ranks.of(model) is not None:
        raise RecordingError("the model is spread over several processes")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise RecordingError("the model is spread over several devices")
    check_recordable(model)
    if getattr(model.config.get_text_config(decoder=True), "attention_chunk_size", None):
        raise RecordingError("its attention is cut into chunks")
    for layer in new_cache(model).layers:
        if type(layer) not in GROW_BY_ROWS:
            raise RecordingError(f"its cache has layers of type {type(layer).__name__}")


def check_asked(model: Any, config: SpeculationConfig) -> None:
    """Check that a config allows a faster pass than the model's own.

    Raises
    ------
    RecordingError
        It does not.
    """
    if config.recorded_pass == "off":
        raise RecordingError("recorded_pass is off")
    if config.recorded_pass == AUTO and model.num_parameters() < PASS.min_parameters:
        raise RecordingError(f"the model has fewer than {PASS.min_parameters:,} parameters")


_Taken = tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]
"""A layer's attributes, and the `forward` that is set among them while a pass runs."""


class RowLayers:
    """The linear layers of one model whose products are faster by programs.

    Parameters
    ----------
    model
        A model on a CPU; others have no such layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[_Taken] = []
        self._threads: set[int] = set()  # threads that run passes
        for module in model.modules() if CAN_RUN else ():
            if type(module) is not nn.Linear or "forward" in vars(module) or not _is_fast(module.weight):
                continue
            self._layers.append((vars(module), _forward_by_programs(module, self._threads)))

    def __len__(self) -> int:
        return len(self._layers)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Let passes that this thread runs inside the block multiply by programs."""
        self._threads.add(get_ident())
        try:
            for attributes, ours in self._layers:
                attributes.setdefault("forward", ours)
            yield
        finally:
            self._threads.discard(get_ident())
            for attributes, ours in self._layers:
                if attributes.get("forward") is ours:
                    del attributes["forward"]


def _is_fast(weight: torch.Tensor) -> bool:
    return is_fast_for_many(weight.dtype) and serves(weight)


def _forward_by_programs(module: nn.Linear, threads: set[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a layer's forward for the time that passes run."""
    parameters = module._parameters

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = parameters["weight"]
        assert weight is not None
        if input.dtype != weight.dtype or not _is_fast(weight) or get_ident() not in threads:
            return nn.Linear.forward(module, input)
        return row_product(input, weight, parameters["bias"])

    return forward


_READY_MADE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends while a model is examined: cuDNN's, which torch prefers on some GPUs, plans again for every
length.
"""
STATES = 16
"""States of a model that are kept."""


@dataclass(slots=True)
class _Known:
    """What was found about a model in one state.

    `layers` make the products of its own forward faster.
    """

    state: ModelState
    finding: Finding
    recording: RecordedVerifier | None = None
    why: str = ""
    layers: RowLayers | None = None

    def release(self) -> None:
        """Release what is kept for the next generation in this state."""
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

    Attributes
    ----------
    finding
        How the model is verified through its own forward, when last examined.
    kept
        What is kept of the model between processes.
    """

    finding: Finding

    def __init__(
        self, model: Any, config: SpeculationConfig, layer: Layer, find_mode: Callable[[Any], Finding]
    ) -> None:
        self._model, self._config, self._layer, self._find_mode = model, config, layer, find_mode
        self._is_frozen = False
        self._known: list[_Known] = []
        self.kept = KeptFindings(model, config, layer)
        self._examine(is_first=True)

    @property
    def pass_kind(self) -> PassKind:
        """Which pass verifies, when last examined."""
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

    def __call__(self) -> Verifier:
        """Return a verifier for a generation that begins now."""
        autocast = torch.is_autocast_enabled(input_device(self._model).type)
        if self._is_frozen and not autocast and self._known and (recording := self._known[0].recording) is not None:
            recording.recorded.freeze()
            return recording.fresh(None, self._known[0].finding.signatures)
        known = self._current()
        found = known.finding
        if found.mode == "plain":
            return StepVerifier(self._model, found.reason)
        if autocast and self._config.exact:
            return StepVerifier(self._model, "autocast is on")
        if known.recording is None or autocast:
            layers = None if autocast else known.layers
            own = HFVerifier(self._model, found.interface, found.mode, found.reason, found.signatures, layers)
            own.pass_reason = "autocast is on" if autocast else known.why
            return own
        if known.recording.graphs is not None and known.state.has_moved():
            known.recording.graphs.clear()  # they contain old addresses
        return known.recording.fresh(known.state, found.signatures)

    def assume_frozen(self) -> None:
        """Assume that a recorded model does not change: generations no longer compare it and its weights before they
        begin.
        """
        self._is_frozen = True

    def invalidate(self) -> None:
        """Forget what was found and recorded: the next generation examines the model again."""
        self._is_frozen = False
        self._known.clear()

    def _current(self) -> _Known:
        """Return what is known of the model's state; examine the model if nothing is."""
        known = next((known for known in self._known if known.state.holds()), None)
        if known is None:
            return self._examine()
        if known is not self._known[0]:
            self._known[0].release()
            self._known.remove(known)
            self._known.insert(0, known)
        return known

    def _examine(self, is_first: bool = False) -> _Known:
        """Probe the model, record it if possible, and keep both for its state.

        The `first` time in a process, an earlier process's verdict may replace the probe.
        """
        if has_adapters_of_a_call(self._model):  # it is not cached
            why = "adapters are chosen for this call alone"
            self.finding = Finding("plain", why, read_interface(self._model))
            return _Known(ModelState(self._model), self.finding)
        no_autocast = torch.autocast(input_device(self._model).type, enabled=False)
        with no_autocast, sdpa_kernel(_READY_MADE):
            known = (self._found_before() if is_first else None) or self._find_out(is_first)
        self.finding = known.finding
        for other in self._known:
            other.release()
        others = [other for other in self._known if known.state.keeps(other.state)]
        self._known = [known, *others[: STATES - 1]]
        return known

    def _find_out(self, is_first: bool) -> _Known:
        """Probe the model, and record it if it may be."""
        with keeping_texts(self._model):
            loaded = ModelState(self._model)
            call_once(self._model)
            called = ModelState(self._model)
            finding = self._find_mode(self._model)
            replaced, kept_of_texts = loaded.replaced()
            kept = called.replaced()[0] | kept_of_texts
            self._overwrite_texts(kept)
            recording, why = try_recording(self._model, finding, self._config, self._layer)
            if self._config.exact and recording is None and finding.mode != "plain":
                finding = replace(finding, mode="plain", reason=f"no pass is exact here: {why}")
            known = _Known(ModelState(self._model, kept), finding, recording, why)
            if recording is None and finding.mode != "plain":
                known.layers = self._row_layers(finding)
        finding.texts.clear()
        if finding.mode == "tree" and not kept and not replaced and is_first:
            self._keep(known)
        return known

    def _found_before(self) -> _Known | None:
        """Return what an earlier process found about the model; None where there is no verdict, or it does not hold."""
        verdict = self.kept.verdict
        if verdict is None:
            return None
        read = read_interface(self._model)
        interface = way_of_layout(self._model, read, verdict.layout)
        if interface is None:
            return None
        interface = replace(
            interface,
            takes_padding=verdict.takes_padding,
            takes_pieces=verdict.takes_pieces,
            max_positions=verdict.max_positions,
        )
        rounding = Rounding(self._model.dtype, verdict.exact, verdict.largest, verdict.rms)
        finding = Finding("tree", "", interface, SignatureModes(rounding))
        known = _Known(ModelState(self._model), finding)
        try:
            check_recorded(self._model, finding, self._config)
            if verdict.traced:
                with keeping_texts(self._model):
                    known.recording = record_again(self._model, finding, self._layer, verdict)
                return known
        except VerificationError as error:
            if verdict.traced:
                return None
            known.why = str(error)
        known.layers = RowLayers(self._model) if verdict.has_layers else None
        return known

    def _keep(self, known: _Known) -> None:
        """Keep what a probe found for later processes, unless another time might give a better result."""
        finding, recording = known.finding, known.recording
        if recording is None:
            try:
                check_recorded(self._model, finding, self._config)
                return  # the trace or its trial failed, perhaps because memory ran out
            except VerificationError:
                pass
        way, rounding = finding.interface, finding.signatures.rounding
        assert rounding is not None  # a tree was tried
        verdict = Verdict(
            layout_of(way), way.takes_padding, way.takes_pieces, way.max_positions,
            rounding.exact, rounding.largest, rounding.rms, has_layers=known.layers is not None,
        )  # fmt: skip
        if recording is not None:
            recorded = recording.recorded
            verdict = replace(
                verdict, traced=recorded.traced, by_kernels=recorded.by_kernels, by_copies=recorded.by_copies,
                rows=recorded.exact, has_graphs=recording.graphs is not None,
            )  # fmt: skip
        self.kept.keep(verdict)

    def _overwrite_texts(self, replaced: Collection[Attribute]) -> None:
        """Overwrite what the model keeps of texts, so that a recording that reads it disagrees."""
        for module, name, value in held_by(self._model):
            if (type(module), name) in replaced:
                setattr(module, name, value + 1)

    def _row_layers(self, finding: Finding) -> RowLayers | None:
        """Return the layers that multiply by programs in passes of the model's own forward, if these agree."""
        if self._model.training:
            return None
        try:
            check_asked(self._model, self._config)
            layers = RowLayers(self._model)
            if len(layers):
                own = HFVerifier(self._model, finding.interface, finding.mode, around=layers)
                check_verifier(self._model, own, finding.mode, finding.texts)
        except VerificationError as error:
            logger.debug("layers multiply as ever: %s", error)
            return None
        return layers if len(layers) else None
