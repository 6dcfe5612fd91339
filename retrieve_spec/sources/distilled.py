"""Distilled tables: what a model says after contexts of one to three tokens, learned once and kept beside a store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.build import changing
from retrieve_spec.datastore.change import begin_change, publish, put_distilled
from retrieve_spec.datastore.files import FileEntry, check_content, map_array, write_files
from retrieve_spec.datastore.manifest import DISTILLED, DistilledEntry, Manifest, content_name
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.recycling import MOST, SET, WAYS
from retrieve_spec.kernels.source_table import KIND_DISTILLED
from retrieve_spec.sources.observations import Contexts, Observations, averaged, rank_in_group
from retrieve_spec.sources.rows import Row, source_row

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

logger = logging.getLogger(__name__)
_OBSERVED = {"token_ids": "<i4", "lengths": "<i8", "top_ids": "<i4", "probs": "<f2"}
_DTYPES = {"sets": "<u8", "entries": "<i4", **_OBSERVED}
"""Files of a table by name, and what they hold: the table, and the observations that it was made of."""


class DistilledTable:
    """Contexts of one to three tokens → the target's top k next tokens with probabilities, read and never written.

    It has the layout of a recycling table (`retrieve_spec.sources.recycling`), and holds averages of the model's own
    top tokens over all that it wrote and read (`retrieve_spec.sources.observations`).

    Parameters
    ----------
    sets, entries
        As in `retrieve_spec.kernels.recycling`; entries are followed by room to read in.
    """

    def __init__(self, sets: NDArray[np.uint64], entries: NDArray[np.int32]) -> None:
        self.sets, self.entries = sets, entries

    def row(self, number: int) -> Row:
        """Row of the mixture's source table."""
        capacity = len(self.sets) // 2
        k = (len(self.entries) - MOST) // capacity // 2
        return source_row(
            KIND_DISTILLED, number, "recycling", sets=self.sets, entries=self.entries, capacity=capacity, k=k
        )

    @classmethod
    def open(cls, folder: Path, files: dict[str, FileEntry]) -> DistilledTable:
        """Map a table's files into memory.

        Raises
        ------
        StoreCorruptError
            They are not what was written.
        """
        return cls(*(_mapped(folder, files, name) for name in ("sets", "entries")))


def _mapped(folder: Path, files: dict[str, FileEntry], name: str) -> NDArray[Any]:
    return map_array(folder / name, files[name], (_DTYPES[name],))


def keep_distilled(observations: Observations, capacity: int, store: Path, model: str) -> int:
    """Write a table of what a model said beside a store, together with what is there of that model.

    Parameters
    ----------
    observations
        What it said; kept, too, so that a later run can add to it.
    capacity
        Contexts that the table has room for at most, a power of two; of those that do not fit, the most observed stay.
    store
        Folder of the store.
    model
        Fingerprint of the model.

    Returns
    -------
    int
        Contexts in the table.

    Raises
    ------
    BuildError
        It cannot be written; what was there stays.
    StoreCorruptError
        What was observed earlier is not what was written.
    StoreLockedError
        Another process is writing to the store.
    """
    with changing(store, "distil") as (work, manifest):
        observations = Observations.joined([*observed(store, manifest, model), observations])
        contexts = averaged(observations)
        capacity = min(capacity, max(1 << (2 * len(contexts.keys)).bit_length(), WAYS))
        sets, entries = _placed(contexts, capacity)
        arrays: dict[str, NDArray[Any]] = {"sets": sets, "entries": np.append(entries, np.zeros(MOST, np.int32))}
        arrays |= {name: getattr(observations, name) for name in _OBSERVED}
        event = begin_change(work, "distil", model=model)
        (made := work.path / DISTILLED).mkdir()
        files = write_files(made, {name: array.reshape(-1) for name, array in arrays.items()})
        entry = DistilledEntry(content_name(files), model, len(observations.token_ids), files)
        put_distilled(work, entry.name, made)
        others = [other for other in manifest.distilled if other.model != model]
        following = replace(manifest, distilled=(*others, entry))
        publish(work, following, manifest.segments, (), event, counts=(0, 0))
    return int(np.count_nonzero(sets[:, :WAYS]))


def observed(store: Path, manifest: Manifest, model: str) -> list[Observations]:
    """Return what a model was observed to say, of which its table in a store was made; empty where there is none.

    Raises
    ------
    StoreCorruptError
        It is not what was written.
    """
    found = []
    for entry in manifest.distilled:
        if entry.model == model:
            folder = store / DISTILLED / entry.name
            for name in _OBSERVED:
                check_content(folder / name, entry.files[name])
            token_ids, lengths, top_ids, probs = (_mapped(folder, entry.files, name) for name in _OBSERVED)
            rows = len(token_ids)
            found.append(Observations(token_ids, lengths, top_ids.reshape(rows, -1), probs.reshape(rows, -1)))
    return found


def _placed(contexts: Contexts, capacity: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """(sets, entries) of a table, as `retrieve_spec.kernels.recycling` reads them."""
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


def distilled_tables(stores: Sequence[Datastore]) -> list[DistilledTable]:
    """Tables beside some stores; a damaged one is left out and logged."""
    found = []
    for store in stores:
        for entry in store.manifest.distilled:
            try:
                found.append(DistilledTable.open(store.path / DISTILLED / entry.name, entry.files))
            except StoreCorruptError as error:
                logger.warning("not drafted from: %s", error)
    return found
