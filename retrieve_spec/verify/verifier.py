"""Verifier protocol between the loop and a model's forward pass: logits of a draft tree, and accepted rows kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree

Mode = Literal["tree", "chain", "plain"]
"""What a verifier can check in one pass: any tree, one chain of tokens, or nothing but the next token. It may be less
for some passes of a generation than for others."""


CACHE_NAMES = ("cache_params", "past_key_values", "cache")
"""Names of the cache among a forward's arguments: `cache` in models written for transformers 5.24 or later."""
OF_TEXT = frozenset({"attention_mask", "position_ids", "logits_to_keep", "use_cache"})
"""Arguments of a call with text alone, besides its ids and cache."""


class Ran(Enum):
    """How a recorded pass was run: operation by operation, or as a CUDA graph, captured for it or before."""

    EAGER = "eager"
    CAPTURED = "captured"
    REPLAYED = "replayed"


PassKind = Literal["recorded", "model's own", "plain"]
"""What runs the model: its recorded pass, its own forward over drafts, or its own forward token by token."""


def is_absent(value: Any) -> bool:
    """Whether an argument is None or an empty mapping, as it is for texts without pictures."""
    return value is None or (isinstance(value, Mapping) and not value)


@dataclass
class VerifierInputs:
    """What a generation starts from, as `generate` prepared it (one row for now; every tensor keeps its batch axis).

    Attributes
    ----------
    input_ids
        (1, L) long, the prompt as `generate` got it.
    model_kwargs
        Keyword arguments `generate` prepared for the model's forward: `past_key_values`, `attention_mask` (2-D or
        None), `position_ids`, model-specific extras. Owned by the verifier from here on.
    past_length
        Tokens of the row that `past_key_values` already holds.
    holds_past
        Whether `input_ids` begins with those tokens (a caller may pass only the new ones).
    max_length
        Longest the row can become, in tokens; no pass is asked for a position at or beyond it.
    returns_cache
        Whether the caller reads the cache afterwards; else `finish` need not restore it.
    """

    input_ids: torch.Tensor
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    past_length: int = 0
    holds_past: bool = True
    max_length: int = 0
    returns_cache: bool = True

    @cached_property
    def token_ids(self) -> NDArray[np.int32]:
        """(L,) int32, `input_ids` on the host; read only."""
        return self.input_ids[0].cpu().numpy().astype(np.int32)

    @property
    def num_uncached(self) -> int:
        """Tokens of `input_ids` that the cache does not hold."""
        return self.input_ids.shape[1] - (self.past_length if self.holds_past else 0)

    @property
    def uncached_ids(self) -> NDArray[np.int32]:
        """(m,) int32, these tokens, which the first passes read."""
        return self.token_ids[len(self.token_ids) - self.num_uncached :]

    def why_not_text(self, cache_name: str) -> str:
        """Why a generation is more than a text over a `DynamicCache`; empty when it is not."""
        kwargs = self.model_kwargs
        mask, cache = kwargs.get("attention_mask"), kwargs.get(cache_name)
        known = OF_TEXT | {cache_name}
        if extras := [name for name, value in kwargs.items() if name not in known and not is_absent(value)]:
            return f"the model is given {', '.join(extras)}"
        if type(cache) is not DynamicCache:
            return f"the cache is a {type(cache).__name__}"
        return "the prompt is padded" if mask is not None and (mask.ndim != 2 or not bool(mask.all())) else ""


@dataclass(slots=True)
class VerifierOutput:
    """What one pass computed, valid until the next one: it may write over these tensors.

    Attributes
    ----------
    logits
        (keep + n, vocab), any float dtype, on the model's device: rows `0 … keep - 1` follow the last `keep` root
        tokens (row `keep - 1` follows the root itself), row `keep + i` follows node i.
    hidden
        (keep + n, d) or None: hidden states of the same rows.
    ran
        How the pass was run.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    ran: Ran = Ran.EAGER


Batching = Literal["packed", "padded", "none"]
"""How several texts share passes: one after the other, side by side with padding, or not at all."""


class SharedPasses(Protocol):
    """Passes that the texts of several verifiers can share."""

    @property
    def pads(self) -> bool:
        """Whether a pass takes as many rows for each text as for the one that needs most."""

    def forward_all(
        self,
        verifiers: Sequence[Any],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        want_hidden: Layer | None = None,
        keeps: Sequence[int] | None = None,
    ) -> list[VerifierOutput]:
        """Return what `Verifier.forward` of each would return; each commits for itself."""


class Verifier(Protocol):
    """Runs the target model over draft trees and keeps its cache in step with the text.

    One generation calls `start` once, then `forward` and `commit` in turn, then `finish`. Between a `commit` and the
    next `forward` the cache holds every token of the row but the last emitted one.
    """

    @property
    def whole_prompts(self) -> bool:
        """Whether the prompt must come in one piece: a second one would not see what the first left behind."""

    @property
    def mode(self) -> Mode:
        """What `forward` accepts: in "chain" mode only trees with `is_chain`, in "plain" mode only None or empty ones.

        It may weaken when the prompt has been read, and for some passes.
        """

    @property
    def most_rows(self) -> int:
        """Root tokens and draft nodes of one pass at most."""

    @property
    def reason(self) -> str:
        """Why the mode is not "tree"; empty when it is."""

    @property
    def pass_kind(self) -> PassKind:
        """What runs the model in this generation."""

    @property
    def pass_reason(self) -> str:
        """Why nothing faster runs it; empty for the recorded pass."""

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation: take over the cache (make one when there is none)."""

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run the model over tokens that are not in the cache yet and over the draft that follows them.

        Parameters
        ----------
        root_ids
            (m,) int32, m >= 1: the uncached text, its last token is the root. The first pass of a generation feeds
            the prompt this way, possibly in several chunks, each a `forward` + `commit`.
        tree
            Draft below the root; None or empty for none.
        keep
            How many of the last root tokens to return logits for, 1 … m.
        want_hidden
            Return the hidden states of this layer too.
        """

    @property
    def batching(self) -> Batching:
        """How several texts of the model can share passes."""

    def fresh(self) -> Verifier:
        """Return another verifier that knows what this one does of the model, for another text."""

    def share(self, passes: SharedPasses) -> None:
        """Share padded passes with others from now on."""

    def shared_passes(self, is_reading: bool, want_hidden: Layer | None = None) -> SharedPasses | None:
        """Return the passes that the text can share with others now (equal for those that can), or None.

        `is_reading`: the next pass reads a piece of its prompt.
        """

    def reads_rest(self, roots: int) -> bool:
        """Whether the last few tokens of a prompt can be read in one pass with a draft after them."""

    def commit(self, path: NDArray[np.int32]) -> None:
        """Keep the root tokens of the last pass and the nodes of `path` (a,) int32, root side first; drop the rest."""

    def finish(self) -> Any:
        """End the generation and hand back the cache as plain `generate` would have left it (None without one)."""
