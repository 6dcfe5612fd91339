"""What is found out about a model that tests share: found out once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from retrieve_spec.recorded.verifier_factory import VerifierFactory
from retrieve_spec.verify.signatures import SignatureModes


class FoundOnce:
    """Lets a model be probed and recorded once for each way to accelerate it, as long as it is what it was then.

    The same look at the model decides as between two generations. Kinds of calls are tried anew in every test.

    Parameters
    ----------
    model
        The model, which tests leave as they found it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._found: dict[tuple[Any, ...], Any] = {}

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let what earlier tests found answer until `patch` is undone."""
        find_out = VerifierFactory._find_out

        def found(factory: Any, is_first: bool) -> Any:
            if factory._model is not self.model:
                return find_out(factory, is_first)
            way = factory._config.recorded_pass, factory._config.exact, factory._layer
            if way not in self._found or not self._found[way].state.holds():
                self._found[way] = find_out(factory, is_first)
            known = self._found[way]
            signatures = SignatureModes(known.finding.signatures.rounding)
            return replace(known, finding=replace(known.finding, signatures=signatures))

        patch.setattr(VerifierFactory, "_find_out", found)
