"""Distilled tables of a store: a model's next tokens after contexts of one to three tokens, with their observations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.build import changing
from retrieve_spec.datastore.change import WorkFolder, begin_change, publish
from retrieve_spec.datastore.files import FileEntry, check_content, link_files, map_array, sync_folder, write_files
from retrieve_spec.datastore.manifest import DISTILLED, DistilledEntry, Manifest, content_name
from retrieve_spec.datastore.observations import Contexts, Observations, averaged, rank_in_group
from retrieve_spec.datastore.state_rows import StateRows
from retrieve_spec.kernels.recycling import MOST, SET, WAYS

_OBSERVED = {"token_ids": "<i4", "lengths": "<i8", "top_ids": "<i4", "probs": "<f2"}
_STATES = {
    "keys": "|i1",
    "next_ids": "<i4",
    "shares": "|u1",
    "order": "<i4",
    "starts": "<i4",
    "mean": "<f4",
    "components": "<f4",
}
_DTYPES = {"sets": "<u8", "entries": "<i4", **_OBSERVED, **_STATES}
"""Files of a table with their dtypes: the table itself, the observations it was made from, and state rows, if any."""
_SET_BYTES = SET * np.dtype(np.uint64).itemsize


def add_distilled(
    observations: Observations, capacity: int, store: Path, model: str, states: StateRows | None = None
) -> int:
    """Add observations of a model to its table in a store.

    Parameters
    ----------
    observations
        New observations; the store keeps them, so that later runs can add to them.
    capacity
        Most contexts in the table, a power of two; those observed most often are kept.
    store
        Folder of the store.
    model
        Fingerprint of the model.
    states
        New state rows, which are added to earlier ones.

    Returns
    -------
    int
        Number of contexts in the table.

    Raises
    ------
    BuildError
        The store cannot be written; it is unchanged.
    StoreCorruptError
        The earlier observations are damaged.
    StoreLockedError
        Another process is writing the store.
    """
    with changing(store, "distil") as (work, manifest):
        event = begin_change(work, "distil", model=model)
        observations = Observations.joined([*observed(store, manifest, model), observations])
        states = _joined_states([*earlier_states(store, manifest, model), *([] if states is None else [states])])
        entry, count = _write_table(work, observations, states, capacity, model)
        others = [other for other in manifest.distilled if other.model != model]
        following = replace(manifest, distilled=(*others, entry))
        publish(work, following, manifest.segments, (), event, counts=(0, 0))
    return count


def copy_tables(work: WorkFolder, stores: Iterable[tuple[Path, Manifest]]) -> tuple[DistilledEntry, ...]:
    """Copy the tables of some stores to another store; tables of one model are joined, each text counted once.

    Raises
    ------
    StoreCorruptError
        Observations to join are damaged.
    """
    by_model: dict[str, dict[str, tuple[Path, DistilledEntry]]] = {}
    for store, manifest in stores:
        for entry in manifest.distilled:
            by_model.setdefault(entry.model, {})[entry.name] = store / DISTILLED / entry.name, entry
    taken = []
    for model, tables in by_model.items():
        (folder, entry), *others = tables.values()
        if others:
            joined = Observations.joined([_observations(*table) for table in tables.values()])
            states = _joined_states([rows for table in tables.values() if (rows := states_of(*table)) is not None])
            room = sum(each.files["sets"].bytes // _SET_BYTES * WAYS for _, each in tables.values())
            entry, _ = _write_table(work, joined.without_repeats(), states, 1 << (room - 1).bit_length(), model)
        else:
            link_files(folder, entry.files, made := work.path / DISTILLED)
            _put(work, entry.name, made)
        taken.append(entry)
    return tuple(taken)


def observed(store: Path, manifest: Manifest, model: str) -> list[Observations]:
    """Return a store's observations of a model, empty if there are none.

    Raises
    ------
    StoreCorruptError
        They are damaged.
    """
    return [_observations(store / DISTILLED / each.name, each) for each in manifest.distilled if each.model == model]


def earlier_states(store: Path, manifest: Manifest, model: str) -> list[StateRows]:
    """Return a store's state rows of a model, empty if there are none."""
    tables = ((store / DISTILLED / each.name, each) for each in manifest.distilled if each.model == model)
    return [rows for table in tables if (rows := states_of(*table)) is not None]


def states_of(folder: Path, entry: DistilledEntry) -> StateRows | None:
    """Map the state rows of a table into memory; None if it has none.

    Raises
    ------
    StoreCorruptError
        They are not what was written.
    """
    if not _STATES.keys() <= entry.files.keys():
        return None
    return StateRows.of_arrays({name: mapped(folder, entry.files, name) for name in _STATES})


def _joined_states(parts: list[StateRows]) -> StateRows | None:
    return StateRows.joined(parts) if parts else None


def mapped(folder: Path, files: dict[str, FileEntry], name: str) -> NDArray[Any]:
    """Map a file of a table into memory; raises the errors of `map_array`."""
    return map_array(folder / name, files[name], (_DTYPES[name],))


def _observations(folder: Path, entry: DistilledEntry) -> Observations:
    """Read the observations of a table, and compare their checksums."""
    for name in _OBSERVED:
        check_content(folder / name, entry.files[name])
    token_ids, lengths, top_ids, probs = (mapped(folder, entry.files, name) for name in _OBSERVED)
    rows = len(token_ids)
    return Observations(token_ids, lengths, top_ids.reshape(rows, -1), probs.reshape(rows, -1))


def _write_table(
    work: WorkFolder, observations: Observations, states: StateRows | None, capacity: int, model: str
) -> tuple[DistilledEntry, int]:
    """Write the table of observations, and state rows, to a store; return its entry and its number of contexts."""
    contexts = averaged(observations)
    capacity = min(capacity, max(1 << (2 * len(contexts.keys)).bit_length(), WAYS))
    sets, entries = _placed(contexts, capacity)
    arrays: dict[str, NDArray[Any]] = {"sets": sets, "entries": np.append(entries, np.zeros(MOST, np.int32))}
    arrays |= {name: getattr(observations, name) for name in _OBSERVED}
    arrays |= {} if states is None else states.arrays()
    (made := work.path / DISTILLED).mkdir()
    files = write_files(made, {name: array.reshape(-1) for name, array in arrays.items()})
    entry = DistilledEntry(content_name(files), model, len(observations.token_ids), files)
    _put(work, entry.name, made)
    return entry, int(np.count_nonzero(sets[:, :WAYS]))


def _put(work: WorkFolder, name: str, made: Path) -> None:
    """Move a finished table into the store; a table that has the same name there is the same."""
    folder = work.store / DISTILLED
    folder.mkdir(exist_ok=True)
    if (folder / name).is_dir():
        shutil.rmtree(made)
    else:
        os.rename(made, folder / name)
        sync_folder(folder)


def _placed(contexts: Contexts, capacity: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Return the sets and entries of a table, as `retrieve_spec.kernels.recycling` reads them."""
    k = contexts.top_ids.shape[1]
    home = ((contexts.keys >> np.uint64(20)) & np.uint64(capacity // WAYS - 1)).astype(np.int64)
    order = np.lexsort((-contexts.counts, home))
    way = rank_in_group(home[order])
    order, way = order[way < WAYS], way[way < WAYS]
    sets = np.zeros((capacity // WAYS, SET), np.uint64)
    sets[home[order], way] = contexts.keys[order]
    sets[home[order], WAYS + way] = contexts.counts[order]
    entries = np.zeros((capacity, 2 * k), np.int32)
    entries[home[order] * WAYS + way] = np.hstack([contexts.top_ids[order], contexts.probs[order].view(np.int32)])
    return sets, entries
