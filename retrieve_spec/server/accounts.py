"""Accounts: the texts, encodings and suggestions the server keeps of each user; nothing of one is seen by another."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from retrieve_spec.server.fim import FimAssembler
from retrieve_spec.server.memory import Memory
from retrieve_spec.server.text import TextCodec

if TYPE_CHECKING:
    from retrieve_spec.server.service import Prepared

_ACCOUNTS = 64
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


class Accounts:
    """The users of one server, the latest kept.

    Parameters
    ----------
    open_account
        Makes an empty account.
    """

    def __init__(self, open_account: Callable[[str], Account]) -> None:
        self._open = open_account
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, scope: str) -> Account:
        """A user's account."""
        with self._lock:
            account = self._accounts.get(scope)
            if account is None:
                account = self._accounts[scope] = self._open(scope)
            self._accounts.move_to_end(scope)
            while len(self._accounts) > _ACCOUNTS:
                self._accounts.popitem(last=False)
            return account
