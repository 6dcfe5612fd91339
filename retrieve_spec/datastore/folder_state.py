"""Folder state: what a folder that a store follows said last time, so that only what changed is read again.

Size, time and SHA-256 of every file lie in ``sync.json`` beside the manifest. It is a cache: where it is lost, or was
made under other rules, all files are read once.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.documents import text_hash
from retrieve_spec.datastore.entry_filter import RULES, Reason
from retrieve_spec.datastore.ingest import Gate
from retrieve_spec.datastore.licences import own_licence
from retrieve_spec.datastore.records import texts_of
from retrieve_spec.datastore.sources import Source, SourceFile, kind_of

STATE = "sync.json"
FOLLOWED_BYTES = 1 << 20
"""Largest file that enters from a folder that is followed."""
_NUMBERS, _TEXTS = ("sizes", "times", "changes"), ("hashes", "reasons")
RACY_NS = 2_000_000_000
"""A file that changed this shortly before it was looked at may change again without another time."""


@dataclass(slots=True)
class FolderState:
    """What files said, six things each: bytes, times of the last change in nanoseconds by the file itself (0: look
    again) and by the system, SHA-256 or "", reason it is left out or "", licence by its own lines or None without any.
    Files that hold several texts have a seventh, of each of these its name behind that of the file, and the last three.
    And the parts of the filter that did not count."""

    files: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    admit: tuple[str, ...] = ()


def look(source: Source, before: FolderState, store: Path) -> FolderState:
    """What the files of a folder say now; those that did not change since are not read.

    Parameters
    ----------
    source
        The folder.
    before
        What it said last time.
    store
        Where the store is, which is no part of the folder.
    """
    entries = source.entry_filter(Path(source.path), FOLLOWED_BYTES, store)
    gate = Gate(
        replace(source, licences=()), FOLLOWED_BYTES
    )  # licences are looked at afterwards: files beside may change
    admit = source.admit
    racy = time.time_ns() - RACY_NS
    now = FolderState(admit=admit)
    start = len(os.path.join(entries.roots[0], ""))
    same = before.files if before.admit == admit else {}
    for place, found in entries.entries({name for name, said in same.items() if said[3]}):
        name = place[start:]
        if isinstance(found, Reason):
            now.files[name] = (0, 0, 0, "", str(found), None)
            continue
        known = same.get(name)
        # The system's time tells another file that was put in place of one with its bytes and its time.
        changes = found.st_mtime_ns, found.st_ctime_ns
        if known is not None and known[1:3] == changes and known[0] == found.st_size:
            now.files[name] = known
            continue
        if changes[0] >= racy:
            changes = 0, changes[1]
        kind, compression = kind_of(name)
        if kind == "text" and not compression:
            text = entries.read(Path(place))
            said = ("", str(text), None) if isinstance(text, Reason) else (text_hash(text), "", own_licence(text))
            now.files[name] = (found.st_size, *changes, *said)
        else:
            file = SourceFile(0, name, place, found.st_size, kind, compression)
            now.files[name] = (found.st_size, *changes, "", "", None, list(_texts(gate, file)))
    return now


def _texts(gate: Gate, file: SourceFile) -> Iterator[tuple[str, str, str, str | None]]:
    """Name behind that of the file, SHA-256 or "", reason or "", own licence, of every text that a file holds."""
    for text in texts_of([file], (gate.source,), gate.limit):
        content, _, skip = gate.read(text)
        behind = text.path[len(file.path) :]
        yield (behind, "", skip, None) if skip else (behind, text_hash(content), "", own_licence(content))


def read_state(store: Path) -> dict[str, FolderState]:
    """What folders said when a store was last synchronised, by folder."""
    try:
        raw = json.loads((store / STATE).read_bytes())
        if raw["rules"] != RULES:  # which may have let in other files
            return {}
        return {root: _state_of(columns) for root, columns in raw["folders"].items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def _state_of(columns: dict[str, Any]) -> FolderState:
    said = [columns[name].split("\0") for name in _TEXTS]
    rows = zip(*(columns[name] for name in _NUMBERS), *said, columns["licences"], strict=True)
    files = dict(zip(columns["names"].split("\0"), rows, strict=True)) if columns["sizes"] else {}
    for name, texts in columns["texts"].items():
        if any(len(text) != 4 for text in texts):
            raise ValueError(name)
        files[name] = (*files[name], texts)
    return FolderState(files, tuple(columns["admit"]))


def _columns_of(state: FolderState) -> dict[str, Any]:
    """A folder's state as few long values: that takes a quarter of the time of many short ones."""
    rows = list(state.files.values())
    numbers = {name: [said[i] for said in rows] for i, name in enumerate(_NUMBERS)}
    said = {name: "\0".join([said[i] for said in rows]) for i, name in enumerate(_TEXTS, len(_NUMBERS))}
    licences = [said[5] for said in rows]
    texts = {name: said[6] for name, said in state.files.items() if len(said) > 6}
    names = "\0".join(state.files)
    return {"names": names, **numbers, **said, "licences": licences, "texts": texts, "admit": state.admit}


def write_state(store: Path, states: dict[str, FolderState]) -> None:
    """Remember what folders said; half of it, after a failure of the power, would be none."""
    folders = {root: _columns_of(state) for root, state in states.items()}
    content = json.dumps({"rules": RULES, "folders": folders})
    written = store / f"{STATE}.tmp"
    written.write_bytes(content.encode("utf-8", "surrogateescape"))
    os.replace(written, store / STATE)
