"""Compiled kernels do not outlive the sources of those they call."""

import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from retrieve_spec.kernels import compiled_code, step
from retrieve_spec.kernels.compiled_code import (
    WHY_IT_TAKES_LONG,
    compiles,
    drop_stale,
    inner,
    log_compiling,
    report_compiling,
)
from retrieve_spec.kernels.cpu import layer_rows

CALLED = "from numba import njit\n@njit(cache=True)\ndef called(x):\n    return x + {}\n"
CALLING = """
import sys
from pathlib import Path
from retrieve_spec.kernels.compiled_code import drop_stale
from pair.called import called
from numba import njit
@njit(cache=True)
def calling(x):
    return called(x)
if "keep" not in sys.argv:
    drop_stale(Path(calling.stats.cache_path), Path(__file__).parent.glob("*.py"))
print(calling(1), sum(calling.stats.cache_hits.values()))
"""


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_a_kernel_is_compiled_again_when_one_it_calls_has_changed(tmp_path: Path) -> None:
    (tmp_path / "pair").mkdir()
    called = tmp_path / "pair" / "called.py"
    called.write_text(CALLED.format(1))
    (tmp_path / "pair" / "calling.py").write_text(CALLING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def run(*arguments: str) -> list[int]:
        command = [sys.executable, "-m", "pair.calling", *arguments]
        return [int(x) for x in subprocess.check_output(command, env=environment, text=True).split()]

    assert run() == [2, 0]
    assert run() == [2, 1]
    called.write_text(CALLED.format(10))
    assert run("keep") == [2, 1], "Numba notices by itself: this module is not needed any more"
    assert run() == [11, 0]
    assert run() == [11, 1]


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_what_only_kernels_call_is_optimised_with_its_callers_alone() -> None:
    leaf = inner(lambda x: x + 1)
    middle = inner(lambda x: leaf(x) * 2)
    outer = numba.njit(lambda x: middle(x) - leaf(x))
    assert [outer(x) for x in range(3)] == [1, 2, 3]
    assert "call" in middle.inspect_llvm(middle.signatures[0]), "nothing is inlined before that"


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_the_code_of_a_kernel_lies_where_it_is_looked_for() -> None:
    for kernel in (layer_rows.gate_row, step.propose):
        assert compiled_code.cache_folder(kernel.py_func) == Path(kernel.stats.cache_path)


def test_only_older_code_is_dropped(tmp_path: Path) -> None:
    for name, time in (("a.py", 990), ("old.nbi", 980), ("old.nbc", 980), ("new.nbi", 1000), ("future.py", 4e9)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time, time))
    assert drop_stale(tmp_path, tmp_path.glob("*.py")) == 1
    assert not (tmp_path / "old.nbi").exists()
    assert drop_stale(tmp_path, []) == drop_stale(tmp_path / "nowhere", tmp_path.glob("*.py")) == 0


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_compiling_is_logged_and_told_of_kernel_by_kernel(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = numba.njit(lambda x: x + 1)
    outer = numba.njit(lambda x: called(x) * 2)
    of_somebody_else = numba.njit(lambda x: x)
    for kernel, name in ((called, "called"), (outer, "outer")):
        kernel.py_func.__module__, kernel.py_func.__name__ = "retrieve_spec.kernels.made_up", name
    told: list[str] = []
    with caplog.at_level(logging.WARNING), report_compiling(told.append), log_compiling():
        assert of_somebody_else(1) == 1
        assert told == [] and not caplog.records
        assert outer(1) == 4
        assert outer(2) == 6
        assert [record.message for record in caplog.records] == [WHY_IT_TAKES_LONG]
        monkeypatch.setattr(compiled_code, "TOLD_EVERY_S", 0.0)
        with log_compiling():
            assert outer(1.0) == 4.0
    assert told == ["made_up.outer", "made_up.called"] * 2
    assert [record.message for record in caplog.records[1:]] == [
        f"compiling the kernels: {count} so far, now {name}" for count, name in ((3, told[0]), (4, told[1]))
    ]
    called(1j)
    assert len(told) == 4, "told only of what is compiled in the block"


def test_no_garbage_is_looked_for_while_kernels_are_compiled_and_again_behind_that() -> None:
    @compiles
    def compiling(a: int, *, b: int) -> tuple[int, bool]:
        return a // b, gc.isenabled()

    assert compiling(6, b=3) == (2, False) and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        compiling(6, b=0)
    assert gc.isenabled()
    gc.disable()
    try:
        assert compiling(6, b=3) == (2, False)
        assert not gc.isenabled(), "whoever has switched it off does so for longer"
    finally:
        gc.enable()
