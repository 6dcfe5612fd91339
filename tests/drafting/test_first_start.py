"""A second process compiles the kernels of drafting; whatever becomes of it, drafting works."""

from __future__ import annotations

import subprocess
import sys

import numba
import pytest

from retrieve_spec.drafting import first_start

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
