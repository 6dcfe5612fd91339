"""A program's own process: what a library must leave to whoever runs it."""

from __future__ import annotations

import ctypes
import gc
import os

_GLIBC = {
    "MALLOC_TRIM_THRESHOLD_": (-1, 16 << 20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 1 << 20),
    "MALLOC_ARENA_MAX": (-8, 2),
}
"""What glibc's `mallopt` gets, by the names under which the user's environment may say it."""


def begin_loading() -> None:
    """Look for no garbage from now on, and give memory back; to be called before a model's libraries are imported.

    They leave half a million objects, next to none of which is garbage. Caches of keys and values come and go: by
    default glibc takes those of a few MiB from heaps of several threads, of which it gives back what lies on top.
    """
    gc.disable()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for name, (parameter, value) in _GLIBC.items():
        if name not in os.environ:
            mallopt(parameter, value)


def end_loading() -> None:
    """Look for garbage again, among what is made from now on: all that is there stays for as long as the process.

    Else a collection takes a third of a second now and then, in which everybody waits.
    """
    gc.freeze()
    gc.enable()
