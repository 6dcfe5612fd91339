"""Sources of the kernels in, no compiled code older than them out: Numba compares a kernel with its own file only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from numba import config, njit


@njit(cache=True)
def _beside() -> None:
    """A kernel whose compiled code lies where that of all others does."""


def drop_stale(folder: Path, sources: Iterable[Path]) -> int:
    """Delete what Numba finds compiled code by, where it is older than any source; returns how many.

    A kernel is compiled with the code of those it calls. When one of these changes in another file, as by `git pull`,
    Numba would go on with the old code.
    """
    now = time.time_ns()  # files from the future, as another machine's clock makes them, would be newer for ever
    newest = max((t for source in sources if (t := source.stat().st_mtime_ns) <= now), default=0)
    stale = [index for index in folder.glob("*.nbi") if index.stat().st_mtime_ns < newest]
    for index in stale:
        index.unlink(missing_ok=True)
    return len(stale)


def drop_stale_kernels() -> None:
    """`drop_stale` for this package, before its kernels are called first."""
    if not config.DISABLE_JIT:
        with contextlib.suppress(OSError):  # another process was faster, or the folder may only be read
            drop_stale(Path(_beside.stats.cache_path), Path(__file__).parent.glob("*.py"))
