"""Scratch folders: what a change at an address needs of this machine while it runs.

They are removed afterwards. One whose process was killed is removed by the next that needs one: its lock is free.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = f"retrieve-spec-{platform.node() or 'here'}-"
"""Of the folders of this machine: others that see the same disk may not see its locks."""
_HELD = "held"


@contextmanager
def scratch_folder(above: Path | None = None) -> Iterator[Path]:
    """A new empty folder, below another one or where the system has temporary files, for the time of a `with`."""
    above = Path(tempfile.gettempdir()) if above is None else above
    _remove_left(above)
    made = Path(tempfile.mkdtemp(prefix=".retrieve-spec-", dir=above))
    folder = above / f"{_PREFIX}{made.name.rpartition('-')[2]}"
    lock = FileLock(made / _HELD, timeout=0)
    try:
        with lock:
            os.rename(made, folder)  # under the name that is looked for, it has been locked from the first
            (folder / "files").mkdir()
            yield folder / "files"
    finally:
        for path in (made, folder):
            shutil.rmtree(path, ignore_errors=True)


def _remove_left(above: Path) -> None:
    """Remove what killed processes of this user left."""
    for folder in above.glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout, NotImplementedError):
            status = os.lstat(folder)
            mine = stat.S_ISDIR(status.st_mode) and (os.name != "posix" or status.st_uid == os.getuid())
            if mine and stat.S_ISREG(os.lstat(folder / _HELD).st_mode):
                with FileLock(folder / _HELD, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
