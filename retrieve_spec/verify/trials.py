"""Trials: texts that are read by passes over drafts and by single steps, which must give the same logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from retrieve_spec.errors import in_a_line
from retrieve_spec.verify.comparison import Draft, PlainText, Rounding, by_passes, drafts_for, row_texts
from retrieve_spec.verify.steps import Captured, prepare_call
from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs

logger = logging.getLogger(__name__)

PROMPT = 12
"""Tokens of a prompt that is shorter than every window."""
_ACROSS = 318
"""Tokens of a prompt after which a draft reaches into the next block of keys of a GPU's attention."""
_AHEAD = 80
"""Positions that trials take after a prompt at most."""


class VerificationError(Exception):
    """A way to verify is not used for a model; the message says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One text to read: tokens of the prompt, padding in front of it, and how many rounds of passes after it."""

    prompt: int
    padding: int
    rounds: int = 1

    @property
    def length(self) -> int:
        """Positions that the text takes at most."""
        return self.prompt + (4 if self.rounds == 1 else 9 * self.rounds + 3)


class PlainTexts:
    """The texts of trials as plain decoding reads them, once each.

    Parameters
    ----------
    pads, pieces
        Whether the model takes padding in front of texts, and prompts in pieces.
    """

    def __init__(self, pads: bool = True, pieces: bool = True) -> None:
        self._pads, self._pieces = pads, pieces
        self._read: dict[tuple[Trial, Mode], PlainText] = {}

    def read(self, model: Any, trial: Trial, mode: Mode) -> PlainText:
        """Return a trial's text with the drafts of a mode; without padding where the model takes none."""
        text = self._read.get((trial, mode))
        if text is None:
            drafts = drafts_for(mode, trial.rounds, model)
            try:
                text = PlainText.read(model, trial.prompt, trial.padding, drafts, self._pads, self._pieces)
            except Exception:
                if not trial.padding:
                    raise
                text = PlainText.read(model, trial.prompt, 0, drafts, self._pads, self._pieces)
            self._read[trial, mode] = text
        return text

    @property
    def rounding(self) -> Rounding | None:
        """The largest rounding of the texts; None where none was read."""
        return max((text.rounding for text in self._read.values()), key=lambda r: (r.rms, r.largest), default=None)

    def clear(self) -> None:
        """Forget the texts."""
        self._read.clear()


def check_verifier(
    model: Any,
    verifier: Verifier,
    mode: Mode = "tree",
    texts: PlainTexts | None = None,
    trial: Trial = Trial(PROMPT, 0),
) -> None:
    """Compare a verifier's passes over drafts with single steps.

    Raises
    ------
    VerificationError
        They give other logits, or fail.
    """
    problem = problem_of(model, mode, [trial], lambda: verifier, PlainTexts() if texts is None else texts)
    if problem is not None:
        raise VerificationError(problem[1])


def check_exact(model: Any, verifier: Callable[[], Verifier], texts: PlainTexts) -> None:
    """Compare a verifier's passes over drafts with its passes without drafts, bit for bit.

    Raises
    ------
    VerificationError
        They give other logits.
    """
    trial = Trial(PROMPT if model.device.type == "cpu" else _ACROSS, 0)
    text = texts.read(model, trial, "tree")
    with torch.no_grad():
        drafted = _verified(text, "tree", verifier())
        for row, tokens in enumerate(row_texts(text.drafts)):
            one_by_one = replace(text, drafts=[Draft(token, [], []) for token in tokens])
            alone = _verified(one_by_one, "tree", verifier())[-1]
            if not torch.equal(drafted[row], alone):
                raise VerificationError("a row's logits depend on the drafts beside it")


def problem_of(
    model: Any, mode: Mode, trials: list[Trial], verifier: Callable[[], Verifier], texts: PlainTexts
) -> tuple[float, str] | None:
    """Return by which factor a mode exceeds the allowed deviation, and what is wrong; None when nothing is."""
    try:
        with torch.no_grad():
            for trial in trials:
                text = texts.read(model, trial, mode)
                got = _verified(text, mode, verifier())
                deviation = text.rounding.compare(got, text.reference.rows)
                if not deviation.is_rounding:
                    return deviation.excess, f"a {mode} pass gives other logits than single steps ({deviation})"
    except Exception as error:  # a model's own code may raise anything; plain decoding still works
        logger.debug("probing %s failed", mode, exc_info=True)
        return math.inf, f"a {mode} pass fails ({in_a_line(error)})"
    return None


def _verified(text: PlainText, mode: Mode, verifier: Verifier) -> torch.Tensor:
    """Return the (rows, vocab) logits of a verifier's passes over a text."""
    try:
        _read(verifier, text.call, in_pieces=True)
        if verifier.mode != mode:
            raise RuntimeError(verifier.reason)
        return by_passes(verifier, text.drafts)
    finally:
        verifier.finish()


def read_prompt(model: Any, verifier: Verifier, ids: torch.Tensor) -> int:
    """Let a verifier read a prompt of (1, L) tokens; return how many it holds then."""
    return _read(verifier, prepare_call(model, ids, torch.ones_like(ids)))


def _read(verifier: Verifier, call: Captured, in_pieces: bool = False) -> int:
    length = int(call.input_ids.shape[1])
    verifier.start(VerifierInputs(call.input_ids, call.take(), max_length=length + _AHEAD))
    cuts = [length // 2, max(length // 2, length - 2)] if in_pieces and not verifier.whole_prompts else []
    for piece in filter(len, np.split(call.input_ids[0].cpu().numpy().astype(np.int32), cuts)):
        verifier.forward(piece)
        verifier.commit(np.empty(0, np.int32))
    return length
