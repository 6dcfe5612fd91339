"""Distilled tables of a store: a model's next tokens after contexts of one to three tokens, and state rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.build import changing
from retrieve_spec.datastore.change import WorkFolder, begin_change, publish
from retrieve_spec.datastore.files import FileEntry, check_content, link_files, map_array, sync_folder, write_files
from retrieve_spec.datastore.manifest import DISTILLED, DistilledEntry, Manifest, content_name
from retrieve_spec.datastore.observations import Contexts, Observations, averaged, keys_of_tokens, rank_in_group
from retrieve_spec.datastore.state_rows import StateRows
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.hidden_states import TOP
from retrieve_spec.kernels.recycling import MOST, SET, WAYS

_TABLE = {"sets": "<u8", "entries": "<i4"}
_STATES = {
    "keys": "|i1",
    "next_ids": "<i4",
    "shares": "|u1",
    "order": "<i4",
    "starts": "<i4",
    "previous": "<i4",
    "mean": "<f4",
    "components": "<f4",
}
_DTYPES = _TABLE | _STATES
"""Files of a table with their dtypes: the table itself, and state rows, if any."""
_STATE_BYTES = TOP * np.dtype(np.uint8).itemsize
"""Of the file `shares`, for each state row."""
_SET_BYTES = SET * np.dtype(np.uint64).itemsize


def add_distilled(
    observations: Observations,
    capacity: int,
    store: Path,
    model: str,
    states: StateRows | None = None,
    *,
    title: str = "",
) -> tuple[int, StateRows | None]:
    """Add observations of a model to its table in a store.

    Parameters
    ----------
    observations
        New observations.
    capacity
        Most contexts in the table, a power of two; those of one token and those observed most often are kept.
    store
        Folder of the store.
    model
        Fingerprint of the model.
    states
        New state rows, which are added to earlier ones.
    title
        Name of the model, for people.

    Returns
    -------
    tuple
        Number of contexts in the table, and its state rows, if any.

    Raises
    ------
    BuildError
        The store cannot be written; it is unchanged.
    StoreCorruptError
        The earlier table is damaged.
    StoreLockedError
        Another process is writing the store.
    """
    with changing(store, "distil") as (work, manifest):
        event = begin_change(work, "distil", model=model)
        earlier = distilled_of(store, manifest, model)
        table = _placed(averaged(observations, earlier.contexts), capacity, manifest.vocabulary)
        states, tokens = _joined_states([earlier.states, states]), earlier.tokens + len(observations.token_ids)
        entry = _write_table(work, table, states, DistilledEntry("", model, tokens, {}, title))
        others = [other for other in manifest.distilled if other.model != model]
        following = replace(manifest, distilled=(*others, entry))
        publish(work, following, manifest.segments, (), event, counts=(0, 0))
    return entry.contexts, states


def copy_tables(work: WorkFolder, stores: Iterable[tuple[Path, Manifest]]) -> tuple[DistilledEntry, ...]:
    """Copy the tables of some stores to another store; tables of one model are joined.

    Raises
    ------
    StoreCorruptError
        Tables to join are damaged.
    """
    by_model: dict[str, dict[str, tuple[Path, DistilledEntry]]] = {}
    vocabulary = 0
    for store, manifest in stores:
        vocabulary = max(vocabulary, manifest.vocabulary)
        for entry in manifest.distilled:
            by_model.setdefault(entry.model, {})[entry.name] = store / DISTILLED / entry.name, entry
    taken = []
    for tables in by_model.values():
        (folder, entry), *others = tables.values()
        if others:
            room = sum(each.files["sets"].bytes // _SET_BYTES * WAYS for _, each in tables.values())
            contexts = Contexts.joined([_contexts(*each) for each in tables.values()])
            table = _placed(contexts, 1 << (room - 1).bit_length(), vocabulary)
            states = _joined_states([states_of(*each) for each in tables.values()])
            tokens = sum(each.tokens for _, each in tables.values())
            entry = _write_table(work, table, states, replace(entry, tokens=tokens))
        else:
            link_files(folder, entry.files, made := work.path / DISTILLED)
            _put(work, entry.name, made)
        taken.append(entry)
    return tuple(taken)


@dataclass(frozen=True, slots=True, eq=False)
class Distilled:
    """What a store has of a model.

    Attributes
    ----------
    contexts, states
        Contexts of its table, and its state rows; None if there are none.
    tokens
        Number of tokens that they were made of.
    """

    contexts: Contexts | None = None
    states: StateRows | None = None
    tokens: int = 0


def distilled_of(store: Path, manifest: Manifest, model: str) -> Distilled:
    """Read what a store has of a model.

    Raises
    ------
    StoreCorruptError
        It is damaged.
    """
    for entry in manifest.distilled:
        if entry.model == model:
            folder = store / DISTILLED / entry.name
            return Distilled(_contexts(folder, entry), states_of(folder, entry), entry.tokens)
    return Distilled()


def rows_of(entry: DistilledEntry) -> int:
    """Return the number of a table's state rows, by the size of a file."""
    return entry.files["shares"].bytes // _STATE_BYTES if "shares" in entry.files else 0


def table_of(folder: Path, files: dict[str, FileEntry]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Map the sets and entries of a table into memory.

    Raises
    ------
    StoreCorruptError
        They are not what was written, or would lead a look-up outside of them.
    """
    sets, entries = (mapped(folder, files, name) for name in _TABLE)
    capacity = len(sets) // 2
    is_power = capacity >= WAYS and len(sets) == 1 << len(sets).bit_length() - 1
    if not is_power or len(entries) - MOST not in range(2 * capacity, 2 * MOST * capacity + 1, 2 * capacity):
        expected = f"a power of two of contexts, each with one to {MOST} tokens, in {folder}"
        raise StoreCorruptError(expected, f"sets of {len(sets)}, entries of {len(entries)}")
    return sets, entries


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


def _joined_states(parts: list[StateRows | None]) -> StateRows | None:
    there = [rows for rows in parts if rows is not None]
    return StateRows.joined(there) if there else None


def mapped(folder: Path, files: dict[str, FileEntry], name: str) -> NDArray[Any]:
    """Map a file of a table into memory; raises the errors of `map_array`."""
    return map_array(folder / name, files[name], (_DTYPES[name],))


def _contexts(folder: Path, entry: DistilledEntry) -> Contexts:
    """Read the contexts of a table, and compare the checksums of its files, those of state rows too."""
    for name, file in entry.files.items():
        check_content(folder / name, file)
    sets, entries = table_of(folder, entry.files)
    keys, counts = sets.reshape(-1, 2, WAYS).transpose(1, 0, 2).reshape(2, -1)
    used = np.flatnonzero(keys)
    top_ids, probs = np.hsplit(entries[:-MOST].reshape(len(keys), -1)[used], 2)
    return Contexts(keys[used], counts[used].astype(np.float64), top_ids, np.ascontiguousarray(probs).view(np.float32))


def _write_table(
    work: WorkFolder,
    table: tuple[NDArray[np.uint64], NDArray[np.int32]],
    states: StateRows | None,
    entry: DistilledEntry,
) -> DistilledEntry:
    """Write the sets and entries of a table, and state rows, to a store; return its entry with what was written."""
    arrays: dict[str, NDArray[Any]] = dict(zip(_TABLE, table, strict=True))
    arrays |= {} if states is None else states.arrays()
    (made := work.path / DISTILLED).mkdir()
    files = write_files(made, {name: array.reshape(-1) for name, array in arrays.items()})
    contexts = int(np.count_nonzero(table[0][:, :WAYS]))
    entry = replace(entry, name=content_name(files), files=files, contexts=contexts)
    _put(work, entry.name, made)
    return entry


def _put(work: WorkFolder, name: str, made: Path) -> None:
    """Move a finished table into the store; a table that has the same name there is the same."""
    folder = work.store / DISTILLED
    folder.mkdir(exist_ok=True)
    if (folder / name).is_dir():
        shutil.rmtree(made)
    else:
        os.rename(made, folder / name)
        sync_folder(folder)


def _placed(contexts: Contexts, capacity: int, vocabulary: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Return the sets and entries of a table, as `retrieve_spec.kernels.recycling` reads them.

    Contexts of one token come first, then those observed most often: every longer context falls back on the former.
    """
    k = contexts.top_ids.shape[1]
    capacity = min(capacity, max(1 << (2 * len(contexts.keys)).bit_length(), WAYS))
    home = ((contexts.keys >> np.uint64(20)) & np.uint64(capacity // WAYS - 1)).astype(np.int64)
    is_longer = ~np.isin(contexts.keys, keys_of_tokens(vocabulary))
    order = np.lexsort((-contexts.counts, is_longer, home))
    way = rank_in_group(home[order])
    order, way = order[way < WAYS], way[way < WAYS]
    sets = np.zeros((capacity // WAYS, SET), np.uint64)
    sets[home[order], way] = contexts.keys[order]
    sets[home[order], WAYS + way] = contexts.counts[order]
    entries = np.zeros(2 * k * capacity + MOST, np.int32)
    entries[:-MOST].reshape(capacity, 2 * k)[home[order] * WAYS + way] = np.hstack(
        [contexts.top_ids[order], contexts.probs[order].view(np.int32)]
    )
    return sets, entries
