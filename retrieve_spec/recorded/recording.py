"""Recording attempts: a model's pass is recorded if that is wanted, possible, and gives what the model gives."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

import torch

from retrieve_spec.attention.tree_attention import why_not_triton
from retrieve_spec.config import AUTO, PASS, SpeculationConfig
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.recorded.cuda.pass_graphs import PassGraphs
from retrieve_spec.recorded.kv_buffer import cache_windows, why_not_preallocated
from retrieve_spec.recorded.model_state import ModelState
from retrieve_spec.recorded.recordable import why_not_recordable
from retrieve_spec.recorded.recorded_pass import RecordedPass, RecordingError
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.recorded.weight_layout import Layouts
from retrieve_spec.verify.call_kinds import CallKinds
from retrieve_spec.verify.candidates import PROMPT, same_way
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, input_device, new_cache
from retrieve_spec.verify.number_format import is_exact, rows_for_one_order
from retrieve_spec.verify.probe import REACH, Finding, Trial, check_verifier, float32_copy, why_not_exact
from retrieve_spec.verify.shrink import shrunk
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
    graphs
        CUDA graphs of it; None without.
    """

    model: Any
    interface: ModelInterface
    recorded: RecordedPass
    graphs: PassGraphs | None = None

    def __call__(self, state: ModelState | None = None, kinds: CallKinds | None = None) -> RecordedVerifier:
        """Make a verifier, which refuses a model that is not in `state` any more; `kinds`: as of `HFVerifier`."""
        own = HFVerifier(self.model, self.interface, kinds=kinds)
        return RecordedVerifier(self.model, own, self.recorded, self.graphs, state)


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
        if why := _why_not_structure(model, finding.interface, layer, config.exact):
            return None, why
        if config.exact:
            return _record_exactly(model, finding, layer)
        row_kernels = _row_kernels(model)
        recording, why = _record(model, finding, layer, row_kernels, layouts)
        if recording is None and row_kernels is not None:
            logger.info("the pass is recorded again without kernels for rows: %s", why)
            recording, why = _record(model, finding, layer, None, layouts)
    except RecordingError as error:
        return None, str(error)
    return recording, why


def _row_kernels(model: Any) -> Any:
    """Module of the kernels that stand for what a 16-bit model does to rows; None where there is none."""
    device = input_device(model).type
    if not PASS.fused_rows or model.dtype.itemsize != 2:
        return None
    if device == "cpu" and model.dtype == torch.bfloat16:
        return importlib.import_module("retrieve_spec.kernels.bfloat16_rows")
    return None if why_not_triton(device) else importlib.import_module("retrieve_spec.kernels.triton_rows")


def _record_exactly(model: Any, finding: Finding, layer: Layer) -> tuple[Recording | None, str]:
    """A recording whose passes give a row the same logits bit for bit with drafts and without; or why there is none."""
    with torch.inference_mode():
        rows = rows_for_one_order(model)
    if not rows:
        return None, "linear layers add up a row in another order when there are more of them"
    recorded = RecordedPass(model, len(cache_windows(new_cache(model))), layer, _row_kernels(model), exact=rows)
    recording = Recording(model, finding.interface, recorded)
    why = check_verifier(model, recording(), "tree", finding.texts) or why_not_exact(model, recording, finding.texts)
    return (None, why) if why else (recording, "")


def _record(
    model: Any, finding: Finding, layer: Layer, row_kernels: Any, layouts: Layouts | None
) -> tuple[Recording | None, str]:
    """A recording, with CUDA graphs where they agree with the model; or why there is none."""
    windows = cache_windows(new_cache(model))
    recorded = RecordedPass(model, len(windows), layer, row_kernels, layouts)
    if why := _why_not_windows(recorded, windows):
        return None, why
    graphs = PASS.cuda_graphs and recorded.device.type == "cuda"
    why = ""
    for captured in (PassGraphs(recorded), None) if graphs else (None,):
        recording = Recording(model, finding.interface, recorded, captured)
        why = check_verifier(model, recording(), "tree", finding.texts)
        if not why:
            return recording, ""
        logger.debug("the recorded pass %s graphs is not used: %s", "without" if captured is None else "with", why)
    return None, why


def _why_not_structure(model: Any, interface: ModelInterface, layer: Layer, exact: bool) -> str:
    """What is wrong with recorded passes of float32 copies of a model, past its windows too; empty when nothing is."""
    copies = [] if is_exact(model) else [float32_copy(model)]
    if any(cache_windows(new_cache(model))):
        copies.append(shrunk(model)[0])
    for copied in copies:
        if copied is None:
            continue
        windows = cache_windows(new_cache(copied))
        way = same_way(copied, interface)
        recording = Recording(copied, way, RecordedPass(copied, len(windows), layer, exact=int(exact)))
        longest = max(windows)
        for trial in [Trial(PROMPT, 0)] + [Trial(longest + 3, 0, 2)] * (0 < longest <= REACH):
            if why := check_verifier(copied, recording(), trial=trial):
                return why
    return ""


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
    if config.exact and input_device(model).type != "cpu":
        return "exact passes are for a CPU"
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
