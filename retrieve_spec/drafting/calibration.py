"""Calibration: how reliable each source is, learned as plain arrays that can be saved and loaded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.files import write_atomically
from retrieve_spec.errors import StoreCorruptError, in_a_line
from retrieve_spec.kernels import calibration as kernels
from retrieve_spec.kernels.calibration import CELLS, NUM_SOURCES, SCALE_BINS
from retrieve_spec.kernels.unigram import CLASSES, PLACES, RATES
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.phrases import PhraseMemory
from retrieve_spec.sources.unigrams import Unigrams

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

logger = logging.getLogger(__name__)
_SAVE_EVERY = 16
_FACTORS = (CLASSES + PLACES) * CLASSES * 2
_SIZE = CELLS * 4 + 2 * NUM_SOURCES * (SCALE_BINS + 1) * 2 + RATES * 2 + _FACTORS + 2 * 2
_NO_CLASSES = np.empty(0, np.uint8)


class Calibration:
    """Weights of levels per (source, match length, count, distinct) cell, and the final probability scale.

    Parameters
    ----------
    path
        File to warm-start from, if it exists and is whole, and to keep the tables in; None keeps them in memory alone.
    classes
        (≤ vocabulary,) uint8 class of each token (`retrieve_spec.sources.unigrams.token_classes`), if known.

    Attributes
    ----------
    cells
        (CELLS, 4) float32: how often the level explained the token and was reached; the same for its most recent
        continuation.
    scale
        (2 · NUM_SOURCES, SCALE_BINS + 1, 2) float32: hits and summed probability per log-odds bin, for greedy
        decoding and then for sampling with known noise.
    rates
        (RATES, 2) float32: how often tokens without context came, of how many chances.
    factors
        (CLASSES + PLACES, 2 · CLASSES) float32: how often those of a class came, and were expected, after one and
        two other classes.
    drafts
        (2, 2) float64: draft tokens accepted and expected, greedy and with known noise; old ones fade.
    phrases
        What the answers of several requests had in common, kept in a file of its own beside `path`.
    """

    def __init__(self, path: str | Path | None = None, classes: NDArray[np.uint8] = _NO_CLASSES) -> None:
        self.cells: NDArray[np.float32] = np.zeros((CELLS, 4), np.float32)
        self.scale: NDArray[np.float32] = np.zeros((2 * NUM_SOURCES, SCALE_BINS + 1, 2), np.float32)
        self.rates: NDArray[np.float32] = np.zeros((RATES, 2), np.float32)
        self.factors: NDArray[np.float32] = np.zeros((CLASSES + PLACES, 2 * CLASSES), np.float32)
        self.classes = classes
        self.drafts: NDArray[np.float64] = np.zeros((2, 2))
        self.path = None if path is None else Path(path)
        self.phrases = PhraseMemory()
        self._requests = self._phrases_saved = 0
        if self.path is not None:
            _take_kept(self.path, "weights", self._unpack)
            _take_kept(_phrases_path(self.path), "phrases", self.phrases.unpack)
            self._phrases_saved = self.phrases.requests

    def unigrams(self, mute: bool = False) -> Unigrams:
        """Return the unigrams of a text, ranked by what this calibration has learned."""
        return Unigrams(self.rates, self.factors, self.classes, mute)

    def learn_draft(self, expected: float, accepted: int, noise: bool) -> None:
        """Learn the result of a draft: expected (more than 0, ratio included) and actual number of accepted tokens."""
        kernels.learn_draft(self.drafts[int(noise)], expected, accepted)

    def keep(self, at_once: bool = False) -> None:
        """Count a request; after the first and every 16th, write the tables to `path`, if there is one.

        With `at_once` nothing is counted, and they are written.
        """
        self._requests += not at_once
        if self.path is not None and (at_once or self._requests % _SAVE_EVERY == 1):
            self.save(self.path)
            if self.phrases.requests != self._phrases_saved:
                put_array(_phrases_path(self.path), self.phrases.packed(), private=True)
                self._phrases_saved = self.phrases.requests

    def forget(self) -> None:
        """Forget the phrases, and delete their file; weights contain no text and stay."""
        self.phrases.forget()
        self._phrases_saved = 0
        if self.path is not None:
            kept = _phrases_path(self.path)
            kept.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # the folder
                for path in kept.parent.iterdir():
                    if path.name.startswith(f".{kept.name}."):  # left by a process that was killed while writing
                        path.unlink(missing_ok=True)

    def begin_with(self, other: Calibration) -> None:
        """Copy the tables of another calibration, unless this one has learned something."""
        if not self.cells.any():
            for name in ("cells", "scale", "drafts"):
                getattr(self, name)[...] = getattr(other, name)

    def save(self, path: str | Path) -> None:
        """Write all tables as one flat ``.npy``, atomically."""
        learned = (self.cells, self.scale, self.rates, self.factors, self.drafts)
        tables = [table.ravel() for table in learned]
        put_array(Path(path), np.concatenate(tables, dtype=np.float32))

    def statistics(self) -> dict[str, tuple[float, float]]:
        """Return how many candidates of each source were right, and how many were expected to be; old ones fade."""
        hits, expected = self.scale.reshape(2, NUM_SOURCES, -1, 2).sum((0, 2), dtype=np.float64).T.tolist()
        return {name: (h, p) for name, h, p in zip(SOURCE_NAMES[:NUM_SOURCES], hits, expected, strict=True) if p > 0}

    def _unpack(self, flat: NDArray[np.float32]) -> None:
        """Load what `save` wrote; raise `StoreCorruptError` for anything else."""
        whole = flat.shape == (_SIZE,) and flat.dtype == np.float32
        if not whole or not np.isfinite(flat).all() or (flat < 0).any():
            got = f"{flat.dtype} of shape {flat.shape}"
            raise StoreCorruptError(f"{_SIZE} float32 counts", got, "They are learned again.")
        tables: list[NDArray[Any]] = [self.cells, self.scale, self.rates, self.factors, self.drafts]
        for table, values in zip(tables, np.split(flat, np.cumsum([table.size for table in tables[:-1]])), strict=True):
            table[:] = values.reshape(table.shape)


def _take_kept(path: Path, what: str, take: Callable[[NDArray[Any]], None]) -> None:
    """Let an array that a file holds be taken over.

    A damaged file is not worth failing for: it is logged and deleted, and what it held is learned again.
    """
    try:
        with open(path, "rb") as file:
            take(np.lib.format.read_array(file, allow_pickle=False))
    except FileNotFoundError:
        return
    except Exception as error:  # a damaged header is parsed as Python, and may raise anything
        logger.warning("%s start anew: %s: %s", what, path, in_a_line(error))
        if not isinstance(error, PermissionError):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _phrases_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.phrases{path.suffix}")


def put_array(target: Path, array: NDArray[Any], what: str = "calibration", private: bool = False) -> None:
    """Write an array as ``.npy``, atomically; an error is logged.

    Nobody else may read a `private` one, unless its owner has let them.
    """
    try:
        write_atomically(target, lambda file: np.save(file, array), private)
    except OSError as error:  # a full disk or a store that became read-only must not end a generation
        logger.warning("%s is not kept: %s", what, error)


def calibration_for(datastores: Sequence[Datastore], model_key: str) -> Calibration:
    """Return the calibration beside the first writable store, or a new one in memory."""
    paths = [store.calibration_path(model_key) for store in datastores]
    return Calibration(next((path for path in paths if path is not None), None))
