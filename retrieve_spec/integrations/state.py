"""State folder: what a `ServingDrafter` learned, from run to run; flat arrays that hold no code."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from retrieve_spec.drafting.calibration import Calibration, kept_calibration
from retrieve_spec.errors import ConfigError, RetrieveSpecError, in_a_line
from retrieve_spec.sources.answers import AnswerMemory, answers_by_scope

logger = logging.getLogger(__name__)
GREEDY, SAMPLED = "greedy", "sampled"
_SESSION = "session.bin"


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


def open_answers(folder: Path, session_tokens: int) -> AnswerMemory:
    """Answers of earlier runs; a damaged file is logged and deleted, they are remembered anew."""
    path = folder / _SESSION
    try:
        return answers_by_scope(path, "", session_tokens)
    except RetrieveSpecError as error:
        logger.warning("the session starts anew: %s", in_a_line(error))
        with contextlib.suppress(OSError):
            path.unlink()
    return answers_by_scope(None if path.exists() else path, "", session_tokens)
