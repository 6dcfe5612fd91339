"""Call kinds: what calls give a model besides text; the first of each kind is held to single steps on its own prompt.

Pictures, token types, sounds or encoder states can change what later tokens see in ways that a probe with text alone
does not show. Behind the first prompt of a kind a few drafts are verified over a copy of its cache; what they say must
be what single steps from such a copy say. Where it is not, chains are tried, then nothing is drafted, and later calls
of the kind begin so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from retrieve_spec.verify.comparison import by_passes, by_single_steps, drafts_for
from retrieve_spec.verify.number_format import Rounding
from retrieve_spec.verify.pass_inputs import PassInputs
from retrieve_spec.verify.shrink import lengths_of
from retrieve_spec.verify.steps import SingleSteps, keeping_texts
from retrieve_spec.verify.verifier import Mode, Verifier

logger = logging.getLogger(__name__)

_AHEAD = 12
"""Positions that the drafts take behind the prompt, and a few more."""


@dataclass(frozen=True, slots=True)
class CallKind:
    """What is alike of calls that are alike.

    Attributes
    ----------
    names
        Arguments that say something about the prompt; none for text alone.
    padded
        Whether the prompt is padded.
    beyond
        How many of the lengths at which layers begin to see less it exceeds.
    """

    names: frozenset[str]
    padded: bool = False
    beyond: int = 0

    @classmethod
    def of(cls, config: Any, inputs: PassInputs, length: int) -> CallKind:
        """The kind of a call with a prompt of `length` tokens, cached ones included, of a model of this `config`."""
        names = inputs.extras.kind
        if not names:
            return cls(names)
        return cls(names, inputs.is_padded, sum(length > other for other in lengths_of(config).values()))


@dataclass(slots=True)
class CallKinds:
    """What is known of the kinds of calls of one model in one state.

    Attributes
    ----------
    rounding
        How far passes may be from single steps; None for a model that is not drafted for.
    known
        The strongest mode of each, and why not better.
    """

    rounding: Rounding | None = None
    known: dict[CallKind, tuple[Mode, str]] = field(default_factory=dict)

    def examine(
        self,
        kind: CallKind,
        at_most: tuple[Mode, str],
        model: Any,
        steps: Callable[[], SingleSteps],
        verifier: Callable[[Mode], Verifier],
        room: int | None,
    ) -> tuple[Mode, str]:
        """The strongest mode for a kind: known, or found out behind the prompt that was just read.

        Parameters
        ----------
        at_most
            The strongest that the model and the cache allow.
        steps, verifier
            Make single steps, and a verifier in some mode, over copies of the cache.
        room
            Positions behind the prompt that the model was made for, None if unknown.
        """
        if (known := self.known.get(kind)) is not None:
            return known
        names = ", ".join(sorted(kind.names))
        if room is not None and room < _AHEAD:
            return "plain", f"too few positions are left to see what {names} changes"
        began = perf_counter()
        with torch.no_grad(), keeping_texts(model):
            found, final = self._strongest(names, at_most, model, steps, verifier)
        if final:
            self.known[kind] = found
        seconds = perf_counter() - began
        logger.info("calls with %s: %s mode%s (found in %.0f ms)", names, found[0],
                    f", {found[1]}" if found[1] else "", seconds * 1e3)  # fmt: skip
        return found

    def _strongest(
        self,
        names: str,
        at_most: tuple[Mode, str],
        model: Any,
        steps: Callable[[], SingleSteps],
        verifier: Callable[[Mode], Verifier],
    ) -> tuple[tuple[Mode, str], bool]:
        """The mode and why not better, and whether that says something of calls to come."""
        mode, reason = at_most
        modes: list[Mode] = ["tree", "chain"] if mode == "tree" else ["chain"]
        for tried in modes:
            drafts = drafts_for(tried, 1, model)
            try:
                wanted = by_single_steps(steps(), drafts).rows
            except Exception as error:  # a lack of memory, or of positions: no fault of the drafts
                logger.debug("single steps behind %s fail", names, exc_info=True)
                return ("plain", f"single steps behind {names} fail ({type(error).__name__})"), False
            try:
                got = by_passes(verifier(tried), drafts)
            except torch.OutOfMemoryError:
                return ("plain", f"too little memory to see what {names} changes"), False
            except Exception as error:  # whatever a model's own code raises
                logger.debug("a %s pass behind %s fails", tried, names, exc_info=True)
                problem = f"a {tried} pass fails ({type(error).__name__})"
            else:
                assert self.rounding is not None  # a model that is not drafted for is not examined
                deviation = self.rounding.compare(got, wanted)
                if deviation.is_rounding:
                    return (tried, reason), True
                problem = f"a {tried} pass gives other logits than single steps ({deviation})"
            reason = f"behind {names}, {problem}"
        return ("plain", reason), True
