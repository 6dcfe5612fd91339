"""First start: kernels of drafting are compiled by a second process, while the first one examines the model.

    python -m retrieve_spec.drafting.first_start

compiles those that drafting without a datastore needs, into Numba's cache, where other processes find them.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from numba import config

from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.kernels.step import propose
from retrieve_spec.processors import processors

logger = logging.getLogger(__name__)
_COMPILE = [sys.executable, "-m", __name__]


@contextlib.contextmanager
def compiled_beside() -> Iterator[subprocess.Popen[bytes] | None]:
    """Let a second process compile the kernels of drafting, if nobody has and there is a processor for it.

    Yields it, or None; when the block ends, so does the process. What it did not compile is compiled where it is
    needed.
    """
    process = None
    is_python = not getattr(sys, "frozen", False)  # a frozen program would start itself
    compiles = not config.DISABLE_JIT  # type: ignore[attr-defined]
    if is_python and compiles and processors() > 1 and not is_compiled():
        with contextlib.suppress(OSError):  # the system cannot start processes, or Python is embedded
            process = subprocess.Popen(
                _COMPILE, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            logger.warning("a second process compiles the kernels of drafting, once on this machine")
    try:
        yield process
    finally:
        if process is not None:
            process.kill()
            process.wait()


def is_compiled() -> bool:
    """Whether compiled code of drafting is kept."""
    return any(Path(propose.stats.cache_path).glob("step.propose-*.nbi"))


if __name__ == "__main__":
    MixtureDrafter().prepare()
