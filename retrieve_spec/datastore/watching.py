"""Watching of folders: what changed in them, told by the system or, where it has no watches left, found by looking."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from retrieve_spec.errors import BuildError

LOOK_MS = 3000
"""How often folders are looked through where the system tells of no changes."""
_LIMITS = {
    "OS file watch limit reached": ("fs.inotify.max_user_watches", 1 << 20),
    "Too many open files": ("fs.inotify.max_user_instances", 1 << 10),
}
log = logging.getLogger("retrieve_spec")


def watch_changes(
    *folders: Path, stop: threading.Event | None = None, group_ms: int = 1600, tick_ms: int = 500
) -> Iterator[set[Path]]:
    """Tell what changes below some folders.

    Where the limit of the system on watches is used up, which is logged once with the command that raises it, the
    folders are looked through every few seconds instead.

    Parameters
    ----------
    folders
        Where to look.
    stop
        Ends it when set.
    group_ms
        Changes that follow each other within so many milliseconds are told together.
    tick_ms
        An empty set is told after so many milliseconds without a change.

    Yields
    ------
    set of Path
        What was made, changed or deleted.

    Raises
    ------
    BuildError
        When watchfiles is not installed.
    OSError, RuntimeError
        As `watchfiles.watch`: the latter where a name changed that is not Unicode.
    """
    try:
        from watchfiles import watch
    except ImportError as error:
        raise BuildError(
            "to watch folders", "watchfiles is not installed", "Run: pip install 'retrieve-spec[serve]'"
        ) from error

    def changes(*, polling: bool) -> Iterator[set[Path]]:
        for found in watch(
            *folders,
            stop_event=stop,
            debounce=group_ms,
            rust_timeout=tick_ms,
            yield_on_timeout=True,
            force_polling=polling or None,
            poll_delay_ms=LOOK_MS,
        ):
            yield {Path(place) for _, place in found}

    try:
        yield from changes(polling=False)
    except (OSError, RuntimeError) as error:
        limit = next((limit for sign, limit in _LIMITS.items() if sign in str(error)), None)
        if limit is None:
            raise
        log.warning(
            "the limit %s is used up, so folders are looked through every %d s; to raise it: sudo sysctl %s=%d",
            limit[0],
            LOOK_MS // 1000,
            *limit,
        )
        yield from changes(polling=True)
