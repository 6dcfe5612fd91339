"""Shared prompt: what the first of several sequences with one prompt has read, for the others to start from.

Keys and values are copied when a sequence first writes behind them, and never before. Nobody waits for a reader that
has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from transformers import DynamicCache

from retrieve_spec.verify.cache import same_rows
from retrieve_spec.verify.extras import OF_TEXT
from retrieve_spec.verify.verifier import VerifierInputs, VerifierOutput

KEPT = 4
"""Prompts of `generate_many` whose readings are kept for later requests."""


@runtime_checkable
class CopiesRows(Protocol):
    """A verifier that can hand out what its cache holds."""

    def copy_rows(self) -> DynamicCache | None:
        """The rows held between two passes, in a cache that nothing writes to; None where rows are not all there is."""


class SharedPrompt:
    """One prompt of several sequences, for models that take the cache as the argument `cache_name`."""

    def __init__(self, cache_name: str) -> None:
        self.members = 0
        self._cache_name = cache_name
        self._is_read: Callable[[], bool] | None = None  # asks the sequence that reads it whether it still does
        self._rows: DynamicCache | None = None
        self._output: VerifierOutput | None = None
        self._first_row = 0

    def must_wait(self, is_reading: Callable[[], bool]) -> bool:
        """Whether another sequence is reading the prompt; if nobody is, the one that asks does from now on."""
        if self._output is not None:
            return False
        if self._is_read is not None and self._is_read != is_reading and self._is_read():
            return True
        self._is_read = is_reading
        return False

    def keep(self, verifier: Any, output: VerifierOutput, first_row: int) -> None:
        """Keep what has been read and committed, unless nobody else will ask for it."""
        self._is_read = None
        if self.members < 2 or self._output is not None or not isinstance(verifier, CopiesRows):
            return
        rows = verifier.copy_rows()
        if rows is not None:
            self._rows, self._first_row = rows, first_row
            hidden = None if output.hidden is None else output.hidden.clone()
            self._output = VerifierOutput(output.logits.clone(), hidden)

    def taken(self, inputs: VerifierInputs) -> tuple[VerifierInputs, tuple[VerifierOutput, int] | None]:
        """What a sequence with these inputs starts from.

        Returns
        -------
        inputs
            Those that begin behind the prompt if it was kept, else the same.
        last_pass
            What the prompt's last pass gave, and the row of it that follows the prompt; None where it was not kept.
        """
        if self._output is None or self._rows is None:
            return inputs, None
        kwargs = {**inputs.model_kwargs, self._cache_name: same_rows(self._rows)}
        past = inputs.input_ids.shape[1]
        behind = replace(inputs, model_kwargs=kwargs, past_length=past, holds_past=True, common_rows=True)
        return behind, (self._output, self._first_row)


def is_text_alone(inputs: VerifierInputs, cache_name: str) -> bool:
    """Whether tokens are all that a model is given."""
    known = OF_TEXT | {cache_name}
    return all(name in known or value is None for name, value in inputs.model_kwargs.items())


class SharedPrompts:
    """The prompts of sequences that go together, by their tokens."""

    def __init__(self, cache_name: str) -> None:
        self.cache_name = cache_name
        self._known: dict[bytes, SharedPrompt] = {}

    def of(self, inputs: VerifierInputs) -> SharedPrompt | None:
        """What sequences with these inputs share; None where they hold more than tokens."""
        if not is_text_alone(inputs, self.cache_name) or inputs.past_length or inputs.returns_cache:
            return None
        parts = [inputs.input_ids, *(inputs.model_kwargs.get(name) for name in ("attention_mask", "position_ids"))]
        key = b"|".join(b"" if part is None else part.cpu().numpy().tobytes() for part in parts)
        shared = self._known.pop(key, None) or SharedPrompt(self.cache_name)
        shared.members += 1
        self._known[key] = shared
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return shared
