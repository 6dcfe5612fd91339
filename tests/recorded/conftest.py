"""A pretended GPU, with a stand-in for the Triton kernel or without."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from drawn_by_host import triton_sampling_twin
from pretend_cuda import PretendCuda, triton_stand_in

import retrieve_spec.kernels
from retrieve_spec import attention
from retrieve_spec.recorded import packed_pass
from retrieve_spec.sampling import device_acceptance

TRIALS = (
    attention.why_not_triton, attention.processors, packed_pass.why_not_packed, device_acceptance.draws_alike
)  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[PretendCuda]:
    for trial in TRIALS:
        trial.cache_clear()
    with PretendCuda() as pretended:
        yield pretended
    for trial in TRIALS:
        trial.cache_clear()


@pytest.fixture
def drawn_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    module = triton_sampling_twin()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(retrieve_spec.kernels, "triton_sampling", module, raising=False)


@pytest.fixture
def with_triton(gpu: PretendCuda, drawn_by_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = triton_stand_in(gpu)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(retrieve_spec.kernels, "triton_tree_attention", module, raising=False)
    monkeypatch.setattr(attention, "has_triton", lambda: True)
