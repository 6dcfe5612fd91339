"""A second process compiles the kernels of drafting; whatever becomes of it, drafting works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

from retrieve_spec.acceleration import accelerate
from retrieve_spec.drafting import first_start
from retrieve_spec.reference_model import load_model

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "processors", lambda: 2)
    monkeypatch.setattr(first_start, "is_compiled", lambda: False)


def test_a_process_that_still_compiles_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "_COMPILE", [sys.executable, "-c", "import time; time.sleep(3600)"])
    with first_start.compiled_beside() as process:
        assert process is not None and process.poll() is None
    assert process.returncode is not None


def test_none_is_started_where_it_would_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "_COMPILE", ["/no/such/program"])
    with first_start.compiled_beside() as process:
        assert process is None, "none can be"
    monkeypatch.setattr(first_start, "_COMPILE", [sys.executable, "-c", ""])
    for name, told in (("processors", lambda: 1), ("is_compiled", lambda: True)):
        with first_start.compiled_beside() as process:
            assert process is not None
        with monkeypatch.context() as patch:
            patch.setattr(first_start, name, told)
            with first_start.compiled_beside() as process:
                assert process is None


def test_it_keeps_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(first_start._COMPILE, check=True, timeout=600)
    monkeypatch.undo()
    assert first_start.is_compiled()


def test_the_second_process_has_a_processor_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(first_start, "_COMPILE", [sys.executable, "-c", ""])
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path))  # the model is examined, whoever did before
    model, tokenizer = load_model("reference")
    used, before = list[int](), torch.get_num_threads()
    model.model.layers[0].register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        accelerate(model, tokenizer)
        assert used[0] == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
