"""A cluster's task that is killed at one rank, as long as a file lies beside the store."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from retrieve_spec.datastore.cluster import Task

RANK = 5


class DyingTask(Task):
    """`Task` that ends its process with SIGKILL at `RANK`."""

    def __call__(self, data, rank=0, world_size=1):
        """Run one rank, or die."""
        if self.stage == "tokens" and self.ranks[rank] == RANK and (Path(self.store).parent / "kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return Task.__call__(self, data, rank, world_size)
