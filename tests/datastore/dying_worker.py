"""A worker process of a build that is killed at one rank, as long as a file lies above the store."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from retrieve_spec.datastore import worker
from retrieve_spec.datastore.pool import run_one

RANK = 5


def run_or_die(stages, stage, rank, url, needs):
    """Run one rank, or end this process with SIGKILL."""
    if stage == "tokens" and rank == RANK and any((above / "kill").exists() for above in Path(sys.argv[1]).parents):
        os.kill(os.getpid(), signal.SIGKILL)
    return run_one(stages, stage, rank, url, needs)


if __name__ == "__main__":
    worker.run_one = run_or_die
    worker.main()
