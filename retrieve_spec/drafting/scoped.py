"""Scoped drafter: works for texts of several scopes in turn, and keeps apart what it learned from each."""

from __future__ import annotations

from dataclasses import dataclass

from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.sources.session import SessionMemory


@dataclass(frozen=True, slots=True)
class TextMemory:
    """What a drafter may remember while it works for one text.

    Attributes
    ----------
    scope
        Whose text it is.
    requester_id
        Who asks for it; None: every request has a requester of its own.
    session
        Memory of earlier texts; True for the drafter's own, False for none.
    siblings
        What samples of the same prompt share, if there are any; it holds what the session holds.
    calibration
        What is learned with siblings, in place of the drafter's own.
    """

    scope: str = ""
    requester_id: str | None = None
    session: SessionMemory | bool = True
    siblings: SessionMemory | None = None
    calibration: Calibration | None = None


class ScopedDrafter:
    """Base of drafters that remember earlier texts.

    Parameters
    ----------
    session
        Memory of earlier texts to draft from and to add to, or None.

    Attributes
    ----------
    requester_id
        Who asks, until the request ends: phrases that one requester alone was given are not drafted.
    """

    def __init__(self, session: SessionMemory | None) -> None:
        self.session = session
        self.requester_id: str | None = None
        self._own: tuple[SessionMemory | None] | None = None  # while it works for a text
        self._scope = ""

    def prepare(self) -> None:
        """Do one-time work before the first request, such as compiling kernels; published rules have none."""

    @property
    def own_session(self) -> SessionMemory | None:
        """Its session while it works for no text."""
        return self.session if self._own is None else self._own[0]

    def enter(self, memory: TextMemory) -> None:
        """Work for a text until `leave`, with the memory of its scope only."""
        self._own = (self.session,)
        if memory.scope != self._scope:
            self.forget_logits()
        self._scope = memory.scope
        self.requester_id = memory.requester_id or self.requester_id
        if memory.session is not True:
            self.session = None if memory.session is False else memory.session
        if memory.siblings is not None:
            self._share(memory.siblings, memory.calibration)

    def _share(self, siblings: SessionMemory, calibration: Calibration | None) -> None:
        """Draft from siblings' texts; rules that cannot are unchanged."""

    def leave(self) -> None:
        """Stop working for a text."""
        if self._own is not None:
            (self.session,), self._own = self._own, None
        self.requester_id = None

    def forget_scope(self, scope: str | None) -> None:
        """Forget the last text of a scope, or of any scope; a text that is being generated will not be kept."""
        if scope in (None, self._scope):
            self.forget_logits()

    def forget_logits(self) -> None:
        """Forget the target's top tokens in earlier texts; rules without them have nothing to forget."""
