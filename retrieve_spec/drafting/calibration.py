"""What is learned about how far each source can be trusted: plain arrays that can be saved and warm-started."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.blend import CELLS, NUM_SOURCES
from retrieve_spec.kernels.expand import SCALE_BINS


class Calibration:
    """Weights of levels per (source, match length, count, distinct) cell, and the final probability scale.

    Attributes
    ----------
    cells
        (CELLS, 4) float32: how often the level explained the token and was reached; the same for its most recent
        continuation.
    scale
        (NUM_SOURCES, SCALE_BINS + 1, 2) float32: hits and summed probability per log-odds bin.
    """

    def __init__(self) -> None:
        self.cells: NDArray[np.float32] = np.zeros((CELLS, 4), np.float32)
        self.scale: NDArray[np.float32] = np.zeros((NUM_SOURCES, SCALE_BINS + 1, 2), np.float32)

    def save(self, path: str | Path) -> None:
        """Write both tables as one ``.npz``."""
        np.savez_compressed(path, cells=self.cells, scale=self.scale)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises
        ------
        StoreCorruptError
            When the file does not hold tables of this version's shape.
        """
        made = cls()
        with np.load(path, allow_pickle=False) as data:
            for name in ("cells", "scale"):
                array = data[name] if name in data else np.empty(0)
                if array.shape != getattr(made, name).shape:
                    raise StoreCorruptError(
                        f"calibration table {name!r} of shape {getattr(made, name).shape}",
                        f"{array.shape} in {path}",
                        "Delete the file; calibration is learned again.",
                    )
                getattr(made, name)[:] = array
        return made
