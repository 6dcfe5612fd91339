"""Accounts: the texts, encodings and suggestions the server keeps of a user; nothing of one is seen by another."""

from __future__ import annotations

from dataclasses import dataclass

from retrieve_spec.server.fim import FimAssembler
from retrieve_spec.server.memory import Memory
from retrieve_spec.server.text import TextCodec


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
    """

    scope: str
    codec: TextCodec
    assembler: FimAssembler | None
    memory: Memory

    def contents(self) -> dict[str, int]:
        """What there is to forget: how much of each kind."""
        return {**self.memory.contents(), "encodings": self.codec.cached}

    def forget(self) -> None:
        """Drop everything."""
        self.memory.forget()
        self.codec.forget()
