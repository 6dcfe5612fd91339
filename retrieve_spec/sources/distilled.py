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
from retrieve_spec.kernels.recycling import MOST
from retrieve_spec.kernels.source_table import KIND_DISTILLED
from retrieve_spec.sources.recycling import RecyclingTable
from retrieve_spec.sources.rows import Row, source_row

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

logger = logging.getLogger(__name__)
FOLDER = "distilled"
"""Folder of a store that holds the tables, one for each model."""
_REMEDY = "Distil the model again."


class DistilledTable:
    """Contexts of one to three tokens → the target's top k next tokens with probabilities, read and never written.

    It is a recycling table (`retrieve_spec.sources.recycling`) that was filled before: with the model's own top tokens
    after all that it wrote and read then.

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


def keep_distilled(table: RecyclingTable, store: Path, about: dict[str, Any]) -> Path:
    """Write what a recycling table has learned of a model beside a store, in place of what is there of that model.

    Raises
    ------
    StoreError
        It cannot be written; what was there stays.
    """
    capacity = len(table.entries)
    path = distilled_folder(store, str(about["model"]))
    partial = path.with_name(f".{uuid4().hex}")
    entries = np.concatenate([table.entries.reshape(-1), np.zeros(MOST, np.int32)])
    try:
        partial.mkdir(parents=True)
        np.save(partial / "sets.npy", table.sets)
        np.save(partial / "entries.npy", entries)
        whole = {**about, "capacity": capacity, "k": table.k}
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
    return path


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
