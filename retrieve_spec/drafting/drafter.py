"""Protocol between drafting and decoding: what a drafter returns, and what it learns after each pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree

if TYPE_CHECKING:
    from retrieve_spec.sources.recycling import Bigrams

Layer = int | Literal["last"]
"""Where hidden states are taken: `"last"` (what the output embeddings read, after the final norm) or N >= 1, after the
N-th block."""


class NoiseKey(NamedTuple):
    """Key of the noise that a token is sampled with (`retrieve_spec.kernels.sampling`); `position` is the token's."""

    seed: int
    row: int
    position: int


@dataclass(slots=True)
class Budget:
    """How much one pass may verify.

    Attributes
    ----------
    max_nodes
        Nodes at most; 0 asks for an empty tree.
    max_depth
        Longest path at most (tokens that may still be generated, minus the bonus token).
    cost
        (max_nodes + 1,) float32 or None: seconds a pass over n drafted nodes takes, n = 0 … max_nodes, drafting
        included. With it the drafter stops where expected tokens per second is highest; without it, it fills up.
    noise
        Key of the next token's noise: a drafter may look at the noise that the sample will be drawn with, which changes
        what it proposes and never what is emitted. None when decoding greedily or when it is not known.
    ahead
        A chain of at most `max_nodes` that comes next whatever the target thinks, as nothing else may. A drafter may
        begin its tree with it, and draft `max_depth` tokens after it; the tree of one that does not is dropped.
    """

    max_nodes: int
    max_depth: int
    cost: NDArray[np.float32] | None = None
    noise: NoiseKey | None = None
    ahead: DraftTree = NO_DRAFT


@dataclass(slots=True)
class VerifiedPass:
    """Result of one pass of the target model; a drafter may read its arrays until the next draft, or the end.

    Attributes
    ----------
    tree
        The draft that was verified (possibly empty).
    path
        (a,) int32, accepted node indices from the root down.
    emitted
        (a + 1,) int32, accepted tokens and the bonus token; shorter when a stop cut the run.
    top_ids
        (n + 1, k) int32 or None: the target's most probable next tokens, row 0 after the root, row i + 1 after
        node i; most probable first.
    top_logits
        (n + 1, k) float32 or None: their raw logits.
    hidden
        (n + 1, d) float32 or None: hidden states of the wanted layer, rows as in `top_ids`.
    """

    tree: DraftTree
    path: NDArray[np.int32]
    emitted: NDArray[np.int32]
    top_ids: NDArray[np.int32] | None = None
    top_logits: NDArray[np.float32] | None = None
    hidden: NDArray[np.float32] | None = None

    @property
    def last_hidden(self) -> NDArray[np.float32] | None:
        """(d,) hidden state at the last accepted token, from which the bonus token was predicted."""
        if self.hidden is None:
            return None
        last: NDArray[np.float32] = self.hidden[int(self.path[-1]) + 1 if len(self.path) else 0]
        return last


@runtime_checkable
class Preparable(Protocol):
    """A drafter with work to do once before its first request, such as compiling kernels."""

    def prepare(self) -> None:
        """Do it."""


@runtime_checkable
class UsesBigrams(Protocol):
    """A drafter that can use the target's top tokens after each single token."""

    def use_bigrams(self, bigrams: Bigrams) -> None:
        """Draft from them, from the next request on."""


@runtime_checkable
class RemembersText(Protocol):
    """A drafter that can learn from a text it has not drafted for."""

    def remember(self, generated: NDArray[np.int32]) -> None:
        """Learn from a generated text (n,), as at the end of a request."""


@runtime_checkable
class Drafter(Protocol):
    """Turns the text so far into a draft tree, and learns from the target's choices."""

    top_k: int
    """The number of the target's top tokens per visited node that `observe` needs (0: none are computed)."""
    wants_hidden: Layer | None
    """The layer whose hidden state `observe` needs; None for none."""

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: forget the last one, read the prompt (L,) and the expected text, if any."""

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """Observe the target's top tokens after each of the last m prompt tokens: (m,), (m, k), (m, k)."""

    def propose(self, budget: Budget) -> DraftTree:
        """Draft the continuation of the text so far, within the budget."""

    def observe(self, verified: VerifiedPass) -> None:
        """Append the emitted tokens to the text so far and learn from the pass."""

    def finish(self) -> None:
        """End the request: keep what may be kept (session, calibration), drop the rest."""
