"""The door between the server and a model: caches that grow and shrink, and texts that share the model's passes.

`Backend` is all the queue knows of a model (`retrieve_spec.server.hf_backend` fills it), `Text` of a text under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retrieve_spec.server.samplers import Sampling


@dataclass(frozen=True, slots=True)
class DraftHints:
    """What to draft a completion from, besides the prompt and the stores.

    Attributes
    ----------
    enabled
        False decodes plainly.
    prediction
        Tokens expected to come next.
    context
        What the drafter reads instead of the prompt: texts to draft from, the most relevant last, then the text in
        front of the completion. Empty: the prompt.
    session
        A `retrieve_spec.sources.session.SessionMemory` to draft from and to add the completion to, None for none.
    scope
        Whose text this is: what the model said to somebody else is not drafted from.
    """

    enabled: bool = True
    prediction: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    session: Any = None
    scope: str = ""


@dataclass(slots=True)
class PassFigures:
    """What decoding cost: forward passes, draft nodes, accepted draft tokens by source."""

    passes: int = 0
    drafted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens of all sources."""
        return sum(self.accepted_by_source.values())


class Text(Protocol):
    """One text under way; it takes part in the passes that `Backend.step` is called for."""

    def bound(self, *, piece: int, nodes: int) -> None:
        """Read so many tokens of the prompt, and draft so many nodes, in the next pass at most."""

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read."""

    @property
    def over(self) -> bool:
        """Whether no pass takes it along any more."""

    def take(self) -> list[int]:
        """Tokens that were accepted since the last call; raises what the text failed with."""

    def copy_cache(self) -> Any:
        """A copy of its cache as it is between two passes, or None."""

    @property
    def figures(self) -> PassFigures:
        """What it has cost so far."""

    def close(self) -> None:
        """End the text, however far it is, and hand its cache back with what was read and said."""


class Backend(Protocol):
    """What the queue asks of a model; all calls come from one thread."""

    n_ctx: int
    """Positions of the model."""
    token_bytes: int
    """Memory that keys and values of a token take."""
    heals: bool
    """Whether a text begins with what `Sampling.begun` says."""

    def new_cache(self) -> Any:
        """An empty key-value cache."""

    def cache_length(self, cache: Any) -> int:
        """Tokens whose keys and values a cache holds."""

    def crop(self, cache: Any, keep: int) -> bool:
        """Keep the first tokens of a cache; False if this kind of cache cannot be cut."""

    def clone(self, cache: Any) -> Any:
        """A copy of a cache."""

    def cache_bytes(self, cache: Any) -> int:
        """Bytes that a cache takes."""

    def side_by_side(self) -> int:
        """Texts that are done sooner on average beside one another than one behind the other."""

    def decode(
        self, cache: Any, prompt_ids: Sequence[int], *, max_tokens: int, end_ids: frozenset[int], sampling: Sampling,
        hints: DraftHints,
    ) -> Text:  # fmt: skip
        """A text that goes on behind a prompt, of which the cache holds a proper beginning; no pass is run yet."""

    def step(self, texts: Sequence[Text]) -> None:
        """One pass over texts that are not over."""

    def forget(self, scope: str) -> None:
        """Drop what was learned from the text of a scope, caches and sessions aside (their owners drop those)."""
