"""Read-ahead: the system is asked to load open stores into its page cache, since drafting jumps about in them.

A page that is read from disk when a draft needs it costs more than the draft is worth, and a fresh store would pay for
each of thousands of pages.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from retrieve_spec.datastore.manifest import SEGMENTS
from retrieve_spec.datastore.store import Datastore

SHARE = 0.25
"""Part of the machine's memory that is asked for at most; stores beyond that are read as they are used."""
_STEP = 1 << 17


def read_ahead(stores: Sequence[Datastore], most_bytes: int | None = None) -> threading.Thread | None:
    """Start reading the segments' files in the background.

    Parameters
    ----------
    stores
        Open stores; files go in order of size, smallest first, as n-gram tables and top tables are used most.
    most_bytes
        Bytes to ask for at most; `SHARE` of the machine's memory when None.

    Returns
    -------
    threading.Thread or None
        The thread that asks; None where there is nothing to do or the system cannot be asked.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    if most_bytes is None:
        most_bytes = int(SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    chosen = []
    for size, path in sorted(_files(stores)):
        most_bytes -= size
        if most_bytes < 0:
            break
        chosen.append(path)
    if not chosen:
        return None
    thread = threading.Thread(target=_ask, args=(chosen,), name="datastore-read-ahead", daemon=True)
    thread.start()
    return thread


def _files(stores: Sequence[Datastore]) -> list[tuple[int, Path]]:
    return [
        (file.bytes, store.path / SEGMENTS / segment.name / name)
        for store in stores
        for segment in store.manifest.segments
        for name, file in segment.files.items()
    ]


def _ask(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            with path.open("rb") as file:
                for start in range(0, os.fstat(file.fileno()).st_size, _STEP):  # Linux reads no more of one request
                    os.posix_fadvise(file.fileno(), start, _STEP, os.POSIX_FADV_WILLNEED)
        except OSError:  # the store was compacted or removed meanwhile: its maps stay valid, this was only a hint
            continue
