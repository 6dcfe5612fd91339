"""OpenMP runtimes that this process has loaded, and forks.

libgomp keeps the threads of a parallel region waiting for the next one. A forked child inherits the record of them and
not the threads, and its first parallel region (a sort, a matrix product, a search) waits for them for ever. Without
that record libgomp starts new threads, in the parent as in the child. LLVM's and Intel's runtimes see to it themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os


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
    folder = os.path.realpath(folder)  # the system reports resolved paths
    for path, library in loaded_libgomp().items():
        if os.path.realpath(path).startswith(folder + os.sep):
            return library
    return None


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
        if len(os.listdir("/proc/self/task")) == 1:  # there are no threads, although libgomp remembers the parent's
            return
    except OSError:
        return  # not Linux
    for library in loaded_libgomp().values():
        with contextlib.suppress(AttributeError):  # older than GCC 9
            library.omp_pause_resource_all(_PAUSE_SOFT)
