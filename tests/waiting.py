"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

HANG_S = 300.0
"""Seconds after which what has not happened never will: a bound on hangs, whatever the speed of the machine."""


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.002)
