"""Drafters of a model: made by preset, opened for one text at a time, closed when it has ended."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import AUTO, OFF, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration, calibration_for
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.drafting.scoped import ScopedDrafter, TextMemory
from retrieve_spec.engine.sessions import Sessions, Siblings
from retrieve_spec.errors import ConfigError, require
from retrieve_spec.sources.answers import RolloutMemory
from retrieve_spec.sources.recycling import MANY_CONTEXTS, Bigrams
from retrieve_spec.sources.session import SessionMemory
from retrieve_spec.sources.unigrams import token_classes

KEPT_DRAFTERS = 8
"""Closed drafters of one preset that are kept for later texts."""
_FEW_CONTEXTS = 1 << 13
"""Contexts of which a drafter that will not be kept remembers the target's top tokens: getting a table for a whole
session from the system takes longer than drafting for a short text."""


class NotDraftedError(Exception):
    """A text goes without a drafter; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftOptions:
    """How one text is drafted for.

    Attributes
    ----------
    draft
        A preset, `"off"`, or None for the configured one.
    scope
        Whose text it is: what the model generated for another scope is not drafted.
    call
        Name of a call of several texts. Texts of one scope or of one call have one requester: what they alone have in
        common is no phrase (`sources/phrases.py`).
    siblings
        What samples of the same prompt share, if there are any.
    stores
        Open stores that this text alone is drafted from, besides the model's.
    session
        Memory in place of the scope's own: another one, or False for none.
    """

    draft: str | None = None
    scope: str = ""
    call: str | None = None
    siblings: Siblings | None = None
    stores: Sequence[Any] = ()
    session: SessionMemory | bool = True


class Drafters:
    """The drafters of one accelerated model; those of one preset share a session and a calibration.

    Parameters
    ----------
    config
        How to draft unless a call says otherwise.
    datastores
        Open stores to draft from.
    given
        What drafts in place of the configured preset.
    model_key
        Name under which what was learned about the model is kept beside a store.
    tokenizer
        The model's, if it is known: `auto` tells words from marks by it.
    vocabulary
        Tokens that the model knows.
    fingerprint
        Computes the fingerprint of the model, by which a store names whose tables it has; it is called once at most.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        datastores: Sequence[Any],
        given: Drafter | None,
        model_key: str,
        tokenizer: Any = None,
        vocabulary: int = 1 << 31,
        fingerprint: Callable[[], str] | None = None,
    ) -> None:
        right, remedy = isinstance(config.rollouts, RolloutMemory | None), "Make one: rs.RolloutMemory(path)."
        require(right, "rollouts to be a RolloutMemory", config.rollouts, remedy)
        self.datastores = list(datastores)
        self.given = given
        self.bigrams: Bigrams | None = None
        self._config, self._model_key, self._tokenizer = config, model_key, tokenizer
        self._fingerprint = None if fingerprint is None else functools.cache(fingerprint)
        self._made: dict[str, list[Drafter]] = {}  # by preset
        self._calibrations: dict[str, Calibration] = {}  # by preset
        self._opened: dict[int, Drafter] = {}
        self._forgotten: Counter[str | None] = Counter()
        self._scoped: weakref.WeakSet[ScopedDrafter] = weakref.WeakSet(_scoped(given))
        self.sessions = Sessions(config, tokenizer, vocabulary)
        self.rollouts: RolloutMemory | None = config.rollouts
        self._rollouts_calibration: Calibration | None = None
        self._lock = threading.RLock()
        self._learned: list[Calibration] = []  # calibrations beside the session's file
        weakref.finalize(self, _keep, self.sessions, self._learned)

    def get(self, draft: str | None = None, stores: Sequence[Any] = ()) -> Drafter | None:
        """Return the drafter that the next text gets: the one given, a preset's, or None when drafting is off.

        With open `stores` of one call it is a new one, that nobody else gets: what they hold ends with it.

        Raises
        ------
        UnknownPresetError
            No preset has the name.
        MissingSourceError
            The preset needs a source that was not given.
        ConfigError
            There are `stores`, and a drafter was given.
        """
        name = self._name(draft)
        if name == OFF:
            return None
        if self.given is not None and name in (AUTO, self._config.draft):
            if stores:
                raise ConfigError("a drafter that reads stores", "the one given to accelerate", "Leave out store=.")
            return self.given
        with self._lock:
            if stores:
                return self._build(name, stores, _FEW_CONTEXTS)
            made = self._made.setdefault(name, [])
            for drafter in made:
                if id(drafter) not in self._opened:
                    return drafter
            made.append(self._build(name, contexts=MANY_CONTEXTS if len(made) < KEPT_DRAFTERS else _FEW_CONTEXTS))
            return made[-1]

    def _name(self, draft: str | None) -> str:
        return self._config.draft if draft is None else draft

    def open(self, options: DraftOptions) -> Drafter:
        """Return a drafter that works for one text until it is closed.

        Raises
        ------
        NotDraftedError
            There is none; the message says why.
        """
        with self._lock:
            drafter = self.get(options.draft, options.stores)
            if drafter is None:
                raise NotDraftedError("drafting is off")
            if id(drafter) in self._opened:
                raise NotDraftedError("the given drafter is at work for another sequence")
            self._opened[id(drafter)] = drafter
            try:
                for scoped in _scoped(drafter):
                    scoped.enter(self._memory(drafter, options))
            except BaseException:
                self.close(drafter)
                raise
            return drafter

    def _memory(self, drafter: Drafter, options: DraftOptions) -> TextMemory:
        """Return what a drafter may remember while it works for a text."""
        session, scope = options.session, options.scope
        if session is True and drafter is not self.given:
            own = self._session(options)
            session = False if own is None else own
        calibration = None
        if options.siblings is not None and self.rollouts is not None:
            calibration = self._shared_calibration()
        return TextMemory(scope, scope or options.call, session, options.siblings, calibration)

    def _session(self, options: DraftOptions) -> SessionMemory | None:
        """The session of a text's scope, counted as its preset counts."""
        return self.sessions.get(options.scope, exact=self._name(options.draft) != AUTO)

    def _shared_calibration(self) -> Calibration:
        """The calibration of samples that answers are kept for."""
        if self._rollouts_calibration is None:
            assert self.rollouts is not None
            self._rollouts_calibration = Calibration(self.rollouts.calibration_path)
        return self._rollouts_calibration

    def close(self, drafter: Drafter, failed: bool = False) -> None:
        """Take a drafter back; one that failed is not used again."""
        with self._lock:
            if self._opened.pop(id(drafter), None) is not None:
                for scoped in _scoped(drafter):
                    scoped.leave()
            for made in self._made.values():
                if failed:
                    made[:] = [one for one in made if one is not drafter]
                closed = [one for one in made if id(one) not in self._opened]
                if len(closed) > KEPT_DRAFTERS:  # the newest, which may have few contexts
                    made[:] = [one for one in made if one is not closed[-1]]

    def use(self, datastores: Sequence[Any]) -> None:
        """Draft from these stores instead, from the next text on; sessions and calibrations are kept."""
        with self._lock:
            self.datastores = list(datastores)
            self._made = {name: [self._build(name)] for name, made in self._made.items() if made}

    def times_forgotten(self, scope: str = "") -> int:
        """How often a scope was forgotten; sequences that began before the last time keep nothing of their text."""
        return self._forgotten[None] + self._forgotten[scope]

    def forget(self, scope: str | None = None) -> None:
        """Drop all drafters that were made here, with what they learned, or what they learned of one scope's text.

        Phrases go in either case, also where they are kept: whose they are is not.
        """
        with self._lock, contextlib.ExitStack() as all_of_it:  # all of them, even if a file cannot be written
            if scope == "":  # it is forgotten with its session
                all_of_it.callback(self.use, self.datastores)
            if scope is None and self.rollouts is not None:
                all_of_it.callback(self.rollouts.forget)
            all_of_it.callback(self.sessions.forget, scope)
            for calibration in self._all_calibrations():
                all_of_it.callback(calibration.forget)
            self._forgotten[scope] += 1
            for drafter in list(self._scoped):
                drafter.forget_scope(scope)
            if scope is None:
                self._made.clear()
                self._calibrations.clear()
                self._learned.clear()
                self._rollouts_calibration = None

    def _all_calibrations(self) -> list[Calibration]:
        """The calibrations of all presets and of the given drafter, and the one that is kept in a file."""
        known = [*self._calibrations.values(), getattr(self.given, "calibration", None), self._kept_calibration()]
        return list({id(one): one for one in known if isinstance(one, Calibration)}.values())

    def keep(self, at_once: bool = False) -> None:
        """Write files of answers if that is due; with `at_once` the session's file and its calibration in any case."""
        if self.rollouts is not None:
            self.rollouts.keep()
        _keep(self.sessions, self._learned if at_once else (), at_once)

    @functools.cached_property
    def _token_classes(self) -> NDArray[np.uint8]:
        """Class of every token of the tokenizer."""
        return token_classes(self._tokenizer)

    def _calibration(self, name: str) -> Calibration:
        """The calibration that the drafters of a preset share."""
        if name not in self._calibrations:
            calibration = self._calibrations[name] = self._kept_calibration()
            if name == AUTO:
                calibration.classes = self._token_classes
            if self.sessions.file is not None:
                self._learned.append(calibration)
        return self._calibrations[name]

    def _kept_calibration(self) -> Calibration:
        """What is known of the model, kept beside the first writable store or else beside the session's file."""
        calibration = calibration_for(self.datastores, self._model_key)
        if calibration.path is None and self.sessions.file is not None:
            return Calibration(self.sessions.calibration_path(self._model_key))
        return calibration

    def siblings(
        self, options: DraftOptions, prompt: NDArray[np.int32] | None, vocabulary: int, several: bool = True
    ) -> Siblings:
        """A memory for samples of one `prompt`, around the session that their drafters have.

        Where there are not `several` samples it keeps nothing of what is written: that is in the sample's own text.
        """
        with self._lock:
            drafter = self.get(options.draft, options.stores)
            own = drafter is not None and drafter is self.given
            session = getattr(drafter, "own_session", None) if own else self._session(options)
            tokens = self._config.session_tokens if several else 0
            return Siblings(session, tokens, prompt, self.rollouts, vocabulary)

    def _build(self, name: str, stores: Sequence[Any] = (), contexts: int = MANY_CONTEXTS) -> Drafter:
        """Make a drafter of a preset, which shares the preset's calibration."""
        drafter = build_drafter(
            self._config.with_options(draft=name),
            datastores=[*self.datastores, *stores],
            session=self.sessions.get(exact=name != AUTO),
            calibration=self._calibration(name),
            bigrams=self.bigrams,
            contexts=contexts,
            fingerprint=self._fingerprint,
        )
        self._scoped.add(drafter)
        return drafter


def _scoped(drafter: Drafter | None) -> list[ScopedDrafter]:
    """The drafter, if it remembers earlier texts."""
    return [drafter] if isinstance(drafter, ScopedDrafter) else []


def _keep(sessions: Sessions, learned: Sequence[Calibration], at_once: bool = True) -> None:
    """Write what is new since the last time, also when the process ends."""
    if sessions.file is None:
        return
    sessions.file.keep(at_once)
    for calibration in learned:
        calibration.keep(at_once=True)
