"""OpenMP runtimes that this process has loaded: kernels run by the threads of torch's, and forks.

libgomp keeps the threads of a parallel region waiting for the next one. A forked child inherits the record of them and
not the threads, and its first parallel region (a sort, a matrix product, a search) waits for them for ever. Without
that record libgomp starts new threads, in the parent as in the child. LLVM's and Intel's runtimes see to it themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray


def loaded_libgomp() -> dict[str, ctypes.CDLL]:
    """Every libgomp that this process has loaded, by path; empty where that cannot be seen."""
    libraries = {}
    with contextlib.suppress(OSError):  # not Linux
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "libgomp" in line}
        for path in sorted(paths):
            with contextlib.suppress(OSError):
                libraries[path] = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    return libraries


def libgomp_of(folder: str) -> ctypes.CDLL | None:
    """The loaded libgomp that lies in a package's folder; None where it brings none."""
    folder = os.path.realpath(folder)  # the system names files by their own paths
    for path, library in loaded_libgomp().items():
        if os.path.realpath(path).startswith(folder + os.sep):
            return library
    return None


@functools.cache
def _of_torch() -> ctypes.CDLL | None:
    import torch

    library = libgomp_of(os.path.dirname(torch.__file__))
    if library is not None:
        library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        library.GOMP_parallel.restype = None
    return library


def threads_of_torch() -> int:
    """Threads of the caller's next parallel region (`omp_get_max_threads`); 1 where torch has another runtime."""
    library = _of_torch()
    return 1 if library is None else int(library.omp_get_max_threads())


def run_in_threads(function: Any, data: NDArray[np.int64], threads: int) -> None:
    """Call a compiled function in every thread of a parallel region of torch's runtime, and wait for all of them.

    The threads that wait for torch's own regions serve it: others would compete with them for the cores.

    Parameters
    ----------
    function
        A C function of Numba's, ``void (int64_t *)``; it holds no lock of Python's.
    data
        What each of them is given.
    threads
        `threads_of_torch`; with 1, the caller's own calls it, without a region.
    """
    if threads == 1:
        function.ctypes(data.ctypes.data)
        return
    library = _of_torch()
    assert library is not None, "threads_of_torch says whether there is one"
    library.GOMP_parallel(int(function.address), data.ctypes.data, 0, 0)


_PAUSE_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0, §3.2.44: threads end, settings such as their number stay."""


@functools.cache
def survive_forks() -> None:
    """From now on, end the forking thread's OpenMP threads before every `os.fork` (`multiprocessing` calls it too).

    To be called before anything that computes in parallel. That takes about 2 ms per fork, and the next parallel
    region starts its threads anew.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_end_threads)


def _end_threads() -> None:
    """End the calling thread's idle OpenMP threads, in every libgomp that is loaded (packages bring their own)."""
    try:
        if len(os.listdir("/proc/self/task")) == 1:  # there are none, whatever libgomp remembers of a parent's
            return
    except OSError:
        return  # not Linux
    for library in loaded_libgomp().values():
        with contextlib.suppress(AttributeError):  # older than GCC 9
            library.omp_pause_resource_all(_PAUSE_SOFT)
