"""Folder state: what a folder that a store follows said last time, so that only what changed is read again.

Size, time and SHA-256 of every file lie in ``sync.json`` beside the manifest. It is a cache: where it is lost, or was
made under other rules, all files are read once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.entry_filter import RULES, EntryFilter, Reason
from retrieve_spec.datastore.files import replace_file
from retrieve_spec.datastore.licences import own_licence

STATE = "sync.json"
FOLLOWED_BYTES = 1 << 20
"""Largest file that enters from a folder that is followed."""
RACY_NS = 2_000_000_000
"""A file that changed this shortly before it was looked at may change again without another time."""


@dataclass(slots=True)
class FolderState:
    """What files said, five things each: bytes, time of the last change in nanoseconds, SHA-256 or "", reason it is
    left out or "", licence by its own lines or None without any; and the parts of the filter that did not count."""

    files: dict[str, Sequence[Any]] = field(default_factory=dict)
    admit: tuple[str, ...] = ()


def look(entries: EntryFilter, before: FolderState, admit: tuple[str, ...] = ()) -> FolderState:
    """What the files of a folder say now; those that did not change since are not read."""
    racy = time.time_ns() - RACY_NS
    now = FolderState(admit=admit)
    top = os.path.join(entries.roots[0], "")
    same = before.files if before.admit == admit else {}
    named = {top + name for name, said in same.items() if said[2]}
    for place, found in entries.entries(named):
        name = place[len(top) :]
        if isinstance(found, Reason):
            now.files[name] = (0, 0, "", str(found), None)
            continue
        known = same.get(name)
        if known is not None and known[0] == found.st_size and known[1] == found.st_mtime_ns:
            now.files[name] = known
            continue
        text = entries.read(Path(place))
        changed = found.st_mtime_ns if found.st_mtime_ns < racy else 0  # looked at again next time
        if isinstance(text, Reason):
            now.files[name] = (found.st_size, changed, "", str(text), None)
        else:
            digest = hashlib.sha256(text.encode()).hexdigest()
            now.files[name] = (found.st_size, changed, digest, "", own_licence(text))
    return now


def read_state(store: Path) -> dict[str, FolderState]:
    """What folders said when a store was last synchronised, by folder."""
    try:
        raw = json.loads((store / STATE).read_bytes())
        if raw["rules"] != RULES:  # which may have let in other files
            return {}
        return {
            root: FolderState(files, tuple(admit))
            for root, (files, admit) in raw["folders"].items()
            if all(len(said) == 5 for said in files.values())
        }
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def write_state(store: Path, states: dict[str, FolderState]) -> None:
    """Remember what folders said."""
    folders = {root: (state.files, state.admit) for root, state in states.items()}
    content = json.dumps({"rules": RULES, "folders": folders})
    replace_file(store / STATE, content.encode("utf-8", "surrogateescape"))
