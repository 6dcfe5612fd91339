"""A pretended GPU, with a stand-in for the Triton kernel or without; and processes for the kernel itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import triton_process
from drawn_by_host import triton_sampling_twin, triton_topk_twin
from pretend_cuda import PretendCuda, triton_stand_in

import retrieve_spec.kernels
from retrieve_spec.recorded import packed_pass
from retrieve_spec.sampling import acceptance, samplers

TRIALS = (packed_pass.why_not_triton, packed_pass.processors, samplers.draws_alike, acceptance.packing)


@pytest.fixture
def gpu() -> Iterator[PretendCuda]:
    for trial in TRIALS:
        trial.cache_clear()
    with PretendCuda() as pretended:
        yield pretended
    for trial in TRIALS:
        trial.cache_clear()


@pytest.fixture(scope="session")
def interpret() -> Iterator[triton_process.Interpret]:
    with triton_process.interpreter() as one:
        yield one


def stand_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let a module stand for the one of its name."""
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(retrieve_spec.kernels, module.__name__.rpartition(".")[2], module, raising=False)


@pytest.fixture
def drawn_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, triton_sampling_twin())
    stand_in(monkeypatch, triton_topk_twin())


@pytest.fixture
def with_triton(gpu: PretendCuda, drawn_by_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, triton_stand_in(gpu))
