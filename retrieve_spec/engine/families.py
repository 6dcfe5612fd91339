"""Families: rows with one prompt, and what each of them drafts from beside its own text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.engine.drafters import Drafters
from retrieve_spec.engine.rows import Row
from retrieve_spec.engine.shared_prompt import is_text_alone
from retrieve_spec.engine.siblings import Siblings
from retrieve_spec.sources.answers import RolloutMemory


@dataclass(slots=True)
class Family:
    """What the rows of one prompt share.

    Attributes
    ----------
    siblings
        What they draft from.
    rollouts
        Where their answers to `prompt` (n,) int32 are kept, or None.
    """

    siblings: Siblings
    prompt: NDArray[np.int32]
    rollouts: RolloutMemory | None = None

    def remember(self, token_ids: NDArray[np.int64]) -> None:
        """Keep an answer (m,)."""
        if self.rollouts is not None:
            self.rollouts.remember(self.prompt, token_ids.astype(np.int32))


def families(
    rows: Sequence[Row], drafters: Drafters, draft: str | None, cache_name: str, vocabulary: int, scope: str = ""
) -> list[Family | None]:
    """By row, what those with its prompt share; None for a row that has nothing but its own text.

    `vocabulary`: tokens that the model knows; `scope`: whose rows these are. A prompt of more than tokens has no
    answers in a memory of rollouts.
    """
    prompts = [_shown(row) for row in rows]
    keys = [prompt.tobytes() for prompt in prompts]
    counts, made = Counter(keys), dict[bytes, Family]()
    for row, prompt, key in zip(rows, prompts, keys, strict=True):
        inputs = row.inputs
        whole = is_text_alone(inputs, cache_name) and (inputs.holds_past or not inputs.past_length)
        rollouts = drafters.rollouts if whole else None
        if key not in made and (counts[key] > 1 or rollouts is not None):
            earlier = [] if rollouts is None else rollouts.automata(prompt, vocabulary)
            made[key] = Family(drafters.siblings(draft, earlier, scope, counts[key] > 1), prompt, rollouts)
    return [made.get(key) for key in keys]


def _shown(row: Row) -> NDArray[np.int32]:
    """(n,) int32 the prompt of a row without its padding."""
    ids: NDArray[np.int32] = row.inputs.input_ids[0].cpu().numpy().astype(np.int32)
    mask = row.inputs.model_kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2 or mask.shape[1] != len(ids):
        return ids
    shown: NDArray[np.int32] = ids[mask[0].bool().cpu().numpy()]
    return shown
