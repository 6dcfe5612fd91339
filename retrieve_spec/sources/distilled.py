"""Distilled tables: what a model says after contexts of one to three tokens, learned once and kept beside a store."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError, StoreError, in_a_line
from retrieve_spec.kernels.recycling import MOST, SET, WAYS
from retrieve_spec.kernels.source_table import KIND_DISTILLED
from retrieve_spec.sources.observations import Contexts, Observations, averaged, rank_in_group
from retrieve_spec.sources.rows import Row, source_row

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

logger = logging.getLogger(__name__)
FOLDER, OBSERVED = "distilled", "observed.npz"
"""Folder of a store that holds the tables, one for each model, and the file of what a table was made of."""
_REMEDY = "Distil the model again."


class DistilledTable:
    """Contexts of one to three tokens → the target's top k next tokens with probabilities, read and never written.

    It has the layout of a recycling table (`retrieve_spec.sources.recycling`), and holds averages of the model's own
    top tokens over all that it wrote and read (`retrieve_spec.sources.observations`).

    Parameters
    ----------
    sets, entries
        As in `retrieve_spec.kernels.recycling`; entries are followed by room to read in.
    about
        `model`: fingerprint of the model that was asked; `tokens`: how many it wrote and read.
    """

    def __init__(self, sets: NDArray[np.uint64], entries: NDArray[np.int32], about: dict[str, Any]) -> None:
        self.sets, self.entries, self.about = sets, entries, about

    def row(self, number: int) -> Row:
        """Row of the mixture's source table."""
        capacity = len(self.sets) // 2
        k = (len(self.entries) - MOST) // capacity // 2
        return source_row(
            KIND_DISTILLED, number, "recycling", sets=self.sets, entries=self.entries, capacity=capacity, k=k
        )

    @classmethod
    def open(cls, path: Path) -> DistilledTable:
        """Map a table's files into memory.

        Raises
        ------
        StoreCorruptError
            They are not what was written.
        """
        try:
            about = json.loads((path / "about.json").read_text(encoding="utf-8"))
            sets, entries = (np.load(path / f"{name}.npy", mmap_mode="r") for name in ("sets", "entries"))
            capacity, k = int(about["capacity"]), int(about["k"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StoreCorruptError(f"a distilled table in {path}", in_a_line(error), _REMEDY) from error
        whole = sets.shape == (2 * capacity,) and sets.dtype == np.uint64 and capacity & (capacity - 1) == 0
        if not whole or entries.shape != (2 * k * capacity + MOST,) or entries.dtype != np.int32 or not 0 < k <= MOST:
            got = f"{sets.dtype} {sets.shape} and {entries.dtype} {entries.shape}"
            raise StoreCorruptError(f"a table of {capacity} contexts in {path}", got, _REMEDY)
        return cls(sets, entries, about)


def keep_distilled(observations: Observations, capacity: int, store: Path, about: dict[str, Any]) -> int:
    """Write a table of what a model said beside a store, in place of what is there of that model.

    Parameters
    ----------
    observations
        What it said; kept, too, so that a later run can add to it.
    capacity
        Contexts that the table has room for, a power of two; of those that do not fit, the most observed stay.
    store
        Folder of the store.
    about
        `DistilledTable.about`.

    Returns
    -------
    int
        Contexts in the table.

    Raises
    ------
    StoreError
        It cannot be written; what was there stays.
    """
    path = distilled_folder(store, str(about["model"]))
    partial = path.with_name(f".{uuid4().hex}")
    sets, entries = _placed(averaged(observations), capacity)
    try:
        partial.mkdir(parents=True)
        np.save(partial / "sets.npy", sets.reshape(-1))
        np.save(partial / "entries.npy", np.concatenate([entries.reshape(-1), np.zeros(MOST, np.int32)]))
        observations.save(partial / OBSERVED)
        whole = {**about, "capacity": capacity, "k": entries.shape[1] // 2}
        (partial / "about.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
        if path.exists():
            os.rename(path, old := path.with_name(f".{uuid4().hex}"))
            os.rename(partial, path)
            shutil.rmtree(old)
        else:
            os.rename(partial, path)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StoreError(f"to write to {path}", in_a_line(error), "Check permissions and free space.") from error
    return int(np.count_nonzero(sets[:, :WAYS]))


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


def distilled_folder(store: Path, model: str) -> Path:
    """Folder of the table of one model, by its fingerprint, beside a store."""
    return store / FOLDER / hashlib.sha256(model.encode()).hexdigest()[:16]


def distilled_tables(stores: Sequence[Datastore]) -> list[DistilledTable]:
    """Tables beside some stores; a damaged one is left out and logged."""
    found = []
    for store in stores:
        for path in sorted((store.path / FOLDER).glob("[!.]*")):
            try:
                found.append(DistilledTable.open(path))
            except StoreCorruptError as error:
                logger.warning("not drafted from: %s", error)
    return found
