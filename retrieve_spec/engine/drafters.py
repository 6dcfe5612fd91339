"""Drafters of a model, by preset name, lent to one sequence at a time; sessions by scope, and what siblings share."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.drafting.calibration import Calibration, calibration_for
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.errors import ConfigError, require
from retrieve_spec.sources.answers import AnswerMemory, RolloutMemory, answers_by_scope
from retrieve_spec.sources.automaton import BOUNDARY, SuffixAutomaton
from retrieve_spec.sources.recycling import Bigrams, RecyclingTable
from retrieve_spec.sources.session import SessionMemory
from retrieve_spec.sources.unigrams import token_classes

OPEN = 16
"""Scopes whose sessions are in memory at most, the last ones used."""


class Sessions:
    """Opens sessions by scope, in this process alone or with the answers of a file.

    Parameters
    ----------
    config
        Its `session` and `session_tokens`.
    tokenizer
        The model's, if it is known.
    vocabulary
        Tokens that the model knows.

    Attributes
    ----------
    file
        Where answers are kept for other processes, or None.

    Raises
    ------
    ConfigError
        The session has a file, and there is no tokenizer.
    StoreCorruptError, StoreVersionError, TokenizerMismatchError
        As `AnswerMemory` says.
    """

    def __init__(self, config: SpeculationConfig, tokenizer: Any, vocabulary: int) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._recent: OrderedDict[tuple[str, bool], SessionMemory] = OrderedDict()
        self._opened: weakref.WeakKeyDictionary[SessionMemory, str] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self.file: AnswerMemory | None = None
        if not isinstance(config.session, bool):
            if tokenizer is None:
                raise ConfigError("a tokenizer to keep a session with", "none", "Give one to accelerate.")
            self.file = answers_by_scope(config.session, tokenizer_fingerprint(tokenizer), config.session_tokens)

    def of(self, scope: str = "", exact: bool = False) -> SessionMemory | None:
        """The session of a scope, opened if need be; None where there are none. `exact`: as published rules count."""
        if not self._config.session:
            return None
        with self._lock:
            session = self._recent.get((scope, exact))
            if session is None:
                session = self._recent[scope, exact] = self._open(scope, exact)
            self._recent.move_to_end((scope, exact))
            while len(self._recent) > OPEN:
                self._recent.popitem(last=False)
            return session

    def forget(self, scope: str | None = None) -> None:
        """Forget a scope, or all, and what the file holds of it; what is under way is not remembered."""
        with self._lock:
            for session, opened in list(self._opened.items()):
                if scope in (None, opened):
                    session.keep_nowhere()
            for name in [name for name in self._recent if scope in (None, name[0])]:
                del self._recent[name]
            if self.file is not None:
                self.file.forget(b"" if scope is None else self.file.key(scope))

    def _open(self, scope: str, exact: bool) -> SessionMemory:
        session = SessionMemory(self._config.session_tokens, exact)
        if self.file is not None:
            session.keep_in(self.file, self.file.key(scope), self._vocabulary)
        self._opened[session] = scope
        return session

    def beside(self, model_key: str) -> Path | None:
        """Where what is learned about a model is kept, beside its answers."""
        path = None if self.file is None else self.file.path
        return None if path is None else path.with_name(f"{path.name}.{model_key}.npy")


OVERLAP = 8
"""Tokens before a new run that are read with it, so that it is found by what stands in front of it."""
EAGER, PATIENT = 1, 32
"""New tokens of a sample that are worth reading: every one of them at first, runs when much has been read."""
MUCH = 100_000


class Siblings(SessionMemory):
    """A memory of texts under way, which samples of one prompt share; no other prompt's samples see it.

    To a drafter it is a session: what the model's own session remembers is in it, and is added to at the end only. It
    hears of tokens when their drafter has learned from them: a memory that holds the answer already is always right.

    Parameters
    ----------
    session
        The model's session, or None.
    max_tokens
        Tokens read at most, those read twice counted twice.
    prompt
        (n,) int32 their prompt, where its answers are kept.
    rollouts
        Where they are, or None.
    vocabulary
        Tokens that the model knows: earlier answers with others are not drafted from.
    """

    def __init__(
        self,
        session: SessionMemory | None = None,
        max_tokens: int = 1_000_000,
        prompt: NDArray[np.int32] | None = None,
        rollouts: RolloutMemory | None = None,
        vocabulary: int = 1 << 31,
    ) -> None:
        super().__init__(max_tokens)
        self._prompt, self._rollouts = prompt, rollouts
        self._session = session
        self._heard: dict[object, tuple[list[int], int]] = {}
        self._news: dict[object, None] = {}  # texts of which something is not read yet
        self.automata = [] if session is None else list(session.automata)
        if prompt is not None and rollouts is not None:
            self.automata += rollouts.automata(prompt, vocabulary)
        self.automata.append(SuffixAutomaton(1024))

    def __enter__(self) -> Self:
        if self._session is not None:
            self._session.__enter__()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            if self._session is not None:
                self._session.__exit__(kind, error, trace)

    def _take_in(self) -> None:
        while self._news:
            self._read(self._news.popitem()[0])

    def remember(self, token_ids: NDArray[np.int32]) -> None:
        """Add the whole text of one sample, (n,) int32, to the session, if there is one."""
        if self._session is not None:
            self._session.remember(token_ids)

    def answer(self, token_ids: NDArray[np.int64]) -> None:
        """Keep a whole answer (m,) to the prompt for later calls, where they are kept."""
        if self._prompt is not None and self._rollouts is not None:
            self._rollouts.remember(self._prompt, token_ids.astype(np.int32))

    def hear(self, text: object, token_ids: NDArray[np.int32]) -> None:
        """Take down how a sample's text has gone on, (n,) int32; it is read when somebody looks."""
        self._heard.setdefault(text, ([], 0))[0].extend(token_ids.tolist())
        self._news[text] = None

    def _read(self, sample: object) -> None:
        """Read what a sample has written since the last time."""
        own = self.automata[-1]
        text, known = self._heard[sample]
        if len(text) - known < (EAGER if len(own) < MUCH else PATIENT):
            return
        run = np.array([*text[max(known - OVERLAP, 0) :], BOUNDARY], np.int32)
        if len(own) + len(run) <= self.max_tokens:
            own.extend(run)
        text = text[-OVERLAP:]
        self._heard[sample] = text, len(text)


OFF = "off"
KEPT = 8
"""Drafters of one preset that are kept for later sequences while they are at work for none."""
_FEW_CONTEXTS = 1 << 13
"""Contexts of which a drafter that will not be kept remembers the target's top tokens: getting a table for a whole
session from the system takes longer than drafting for a short text."""


@dataclass(slots=True)
class Loan:
    """A drafter that is lent: to whose text, and the session and calibration that it has when it is not."""

    drafter: Drafter
    scope: str
    session: Any
    calibration: Any


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
    """

    def __init__(
        self,
        config: SpeculationConfig,
        datastores: Sequence[Any],
        given: Drafter | None,
        model_key: str,
        tokenizer: Any = None,
        vocabulary: int = 1 << 31,
    ) -> None:
        right, remedy = isinstance(config.rollouts, RolloutMemory | None), "Make one: rs.RolloutMemory(path)."
        require(right, "rollouts to be a RolloutMemory", config.rollouts, remedy)
        self.datastores = list(datastores)
        self.given = given
        self.bigrams: Bigrams | None = None
        self._config, self._model_key, self._tokenizer = config, model_key, tokenizer
        self._made: dict[str, list[Drafter]] = {}
        self._loans: dict[int, Loan] = {}
        self._forgotten: Counter[str | None] = Counter()
        self._scopes: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self.sessions = Sessions(config, tokenizer, vocabulary)
        self.rollouts: RolloutMemory | None = config.rollouts
        self._rollouts_calibration: Calibration | None = None
        self._lock = threading.RLock()
        self._learned: list[Calibration] = []  # of the session's file
        weakref.finalize(self, _keep, self.sessions, self._learned)

    def of(self, draft: str | None = None, stores: Sequence[Any] = ()) -> Drafter | None:
        """Drafter that the next sequence gets: the one given, a preset's, or None when drafting is off.

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
        name = self._config.draft if draft is None else draft
        if name == OFF:
            return None
        if self.given is not None and name in (AUTO, self._config.draft):
            if stores:
                raise ConfigError("a drafter that reads stores", "the one given to accelerate", "Leave out store=.")
            return self.given
        with self._lock:
            if stores:
                return self._for_call(name, stores)
            made = self._made.setdefault(name, [])
            for drafter in made:
                if id(drafter) not in self._loans:
                    return drafter
            made.append(self._like(name, made[0]) if made else self._first(name))
            if len(made) > KEPT:
                _shrink(made[-1])
            return made[-1]

    def _for_call(self, name: str, stores: Sequence[Any]) -> Drafter:
        """A drafter that reads stores of its own besides; it learns where the others learn."""
        session, calibration = self.sessions.of(exact=name != AUTO), None
        if name == AUTO:
            session, calibration = self._own_of(self.of(AUTO))
        drafter = self._build(name, session, calibration, stores)
        _shrink(drafter)
        return drafter

    def lend(
        self,
        draft: str | None = None,
        call: str | None = None,
        siblings: Siblings | None = None,
        scope: str = "",
        stores: Sequence[Any] = (),
    ) -> Drafter | str:
        """The same, kept from others until it is given back; or why the sequence goes without.

        It drafts from what was said to its ``scope``, and from what ``siblings`` write, if it can. Sequences of one
        scope or one ``call`` are one requester: what they alone have in common is no phrase (`sources/phrases.py`).
        """
        with self._lock:
            drafter = self.of(draft, stores)
            if drafter is None:
                return "drafting is off"
            if id(drafter) in self._loans:
                return "the given drafter is at work for another sequence"
            if isinstance(drafter, MixtureDrafter):
                drafter.requester_id = scope or call or (drafter.requester_id if drafter is self.given else None)
            self._loans[id(drafter)] = Loan(drafter, scope, *self._own_of(drafter))
            try:
                self._enter(drafter, scope)
                if siblings is not None and isinstance(drafter, MixtureDrafter):
                    self._share(drafter, siblings)
            except BaseException:
                self.give_back(drafter)
                raise
            return drafter

    def _enter(self, drafter: Drafter, scope: str) -> None:
        """Let a drafter see the text of one scope only: its session, and no logits of another's text."""
        if isinstance(drafter, MixtureDrafter):
            if self._scopes.get(drafter, "") != scope:
                drafter.forget_logits()
            self._scopes[drafter] = scope
        if scope and drafter is not self.given and hasattr(drafter, "session"):
            drafter.session = self._session(drafter, scope)

    def _session(self, drafter: Drafter, scope: str) -> SessionMemory | None:
        return self.sessions.of(scope, exact=not isinstance(drafter, MixtureDrafter))

    def _share(self, drafter: MixtureDrafter, siblings: Siblings) -> None:
        """Let a drafter draft from what siblings write until it is given back."""
        calibration = drafter.calibration
        if self.rollouts is not None:
            if self._rollouts_calibration is None:  # it begins with what the drafter's own has learned
                self._rollouts_calibration = Calibration(self.rollouts.calibration_path)
                self._rollouts_calibration.begin_with(calibration)
            calibration = self._rollouts_calibration
        if drafter.session is None:
            drafter.forget_logits()  # as it does itself without a session
        drafter.session, drafter.calibration = siblings, calibration

    def give_back(self, drafter: Drafter, spoiled: bool = False) -> None:
        """Take a drafter back; one that was interrupted amid its work is not used again."""
        with self._lock:
            loan = self._loans.pop(id(drafter), None)
            if loan is not None and hasattr(drafter, "session"):
                drafter.session = loan.session
            if loan is not None and isinstance(drafter, MixtureDrafter):
                lent, drafter.calibration = drafter.calibration, loan.calibration
                if lent is not loan.calibration:  # which has counted no request, but has the phrases
                    loan.calibration.keep()
            for made in self._made.values():
                if spoiled:
                    made[:] = [one for one in made if one is not drafter]
                free = [one for one in made if id(one) not in self._loans]
                if len(free) > KEPT:  # the last that was made, which may have few contexts
                    made[:] = [one for one in made if one is not free[-1]]

    def use(self, datastores: Sequence[Any]) -> None:
        """Draft from these stores instead, from the next sequence on; sessions and calibrations are kept."""
        with self._lock:
            self.datastores = list(datastores)
            self._made = {name: [self._like(name, made[0])] for name, made in self._made.items() if made}

    def times_forgotten(self, scope: str = "") -> int:
        """How often a scope was to be forgotten: what began before the last time keeps nothing of its text."""
        return self._forgotten[None] + self._forgotten[scope]

    def forget(self, scope: str | None = None) -> None:
        """Drop all drafters that were made here, with what they learned, or what they learned of one scope's text.

        Phrases go in either case, also where they are kept: whose they are is not.
        """
        with self._lock, contextlib.ExitStack() as all_of_it:  # each of them, also where a file cannot be written
            if scope == "":
                all_of_it.callback(self._renew)  # when its session is forgotten
            if scope is None and self.rollouts is not None:
                all_of_it.callback(self.rollouts.forget)
            all_of_it.callback(self.sessions.forget, scope)
            for calibration in self._calibrations():
                all_of_it.callback(calibration.forget)
            self._forget_loans(scope)
            for drafter, last in list(self._scopes.items()):
                if last == scope:
                    drafter.forget_logits()
            if scope is None:
                self._made.clear()
                self._learned.clear()
                self._rollouts_calibration = None

    def _renew(self) -> None:
        """Draft from the session as it is opened next; drafters that are at work end with the one that was."""
        for name, made in self._made.items():
            session, calibration = self.sessions.of(exact=name != AUTO), self._own_of(made[0])[1]
            made[:] = [self._build(name, session, calibration)]

    def _forget_loans(self, scope: str | None) -> None:
        """Let nothing more be kept of texts of a scope, or of all, that are under way."""
        self._forgotten[scope] += 1
        for loan in self._loans.values():
            if scope in (None, loan.scope) and isinstance(loan.drafter, MixtureDrafter):
                loan.drafter.forget_request()

    def _calibrations(self) -> list[Calibration]:
        """Those that drafters have themselves, and the one that is kept in a file."""
        drafters = [*(drafter for made in self._made.values() for drafter in made), self.given]
        known = [self._own_of(drafter)[1] for drafter in drafters if drafter is not None]
        different = {id(one): one for one in [*known, self._kept_calibration()]}
        return [one for one in different.values() if isinstance(one, Calibration)]

    def keep(self, at_once: bool = False) -> None:
        """Write files of answers if that is due; with `at_once` the session's file and its calibration in any case."""
        if self.rollouts is not None:
            self.rollouts.keep()
        _keep(self.sessions, self._learned if at_once else (), at_once)

    def _first(self, name: str) -> Drafter:
        calibration = self._kept_calibration()
        if self.sessions.file is not None:
            self._learned.append(calibration)
        calibration.classes = token_classes(self._tokenizer if name == AUTO else None)
        return self._build(name, self.sessions.of(exact=name != AUTO), calibration)

    def _kept_calibration(self) -> Calibration:
        """What is known of the model, kept beside the first writable store or else beside the session's file."""
        calibration = calibration_for(self.datastores, self._model_key)
        if calibration.path is None and self.sessions.file is not None:
            return Calibration(self.sessions.beside(self._model_key))
        return calibration

    def _like(self, name: str, old: Drafter) -> Drafter:
        return self._build(name, *self._own_of(old))

    def _own_of(self, drafter: Drafter | None) -> tuple[Any, Any]:
        """Session and calibration that a drafter has when it is not lent."""
        loan = self._loans.get(id(drafter))
        if loan is not None:
            return loan.session, loan.calibration
        return getattr(drafter, "session", None), getattr(drafter, "calibration", None)

    def siblings(
        self,
        draft: str | None,
        prompt: NDArray[np.int32] | None,
        vocabulary: int,
        scope: str = "",
        several: bool = True,
        stores: Sequence[Any] = (),
    ) -> Siblings:
        """A memory for samples of one `prompt`, around the session that their drafters have.

        Where there are not `several` samples it keeps nothing of what is written: that is in the sample's own text.
        """
        with self._lock:
            drafter = self.of(draft, stores)
            session = None if drafter is None else self._own_of(drafter)[0]
            if scope and drafter is not None and drafter is not self.given:
                session = self._session(drafter, scope)
            session = session if isinstance(session, SessionMemory) else None
            tokens = self._config.session_tokens if several else 0
            return Siblings(session, tokens, prompt, self.rollouts, vocabulary)

    def _build(self, name: str, session: Any, calibration: Any, stores: Sequence[Any] = ()) -> Drafter:
        config = self._config.with_options(draft=name)
        read = [*self.datastores, *stores]
        return build_drafter(config, datastores=read, session=session, calibration=calibration, bigrams=self.bigrams)


def _shrink(drafter: Drafter) -> None:
    """Let a drafter that will not be kept remember few contexts."""
    if isinstance(drafter, MixtureDrafter) and drafter.sources.recycling is not None:
        drafter.sources.recycling = RecyclingTable(_FEW_CONTEXTS)


def _keep(sessions: Sessions, learned: Sequence[Calibration], at_once: bool = True) -> None:
    """Write what is new since the last time, also when the process ends."""
    if sessions.file is None:
        return
    sessions.file.keep(at_once)
    for calibration in learned:
        calibration.keep(at_once=True)
