"""Signatures: what calls besides text give a model, and which mode each kind of call verifies drafts in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from retrieve_spec.verify.comparison import Rounding, by_passes, by_single_steps, drafts_for
from retrieve_spec.verify.pass_inputs import PassInputs
from retrieve_spec.verify.shrink import lengths_of
from retrieve_spec.verify.steps import SingleSteps, keeping_texts
from retrieve_spec.verify.verifier import Mode, Verifier

logger = logging.getLogger(__name__)

_TRIAL_POSITIONS = 12
"""Positions that a trial takes after the prompt, and a few more."""


@dataclass(frozen=True, slots=True)
class InputSignature:
    """The kind of a call: calls of one kind verify drafts in the same mode.

    Attributes
    ----------
    names
        Arguments that describe the prompt; none for text alone.
    padded
        Whether the prompt is padded.
    beyond
        How many of the lengths from which layers attend to less the prompt exceeds.
    """

    names: frozenset[str]
    padded: bool
    beyond: int

    @classmethod
    def of(cls, config: Any, inputs: PassInputs) -> InputSignature:
        """Return the signature of a call of a model of this `config`."""
        beyond = sum(inputs.length > other for other in lengths_of(config).values())
        return cls(inputs.names, inputs.is_padded, beyond)


@dataclass(slots=True)
class SignatureModes:
    """The modes of one model in one state, by the signature of the call.

    Attributes
    ----------
    rounding
        How far passes may be from single steps; None for a model that is not drafted for.
    known
        The strongest mode for each signature, and why not better.
    """

    rounding: Rounding | None = None
    known: dict[InputSignature, tuple[Mode, str]] = field(default_factory=dict)

    def examine(
        self,
        signature: InputSignature,
        at_most: tuple[Mode, str],
        model: Any,
        steps: Callable[[], SingleSteps],
        verifier: Callable[[Mode], Verifier],
        room: int | None,
    ) -> tuple[Mode, str]:
        """Return the strongest mode for a signature, found by trials after the prompt that was just read.

        Parameters
        ----------
        at_most
            The strongest mode that the model and the cache allow.
        steps, verifier
            Make single steps, and a verifier in some mode, over copies of the cache.
        room
            Positions after the prompt that the model was made for, None if unknown.
        """
        if (known := self.known.get(signature)) is not None:
            return known
        names = ", ".join(sorted(signature.names))
        if room is not None and room < _TRIAL_POSITIONS:
            return "plain", f"too few positions are left to see what {names} changes"
        began = perf_counter()
        try:
            with torch.no_grad(), keeping_texts(model):
                found = self.known[signature] = self._strongest(names, at_most, model, steps, verifier)
        except Exception as error:  # out of memory, or of positions: drafts are not the cause
            logger.debug("single steps after %s fail", names, exc_info=True)
            return "plain", f"what {names} changes cannot be seen ({type(error).__name__})"
        mode, why = found
        told = f"{mode} mode, {why}" if why else f"{mode} mode"
        logger.info("calls with %s: %s (found in %.0f ms)", names, told, (perf_counter() - began) * 1e3)
        return found

    def _strongest(
        self,
        names: str,
        at_most: tuple[Mode, str],
        model: Any,
        steps: Callable[[], SingleSteps],
        verifier: Callable[[Mode], Verifier],
    ) -> tuple[Mode, str]:
        """Return the strongest mode whose logits are those of single steps, and why not better."""
        mode, reason = at_most
        modes: list[Mode] = ["tree", "chain"] if mode == "tree" else ["chain"]
        for tried in modes:
            drafts = drafts_for(tried, 1, model)
            wanted = by_single_steps(steps(), drafts).rows
            try:
                got = by_passes(verifier(tried), drafts)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a model's own code may raise anything
                logger.debug("a %s pass after %s fails", tried, names, exc_info=True)
                reason = f"after {names}, a {tried} pass fails ({type(error).__name__})"
                continue
            assert self.rounding is not None  # models without drafts are not examined
            deviation = self.rounding.compare(got, wanted)
            if deviation.is_rounding:
                return tried, reason
            reason = f"after {names}, a {tried} pass gives other logits than single steps ({deviation})"
        return "plain", reason
