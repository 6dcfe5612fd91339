"""Recording of a model: what makes its recorded verifiers, with CUDA graphs or without, if it agrees with the model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from transformers import DynamicCache

from retrieve_spec.attention.tree_attention import why_not_triton
from retrieve_spec.config import AUTO, PASS, SpeculationConfig
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.recorded.cuda.pass_pool import PassPool
from retrieve_spec.recorded.kv_buffer import cache_windows, why_not_preallocated
from retrieve_spec.recorded.recorded_pass import RecordedPass, RecordingError
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, input_device
from retrieve_spec.verify.probe import Finding, check_verifier
from retrieve_spec.verify.tensor_parallel import Ranks
from retrieve_spec.verify.verifier import Verifier

logger = logging.getLogger(__name__)

_recorded: WeakKeyDictionary[Any, RecordedPass] = WeakKeyDictionary()
"""Recordings of live models, so that accelerating a model again does not record it again."""


def try_build(
    model: Any, finding: Finding, config: SpeculationConfig, layer: Layer = "last"
) -> tuple[Callable[[], Verifier] | None, str]:
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

    Returns
    -------
    make
        Makes a verifier for one generation, or None.
    reason
        Why there is none.
    """
    text_config = model.config.get_text_config(decoder=True)
    if why := _why_not_recorded(model, finding, config) or why_not_preallocated(text_config):
        return None, why
    try:
        for fused in (True, False):
            make, why = _try_recording(model, finding.interface, layer, fused and _fuses(model))
            if make is not None or not (fused and _fuses(model)):
                break
            logger.info("the pass is recorded again without GPU kernels for rows: %s", why)
    except RecordingError as error:
        return None, str(error)
    return make, why


def _fuses(model: Any) -> bool:
    """Whether GPU kernels stand in for what the model does to rows."""
    return PASS.fused_rows and model.dtype.itemsize == 2 and not why_not_triton(input_device(model).type)


def _try_recording(
    model: Any, interface: ModelInterface, layer: Layer, fused: bool
) -> tuple[Callable[[], Verifier] | None, str]:
    """What makes verifiers over a recording, with CUDA graphs where they agree with the model; or why not."""
    windows = cache_windows(DynamicCache(config=model.config.get_text_config(decoder=True)))
    captured = _recorded.get(model)
    if captured is None or captured.layer != layer or not captured.is_current(model):
        captured = _recorded[model] = RecordedPass(model, len(windows), layer, fused)
    if why := _why_not_windows(captured, windows):
        return None, why
    graphs = PASS.cuda_graphs and captured.device.type == "cuda"
    why = ""
    for pool in (PassPool(captured), None) if graphs else (None,):
        make = functools.partial(_make, model, interface, captured, pool)
        why = check_verifier(model, interface, make())
        if not why:
            return make, ""
        logger.debug("the recorded pass %s graphs is not used: %s", "without" if pool is None else "with", why)
    del _recorded[model]
    return None, why


def _make(model: Any, interface: ModelInterface, captured: RecordedPass, pool: PassPool | None) -> Verifier:
    return RecordedVerifier(model, HFVerifier(model, interface), captured, pool)


def _why_not_windows(captured: RecordedPass, windows: tuple[int, ...]) -> str:
    for layer, (rule, window) in enumerate(zip(captured.rules, windows, strict=True)):
        if window and rule.window != window:
            return f"the attention of layer {layer} does not name the window of its cache"
    return ""


def _why_not_recorded(model: Any, finding: Finding, config: SpeculationConfig) -> str:
    if finding.mode != "tree":
        return f"drafts are verified in {finding.mode} mode"
    if config.recorded_pass == "off":
        return "recorded_pass is off"
    if config.recorded_pass == AUTO and model.num_parameters() < PASS.min_parameters:
        return f"the model has fewer than {PASS.min_parameters:,} parameters"
    if Ranks.of(model) is not None:
        return "the model is spread over several processes"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "the model is spread over several devices"
    return ""
