"""A decoding set up by `Speculation` in, an iterator over its visible tokens out that ends well however it ends."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.provenance import sourced_runs
from retrieve_spec.engine.loop import Decoding

if TYPE_CHECKING:
    from retrieve_spec.engine.speculation import Speculation


class Running:
    """A generation under way: an iterator over the visible tokens of each pass, (t,) int32.

    `close` (also at the end of iteration and on any error) ends it: the drafter keeps what it may keep, the report is
    written, the cache is handed back as `cache`.
    """

    def __init__(self, owner: Speculation, decoding: Decoding) -> None:
        self.decoding = decoding
        self.cache: Any = None
        self._owner = owner
        self._passes: Generator[NDArray[np.int32], None, None] | None = None
        self._turn = 0
        self._began = 0.0
        self._closed = False

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        try:
            while not self._closed:
                if self._passes is None:
                    self._turn = self._owner.turns.begin()
                    self._began = perf_counter()
                    self._passes = self.decoding.run()
                visible = self._owner.turns.step(self._turn, self._passes)
                if visible is None:
                    return
                yield visible
        finally:
            self.close()

    def close(self) -> None:
        """End the generation; safe to call more than once."""
        if self._closed:
            return
        self._closed = True
        if self._passes is None:
            return
        self._passes.close()
        self.cache = self.decoding.finish()
        report = self.decoding.log.summary()
        report.provenance = sourced_runs(report.origins, self._owner.datastores)
        report.seconds = perf_counter() - self._began
        self._owner.last = report
