"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Wait until a condition holds; far longer than it takes, since machines that run tests may be busy."""
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.002)
