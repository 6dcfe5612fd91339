"""State folder: what a `ServingDrafter` learned, from run to run; flat arrays that hold no code."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.calibration import Calibration, kept_calibration, put_array
from retrieve_spec.errors import ConfigError, in_a_line
from retrieve_spec.sources.automaton import BOUNDARY
from retrieve_spec.sources.session import SessionMemory

logger = logging.getLogger(__name__)
GREEDY, SAMPLED = "greedy", "sampled"
_SESSION = "session.npy"


def open_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, made where there is none.

    Raises
    ------
    ConfigError
        It cannot be.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("a folder to keep state in", in_a_line(error), "Name a folder that can be written.") from None
    return path


def load_calibrations(folder: Path | None) -> dict[str, Calibration]:
    """Calibrations for greedy and for sampled text, which have their phrases in common; damaged ones start anew."""
    found = {name: kept_calibration(None if folder is None else folder / f"{name}.npy") for name in (GREEDY, SAMPLED)}
    most = max(found.values(), key=lambda calibration: calibration.phrases.requests)
    for calibration in found.values():
        calibration.phrases = most.phrases
    return found


def save_session(folder: Path, session: SessionMemory) -> None:
    """Write the texts that a session remembers, put in place at once; what cannot be written is logged."""
    parts: list[NDArray[np.int32]] = []
    for text in session.texts:
        parts += [text, np.array([BOUNDARY], np.int32)]
    put_array(folder / _SESSION, np.concatenate(parts) if parts else np.empty(0, np.int32), "the session")


def load_session(folder: Path, session: SessionMemory) -> None:
    """Remember the texts of an earlier run; a damaged file is logged and left out."""
    try:
        with open(folder / _SESSION, "rb") as file:
            flat = np.lib.format.read_array(file, allow_pickle=False)
        if flat.dtype != np.int32 or flat.ndim != 1 or (flat < BOUNDARY).any():
            raise ValueError(f"{flat.dtype} of shape {flat.shape}")
    except FileNotFoundError:
        return
    except Exception as error:  # a damaged head fails as anything that parses Python can
        logger.warning("the session starts anew: %s: %s", folder / _SESSION, in_a_line(error))
        return
    for text in np.split(flat, np.flatnonzero(flat == BOUNDARY) + 1):
        if len(text) > 1:
            session.remember(text[:-1])
