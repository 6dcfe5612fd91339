"""Cost probe: what passes of a model cost, measured before its first generation."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import numpy as np
import torch

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.verify.interface import input_device
from retrieve_spec.verify.steps import prepare_call
from retrieve_spec.verify.verifier import VerifierInputs

_CONTEXT = 128
_WIDTHS = (0, 4, 16, 64)
_REPEATS = 3
_SECONDS = 0.6
_ROOT, _NOTHING = np.array([1], np.int32), np.empty(0, np.int32)


def measure_passes(model: Any, speculation: Speculation) -> None:
    """Time passes over chains of a few widths until a time limit; wider ones are skipped when time runs out."""
    if speculation.mode in ("plain", "delegated"):
        return
    vocab = model.config.get_text_config(decoder=True).vocab_size
    seconds = _SECONDS if speculation.ranks is None else math.inf  # ranks must run the same passes
    limits = (speculation.interface.max_positions, speculation.interface.max_slots)
    positions = min((limit for limit in limits if limit), default=_CONTEXT + max(_WIDTHS) + 1)
    context = max(min(_CONTEXT, positions - max(_WIDTHS) - 1), 1)
    prompt = torch.as_tensor((np.arange(context) * 31 + 7) % vocab, device=input_device(model))[None]
    verifier = speculation.verifiers()[0]
    with torch.no_grad():
        call = prepare_call(model, prompt, torch.ones_like(prompt))
        verifier.start(VerifierInputs(prompt, call.take(), max_length=context + max(_WIDTHS) + _REPEATS * 8))
        verifier.forward(prompt[0].cpu().numpy().astype(np.int32))
        verifier.commit(_NOTHING)
        verifier.forward(_ROOT)  # the first pass of a kind pays for set-up
        verifier.commit(_NOTHING)
        began = perf_counter()
        for width in _WIDTHS:
            if width > positions - context - 8:
                break
            tree = DraftTree.from_paths([[(i * 17 + 3) % vocab for i in range(width)]])
            times: list[float] = []
            is_ready = prompt.device.type != "cuda"  # the first pass of a width may compile kernels and capture a graph
            while len(times) < _REPEATS and (not times or perf_counter() - began <= seconds):
                started = perf_counter()
                float(verifier.forward(_ROOT, tree).logits[0, 0])  # waits for the device
                took = perf_counter() - started
                verifier.commit(_NOTHING)
                if is_ready:
                    times.append(took)
                else:
                    began, is_ready = began + took, True
            speculation.cost.observe(width, context, min(times))
            if perf_counter() - began > seconds:
                break
        speculation.cost.seconds(context, 0)  # takes them in: no call waits for the kernel that does
        verifier.finish()
