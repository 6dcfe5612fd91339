"""Company: which sequences of one model share passes, and the verifiers that let them."""

from __future__ import annotations

from collections.abc import Callable

from retrieve_spec.recorded.recorded_verifier import RecordedVerifier, own_forward
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface
from retrieve_spec.verify.padded_batch import PaddedBatch, PaddedRow
from retrieve_spec.verify.padded_probe import why_not_together
from retrieve_spec.verify.plain import keeping_texts
from retrieve_spec.verify.verifier import Verifier


class Company:
    """Makes verifiers for sequences that are decoded together."""

    def __init__(self) -> None:
        self._looked_at: ModelInterface | None = None
        self._problem = ""
        self._padded: PaddedBatch | None = None

    def why_alone(self, verifier: Verifier) -> str:
        """Why sequences verified like this share no passes; a model's own forward is tried out once."""
        if isinstance(verifier, RecordedVerifier):
            return ""
        if isinstance(verifier, HFVerifier):
            return self._why_not_padded(verifier)
        return verifier.reason or "its verifier serves one text"

    def verifiers(self, make: Callable[[], Verifier], count: int, recorded: bool = True) -> list[Verifier]:
        """Verifiers of sequences that are decoded together.

        `recorded`: whether passes may be recorded ones; else they are the model's own.
        """
        first = make()
        if isinstance(first, RecordedVerifier) and recorded:
            return [first, *(first.fresh() for _ in range(count - 1))]
        all_of_them = [own_forward(each) for each in (first, *(make() for _ in range(count - 1)))]
        first = all_of_them[0]
        if self.why_alone(first) or self._padded is None:
            return all_of_them
        return [PaddedRow(each, self._padded) for each in all_of_them if isinstance(each, HFVerifier)]

    def _why_not_padded(self, verifier: HFVerifier) -> str:
        """Why texts do not share passes of the model's own forward."""
        if verifier.interface is not self._looked_at:
            with keeping_texts(verifier.model):  # the call at hand may have been prepared already
                self._problem = why_not_together(verifier.model, verifier.interface)
            self._padded = None if self._problem else PaddedBatch(verifier.model, verifier.interface)
            self._looked_at = verifier.interface
        return self._problem
