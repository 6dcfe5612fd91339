"""Accounts: the texts, encodings and suggestions the server keeps of a user; nothing of one is seen by another."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from retrieve_spec.server.fim import FimAssembler
from retrieve_spec.server.memory import Memory
from retrieve_spec.server.text import TextCodec

if TYPE_CHECKING:
    from retrieve_spec.server.service import Prepared

_SUGGESTIONS = 256


@dataclass(slots=True)
class Account:
    """One user, known by an API key or by none.

    Attributes
    ----------
    scope
        The user's name inside the server.
    codec
        The model's text codec, with a cache of the user's own texts.
    assembler
        Builds fill-in-the-middle prompts, None for a model that cannot infill.
    memory
        What the user's editors have shown.
    suggestions
        Answers that a client may still report as taken: what was asked for, and the text.
    """

    scope: str
    codec: TextCodec
    assembler: FimAssembler | None
    memory: Memory
    suggestions: OrderedDict[str, tuple[Prepared, str]] = field(default_factory=OrderedDict)

    def suggest(self, name: str, prepared: Prepared, text: str) -> None:
        """Remember an answer under the name by which a client will report it."""
        self.suggestions[name] = prepared, text
        while len(self.suggestions) > _SUGGESTIONS:
            self.suggestions.popitem(last=False)

    def contents(self) -> dict[str, int]:
        """What there is to forget: how much of each kind."""
        return {**self.memory.contents(), "suggestions": len(self.suggestions), "encodings": self.codec.cached}

    def forget(self) -> None:
        """Drop everything."""
        self.memory.forget()
        self.codec.forget()
        self.suggestions.clear()
