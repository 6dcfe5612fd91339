"""Recording attempts: a model's pass is recorded if that is wanted, possible, and gives what the model gives."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from retrieve_spec.attention.tree_attention import why_not_triton
from retrieve_spec.config import AUTO, PASS, SpeculationConfig
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.recorded.cuda.pass_pool import PassPool
from retrieve_spec.recorded.kv_buffer import cache_windows, why_not_preallocated
from retrieve_spec.recorded.model_state import ModelState
from retrieve_spec.recorded.recordable import why_not_recordable
from retrieve_spec.recorded.recorded_pass import RecordedPass, RecordingError
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.recorded.weight_layout import Layouts
from retrieve_spec.verify.call_kinds import CallKinds
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, input_device, new_cache
from retrieve_spec.verify.probe import Finding, check_verifier
from retrieve_spec.verify.tensor_parallel import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded pass that agrees with its model; calling it makes a verifier for one generation.

    Attributes
    ----------
    model, interface
        The model, and how an `HFVerifier` runs it.
    recorded
        The pass.
    pool
        CUDA graphs and KV buffers that one generation after another borrows; None without graphs.
    """

    model: Any
    interface: ModelInterface
    recorded: RecordedPass
    pool: PassPool | None = None

    def __call__(self, state: ModelState | None = None, kinds: CallKinds | None = None) -> RecordedVerifier:
        """Make a verifier, which refuses a model that is not in `state` any more; `kinds`: as of `HFVerifier`."""
        own = HFVerifier(self.model, self.interface, kinds=kinds)
        return RecordedVerifier(self.model, own, self.recorded, self.pool, state)


def try_recording(
    model: Any, finding: Finding, config: SpeculationConfig, layer: Layer = "last", layouts: Layouts | None = None
) -> tuple[Recording | None, str]:
    """Record a model's pass if that is wanted, can be done and agrees with the model.

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
    layouts
        Copies of the model's weights that other recordings share.

    Returns
    -------
    recording
        The recording, or None.
    reason
        Why there is none.
    """
    if why := why_not_recorded(model, finding, config):
        return None, why
    recording = None
    try:
        for fused in (True, False):
            recording, why = _record(model, finding.interface, layer, fused and _fuses(model), layouts)
            if recording is not None or not (fused and _fuses(model)):
                break
            logger.info("the pass is recorded again without GPU kernels for rows: %s", why)
    except RecordingError as error:
        return None, str(error)
    return recording, why


def _fuses(model: Any) -> bool:
    """Whether GPU kernels stand in for what the model does to rows."""
    return PASS.fused_rows and model.dtype.itemsize == 2 and not why_not_triton(input_device(model).type)


def _record(
    model: Any, interface: ModelInterface, layer: Layer, fused: bool, layouts: Layouts | None
) -> tuple[Recording | None, str]:
    """A recording, with CUDA graphs where they agree with the model; or why there is none."""
    windows = cache_windows(new_cache(model))
    recorded = RecordedPass(model, len(windows), layer, fused, layouts)
    if why := _why_not_windows(recorded, windows):
        return None, why
    graphs = PASS.cuda_graphs and recorded.device.type == "cuda"
    why = ""
    for pool in (PassPool(recorded), None) if graphs else (None,):
        recording = Recording(model, interface, recorded, pool)
        why = check_verifier(model, interface, recording())
        if not why:
            return recording, ""
        logger.debug("the recorded pass %s graphs is not used: %s", "without" if pool is None else "with", why)
    return None, why


def _why_not_windows(recorded: RecordedPass, windows: tuple[int, ...]) -> str:
    for layer, (rule, window) in enumerate(zip(recorded.rules, windows, strict=True)):
        if window and rule.window != window:
            return f"the attention of layer {layer} does not name the window of its cache"
    return ""


def why_not_recorded(model: Any, finding: Finding, config: SpeculationConfig) -> str:
    """Why a model is not to be recorded, as far as can be told without trying; empty when it is."""
    if finding.mode != "tree":
        return f"drafts are verified in {finding.mode} mode"
    if why := why_unasked(model, config):
        return why
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if finding.interface.places:
        return "the model derives positions itself"
    if Ranks.of(model) is not None:
        return "the model is spread over several processes"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the model is spread over several devices"
    return why_not_recordable(model) or why_not_preallocated(model.config.get_text_config(decoder=True))


def why_unasked(model: Any, config: SpeculationConfig) -> str:
    """Why a config asks for no faster pass than the model's own; empty when it does."""
    if config.recorded_pass == "off":
        return "recorded_pass is off"
    if config.recorded_pass == AUTO and model.num_parameters() < PASS.min_parameters:
        return f"the model has fewer than {PASS.min_parameters:,} parameters"
    return ""
