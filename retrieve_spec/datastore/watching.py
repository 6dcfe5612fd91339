"""Watching folders: what changes in them, as the system tells it, or by looking where it does not."""

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
"""How often folders are looked through where the system tells of no changes."""
AGAIN_S = 60.0
"""How often everything counts as changed anywhere: notices get lost, and file systems are mounted meanwhile."""
_MOUNTS = Path("/proc/self/mountinfo")
_SILENT = re.compile(
    r"nfs4?|9p|fuse(?:blk|\..*)?|cifs|smb\w*|virtiofs|vboxsf|prl_fs|vmhgfs|drvfs|afs|ceph|lustre|gpfs|beegfs\w*|ocfs2"
    r"|orangefs|pvfs2|gfs2|coda|ncpfs|davfs|acfs|glusterfs|wekafs|panfs|hgfs"
)
"""File systems, by their types, that others write to, of which the system tells nothing here."""
log = logging.getLogger("retrieve_spec")


def changes(folders: Sequence[Path], stop: threading.Event | None = None) -> Iterator[set[Path]]:
    """What changed in some folders: an empty set once they are watched, then one twice a second at least.

    Folders of file systems that tell of no changes are looked through every few seconds; so are all where a limit of
    the system on watches is used up, which is logged with the command that raises it. Every minute the folders
    themselves count as changed.

    Raises
    ------
    BuildError
        When watchfiles is not installed.
    OSError, RuntimeError
        When the folders cannot be watched, or the name of a file is not Unicode: what else changed then is not told.
    """
    try:
        from watchfiles import watch
    except ImportError as error:
        raise BuildError(
            "to watch folders", "watchfiles is not installed", "Run: pip install 'retrieve-spec[serve]'"
        ) from error
    how: dict[str, Any] = {"stop_event": stop, "debounce": 400, "rust_timeout": 500, "yield_on_timeout": True}
    again = monotonic() + AGAIN_S
    for polling in (True,) if any(map(is_silent, folders)) else (None, True):
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
                "the system's watches are used up, so folders are looked through every %d s; to raise the limits: "
                "sudo sysctl fs.inotify.max_user_watches=1048576 fs.inotify.max_user_instances=1024",
                LOOK_MS // 1000,
            )


def is_silent(folder: Path) -> bool:
    """Whether a folder, which is resolved, or a part of it lies on a file system of whose changes nothing is told."""
    around, inside = "", []
    for place, kind in _mounts():
        if place == folder or place in folder.parents:
            around = kind  # later ones cover earlier ones
        elif folder in place.parents:
            inside.append(kind)
    return any(map(_SILENT.fullmatch, (around, *inside)))


def _mounts() -> Iterator[tuple[Path, str]]:
    """Place and type of what is mounted, in the order in which it was; nothing where the system does not list it."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        about, _, system = line.partition(" - ")
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), about.split(" ")[4])
        yield Path(place), system.split(" ")[0]
