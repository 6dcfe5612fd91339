"""A pretended GPU, with a stand-in for the Triton kernel or without."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from pretend_cuda import PretendCuda, triton_stand_in

import retrieve_spec.kernels
from retrieve_spec import attention
from retrieve_spec.recorded import packed_pass


@pytest.fixture
def gpu() -> Iterator[PretendCuda]:
    attention.why_not_triton.cache_clear()
    packed_pass.why_not_packed.cache_clear()
    attention.processors.cache_clear()
    with PretendCuda() as pretended:
        yield pretended
    attention.why_not_triton.cache_clear()
    packed_pass.why_not_packed.cache_clear()
    attention.processors.cache_clear()


@pytest.fixture
def with_triton(gpu: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    module = triton_stand_in(gpu)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(retrieve_spec.kernels, "triton_tree_attention", module, raising=False)
    monkeypatch.setattr(attention, "has_triton", lambda: True)
