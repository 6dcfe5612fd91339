"""Compiled code of the kernels: compile with less work, delete stale code, and report progress."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from llvmlite import binding
from numba import config, njit
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import cpu_target

from retrieve_spec.config import can_be_written, temporary_dir

logger = logging.getLogger(__name__)


class _LinkedCode(JITCodeLibrary):  # type: ignore[misc]
    """LLVM's code of a kernel that only kernels call.

    By default, Numba optimises every kernel together with all that it calls, and generates machine code: a deep tree of
    calls is optimised once per level. This code is linked into its callers unoptimised, and is optimised and turned
    into machine code with the kernel that Python calls.
    """

    def add_llvm_module(self, ll_module: Any) -> None:
        """Add the kernel's own code."""
        ll_module.data_layout = self._codegen._data_layout
        self._final_module.link_in(ll_module)

    def finalize(self) -> None:
        """Link the code of all kernels it calls."""
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    @property
    def codegen(self) -> Any:
        """Object that is told of the kernel's environment, which only machine code has."""
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing: there is no environment."""


class _LinkedCompiler(Compiler):  # type: ignore[misc]
    """Numba's compiler for kernels that only kernels call."""

    def __init__(self, typing_context: Any, target_context: Any, library: Any, *rest: Any) -> None:
        library = _LinkedCode(target_context.codegen(), "linked")  # type: ignore[no-untyped-call]
        super().__init__(typing_context, target_context, library, *rest)  # type: ignore[no-untyped-call]


_KERNEL: dict[str, Any] = {"cache": True, "nogil": True, "no_cfunc_wrapper": True, "_nrt": False}
_INNER: dict[str, Any] = _KERNEL | {"cache": False, "no_cpython_wrapper": True, "pipeline_class": _LinkedCompiler}
_ARRAYS: dict[str, Any] = {"_nrt": True}
kernel = njit(**_KERNEL)
"""Decorator of a kernel that Python (and perhaps other kernels) call. It has no C wrapper, which saves a twentieth of
the work. It neither makes nor returns arrays, so that references need not be counted, which saves half of the time of a
kernel of a few microseconds; the caller holds its arrays."""
kernel_with_arrays = njit(**_KERNEL | _ARRAYS)
"""Like `kernel`, for kernels that make or return arrays, or call one that returns new arrays."""
inner = njit(**_INNER)
"""Decorator of a kernel that only kernels call: its code becomes part of theirs, without a Python wrapper, which saves
most of the work of compiling a small kernel. It neither makes nor returns arrays."""
inner_with_arrays = njit(**_INNER | _ARRAYS)
"""Like `inner`, for kernels that make or return arrays."""
inlined = njit(nogil=True, inline="always")
"""Decorator of a kernel that one other kernel calls, at one place: it is inlined there and compiled once."""
_P = ParamSpec("_P")
_R = TypeVar("_R")
_ROOM = 1 << 16
"""Size of a frame in words that leaves room for the frames of all calls below it."""
WHY_IT_TAKES_LONG = (
    "compiling the kernels, once on this machine: half a minute of a fast processor, two minutes of a slow one; "
    "later starts take seconds"
)
TOLD_EVERY_S = 15.0
"""Interval between progress messages in seconds."""
_is_logging: ContextVar[bool] = ContextVar("_is_logging", default=False)


_ARM_CODE = {
    "dotprod": (
        "sdot",
        """
define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %x, %y
  %sum = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %sum
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
""",
    ),
    "bf16": (
        "bfcvt",
        """
define bfloat @round(float %x) {
  %rounded = fptrunc float %x to bfloat
  ret bfloat %rounded
}
""",
    ),
}
"""By feature of Arm: an instruction, and code that LLVM compiles to it if the CPU has the feature."""


@functools.cache
def cpu_features() -> tuple[bool, frozenset[str]]:
    """Whether Numba compiles for an x86 CPU, and LLVM's names of the enabled features."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    if triple.startswith(("x86", "i")):
        return True, frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))
    return False, arm_features(triple, cpu, features)


def arm_features(triple: str, cpu: str, features: str) -> frozenset[str]:
    """Return which of the features that products use LLVM compiles for.

    It derives them from the CPU's name, and does not list them: on macOS it lists no features at all.
    """
    machine = binding.Target.from_triple(triple).create_target_machine(cpu, features)
    return frozenset(
        name
        for name, (instruction, code) in _ARM_CODE.items()
        if instruction in machine.emit_assembly(binding.parse_assembly(code))
    )


def _beside() -> None:
    """Kernel whose compiled code is in the folder of all others'."""


def cache_folder(kernel: Callable[..., Any] = _beside) -> Path:
    """Return the folder of compiled code of the kernels in a folder: beside the sources, in the user's cache, or among
    temporary files if neither can be written.
    """
    try:
        places = [Path(place) for place in (config.CACHE_DIR, Path(__file__).parent) if place]
        if os.path.expanduser("~") == "~" and not any(map(can_be_written, places)):
            raise RuntimeError("no home, which Numba would look for in the current folder")
        kept = njit(cache=True)(kernel)
    except RuntimeError:  # Numba finds no folder
        config.CACHE_DIR = str(temporary_dir("Code of compiled kernels", "NUMBA_CACHE_DIR") / "kernels")
        os.environ["NUMBA_CACHE_DIR"] = config.CACHE_DIR  # also for child processes
        kept = njit(cache=True)(kernel)
    return Path(kept.stats.cache_path)


def drop_stale(folder: Path, sources: Iterable[Path]) -> int:
    """Delete Numba's index files that are older than any source; return how many.

    A kernel contains the code of those it calls. When one of these changes in another file, for example by `git pull`,
    Numba would keep using the old code.
    """
    now = time.time_ns()  # files with future times, by another machine's clock, would always be newer
    newest = max((t for source in sources if (t := source.stat().st_mtime_ns) <= now), default=0)
    stale = [index for index in folder.glob("*.nbi") if index.stat().st_mtime_ns < newest]
    for index in stale:
        index.unlink(missing_ok=True)
    return len(stale)


def drop_stale_kernels(kernel: Callable[..., Any] = _beside) -> None:
    """Call `drop_stale` for the folder of a kernel, before any kernel there is first called."""
    if not config.DISABLE_JIT:
        with contextlib.suppress(OSError):  # another process deleted it, or the folder is read-only
            kernels = Path(__file__).parent
            drop_stale(cache_folder(kernel), [*kernels.rglob("*.py"), kernels.parent / "config.py"])


class _CompileListener(event.Listener):  # type: ignore[misc]
    """Listener that reports the names of this package's kernels while they are compiled."""

    def __init__(self, tell: Callable[[str], Any]) -> None:
        self._tell = tell

    def on_start(self, happened: Any) -> None:
        """Report a kernel that is about to be compiled."""
        kernel = happened.data["dispatcher"].py_func
        package, _, place = kernel.__module__.partition(".")
        if package == "retrieve_spec":
            self._tell(f"{place.removeprefix('kernels.')}.{kernel.__name__}")

    def on_end(self, happened: Any) -> None:
        """Do nothing."""


@contextlib.contextmanager
def report_compiling(tell: Callable[[str], Any]) -> Iterator[None]:
    """Call `tell` with the name of every kernel that is compiled (not loaded) in the block."""
    with event.install_listener("numba:compile", _CompileListener(tell)):
        yield


@contextlib.contextmanager
def log_compiling() -> Iterator[None]:
    """Log the reason for the wait when a kernel is first compiled in the block, and progress at intervals."""
    if _is_logging.get():
        yield
        return
    compiled, told = 0, 0.0

    def tell(name: str) -> None:
        nonlocal compiled, told
        now, compiled = time.monotonic(), compiled + 1
        if compiled == 1:
            logger.warning(WHY_IT_TAKES_LONG)
        elif now - told > TOLD_EVERY_S:
            logger.warning("compiling the kernels: %d so far, now %s", compiled, name)
        else:
            return
        told = now

    token = _is_logging.set(True)
    try:
        with report_compiling(tell):
            yield
    finally:
        _is_logging.reset(token)


def _call(function: Callable[..., _R], arguments: Sequence[Any], options: Mapping[str, Any]) -> _R:
    return function(*arguments, **options)


_call.__code__ = _call.__code__.replace(co_stacksize=_ROOM)


def compiles(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of functions that compile kernels; saves a quarter of the compiler's processor time.

    Python allocates frames in chunks of 16 KiB, and asks the system for a chunk each time a call crosses the end of
    one, half a million times in calls as deep as the compiler's. A frame that is declared larger than a chunk gets a
    chunk with room for all of them. And garbage collections would search all that the compiler keeps.
    """

    @functools.wraps(function)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return _call(function, arguments, options)
        finally:
            if collecting:
                gc.enable()

    return call
