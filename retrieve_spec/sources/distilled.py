"""Distilled tables as a source: a model's top tokens after contexts of one to three tokens (`datastore.distilled`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.distilled import states_of, table_of
from retrieve_spec.datastore.files import FileEntry
from retrieve_spec.datastore.manifest import DISTILLED, DistilledEntry
from retrieve_spec.datastore.state_rows import StateRows
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.recycling import MOST
from retrieve_spec.kernels.source_table import KIND_DISTILLED
from retrieve_spec.sources.rows import Row, source_row

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

logger = logging.getLogger(__name__)
_Read = TypeVar("_Read")


class DistilledTable:
    """Contexts of one to three tokens, and skip-grams → the target's top k next tokens, read and never written.

    It has the layout of a recycling table (`retrieve_spec.sources.recycling`), and holds averages of the model's own
    top tokens over all that it wrote and read (`retrieve_spec.datastore.observations`).

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
            They are not what was written, or would lead a look-up outside of them.
        """
        return cls(*table_of(folder, files))


class ModelTables:
    """The tables and state rows of a model in some stores, opened when they are first asked for.

    Those of other models are left out, unless there are none of this one: a table of the model in another format has
    another fingerprint, and is a good drafter. What is damaged is logged and left out.

    Parameters
    ----------
    stores
        Open stores.
    fingerprint
        Computes the fingerprint of the model; None if the model is not known: then all tables are taken.
    """

    def __init__(self, stores: Sequence[Datastore], fingerprint: Callable[[], str] | None = None) -> None:
        every = [(store.path / DISTILLED / entry.name, entry) for store in stores for entry in store.manifest.distilled]
        self._taken = every
        if not every or fingerprint is None:
            return
        model = fingerprint()
        own = [table for table in every if table[1].model == model]
        for folder, entry in every:
            if entry.model != model:
                done = "left out" if own else "drafted from, since there is none of this model"
                logger.info("table of another model or format (%s, not %s) %s: %s", entry.model, model, done, folder)
        self._taken = own or every

    @cached_property
    def tables(self) -> list[DistilledTable]:
        """The tables."""
        return list(self._opened(lambda folder, entry: DistilledTable.open(folder, entry.files)))

    @cached_property
    def states(self) -> StateRows | None:
        """The most state rows that one of the tables has."""
        found = (rows for rows in self._opened(states_of) if rows is not None)
        return max(found, key=lambda rows: len(rows.keys), default=None)

    def _opened(self, read: Callable[[Path, DistilledEntry], _Read]) -> Iterator[_Read]:
        """Yield what is read of each table."""
        for folder, entry in self._taken:
            try:
                yield read(folder, entry)
            except StoreCorruptError as error:
                logger.warning("not drafted from: %s", error)
