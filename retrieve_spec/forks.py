"""Forks of a process that has computed: its OpenMP threads are ended first, so that parent and child can go on.

libgomp keeps the threads of a parallel region waiting for the next one. A forked child inherits the record of them and
not the threads, and its first parallel region (a sort, a matrix product, a search) waits for them for ever. Without
that record libgomp starts new threads, in the parent as in the child. LLVM's and Intel's runtimes see to it themselves.
"""

from __future__ import annotations

import contextlib
import functools
import os

from retrieve_spec.openmp import loaded_libgomp

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
