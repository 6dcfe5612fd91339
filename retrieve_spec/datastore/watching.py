"""Watch folders for changes, by notifications of the system, or by polling where there are none."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from retrieve_spec.errors import BuildError

LOOK_MS = 3000
"""Polling interval where the system gives no notifications."""
AGAIN_S = 60.0
"""Interval after which all folders count as changed, since notifications get lost and file systems are mounted."""
_MOUNTS = Path("/proc/self/mountinfo")
_SILENT = re.compile(
    r"nfs4?|9p|fuse(?:blk|\..*)?|cifs|smb\w*|virtiofs|vboxsf|prl_fs|vmhgfs|drvfs|afs|ceph|lustre|gpfs|beegfs\w*|ocfs2"
    r"|orangefs|pvfs2|gfs2|coda|ncpfs|davfs|acfs|glusterfs|wekafs|panfs|hgfs"
)
"""Types of file systems that other machines write to, without notifications here."""
log = logging.getLogger("retrieve_spec")


def changes(folders: Sequence[Path], stop: threading.Event | None = None) -> Iterator[set[Path]]:
    """Yield the changed paths: an empty set as soon as the folders are watched, then a set at least twice a second.

    File systems without notifications are polled every few seconds. So are all folders if the system's limit on watches
    is reached, which is logged with the command that raises the limit. Every minute the folders themselves count as
    changed.

    Raises
    ------
    BuildError
        watchfiles is not installed.
    OSError, RuntimeError
        The folders cannot be watched, or the name of a file is not Unicode; changes may be lost then.
    """
    try:
        from watchfiles import watch
    except ImportError as error:
        raise BuildError(
            "to watch folders", "watchfiles is not installed", "Run: pip install 'retrieve-spec[serve]'"
        ) from error
    how: dict[str, Any] = {"stop_event": stop, "debounce": 400, "rust_timeout": 500, "yield_on_timeout": True}
    again = monotonic() + AGAIN_S
    for polling in (True,) if any(map(lacks_notifications, folders)) else (None, True):
        try:
            for found in watch(*folders, **how, force_polling=polling, poll_delay_ms=LOOK_MS):
                is_due = monotonic() >= again
                yield {Path(place) for _, place in found}.union(folders if is_due else ())
                if is_due:
                    again = monotonic() + AGAIN_S
            return
        except (OSError, RuntimeError) as error:
            if polling or not any(sign in str(error) for sign in ("watch limit", "Too many open files")):
                raise
            log.warning(
                "the system's limit on watches is reached, so folders are polled every %d s; to raise the limits: "
                "sudo sysctl fs.inotify.max_user_watches=1048576 fs.inotify.max_user_instances=1024",
                LOOK_MS // 1000,
            )


def lacks_notifications(folder: Path) -> bool:
    """Whether a resolved folder, or a part of it, is on a file system without notifications."""
    around, inside = "", []
    for place, kind in _mounts():
        if place == folder or place in folder.parents:
            around = kind  # later ones cover earlier ones
        elif folder in place.parents:
            inside.append(kind)
    return any(map(_SILENT.fullmatch, (around, *inside)))


def _mounts() -> Iterator[tuple[Path, str]]:
    """Yield path and type of mounted file systems, in order of mounting; nothing if the system has no list."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        about, _, system = line.partition(" - ")
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), about.split(" ")[4])
        yield Path(place), system.split(" ")[0]
