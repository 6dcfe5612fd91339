"""Models on a pretended GPU whose verifiers share one recording."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any
from unittest.mock import patch

import torch
from pretend_cuda import CudaTensor, PretendCuda, moved_recording
from scripted_drafter import ScriptedDrafter
from small_decoders import VOCAB, build

import retrieve_spec as rs
from retrieve_spec import acceleration
from retrieve_spec.recorded.packed_pass import PassGraphs
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.probe import Finding


@functools.cache
def _found(family: str) -> tuple[RecordedPass, Finding]:
    """A recording of a family's model, which is the same at every call, and what the probe finds of it."""
    model = build(family)
    return RecordedPass(model, 2), acceleration._find_mode(model)


class Placed:
    """A model on the pretended GPU whose verifiers share a recording, and the counts at the begin of every pass."""

    def __init__(self, gpu: PretendCuda, family: str = "llama", index: int = 0) -> None:
        self.host = build(family)
        self.gpu, self.device = gpu, torch.device("cuda", index)
        self.begins: list[tuple[Counter[str], ...]] = []
        self.numbers: list[int] = []
        self.model = copy.deepcopy(self.host).to(self.device)
        recorded, self._finding = _found(family)
        self.recorded = moved_recording(recorded, index)

    def prepare(self, **options: Any) -> None:
        # What the probe finds does not depend on the device, and operations here take a hundred times as long;
        # `gpu_check.py` on the pretended GPU probes there.
        with patch.object(acceleration, "_find_mode", lambda model: self._finding):
            rs.accelerate(self.model, recorded_pass="off", **options)

    def accelerate(self, answer: Any, script: str = "branchy", graphs: bool = True) -> PassGraphs | None:
        model, interface, recorded = self.model, read_interface(self.model), self.recorded
        self.prepare(drafter=ScriptedDrafter(answer, script, vocab=VOCAB), nodes=24)
        captured, placed = PassGraphs(recorded) if graphs else None, self

        class Counted(RecordedVerifier):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                placed.numbers.append(placed.gpu.numbers)
                placed.begins.append(tuple(map(Counter, (placed.gpu.waits, placed.gpu.uploads, placed.gpu.ran))))
                return super().forward(*args, **kwargs)

        model.speculation._make_verifier = lambda: Counted(model, HFVerifier(model, interface), recorded, captured)
        return captured

    def generate(self, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
        self.begins.clear()
        self.numbers.clear()
        out = self.model.generate(prompt.to(self.device), **options)
        assert isinstance(out, CudaTensor) and out.device == self.device
        return out.host

    def steps(self) -> list[tuple[Counter[str], ...]]:
        """What every step but the prompt's and the last one counted: waits, uploads, operations beside replays."""
        pairs = zip(self.begins[1:-1], self.begins[2:], strict=True)
        return [tuple(a - b for a, b in zip(after, before, strict=True)) for before, after in pairs]
