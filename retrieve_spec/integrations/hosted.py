"""Hosted drafter: a serving drafter inside an engine, which answers its requests even if drafting fails."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import ConfigError, PromptError, in_a_line
from retrieve_spec.integrations.serving import ServingDrafter, Shape

logger = logging.getLogger(__name__)
DRAFT, KEEP, PREDICTION = "retrieve_spec_draft", "retrieve_spec_keep", "retrieve_spec_prediction"
"""Options of a request."""
_NO = frozenset({"", "0", "false", "no", "off"})
"""Strings that mean "no" for an option."""
_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an engine's user.

    Attributes
    ----------
    datastores
        Folders or addresses of stores to draft from, or open ones; they must belong to the model's tokenizer.
    session
        Draft from the answers of earlier requests, whoever asked.
    session_tokens
        Bound of the session's memory, in tokens.
    phrases
        `"auto"` drafts what follows one or two tokens in the answers of several requests; `"off"` does not.
    state
        Folder in which what was learned is kept between runs; None keeps it in memory.
    min_path_probability
        A token whose path is less probable is not drafted.
    any_version
        Also run with a version of the engine that was never tested.
    """

    datastores: Sequence[Datastore | str | os.PathLike[str]] | str | os.PathLike[str] = ()
    session: bool = False
    session_tokens: int = SpeculationConfig().session_tokens
    phrases: str = AUTO
    state: str | os.PathLike[str] | None = None
    min_path_probability: float = 0.05
    any_version: bool = False

    @classmethod
    def of(cls, given: Any, place: str, **defaults: Any) -> Options:
        """Return the options that a user wrote.

        Parameters
        ----------
        given
            A dictionary of options.
        place
            Where that was written, for the message.
        **defaults
            Values of an engine that differ from those of the class.

        Raises
        ------
        ConfigError
            It is no dictionary of known options.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            got = repr(sorted(given)) if isinstance(given, Mapping) else repr(given)
            raise ConfigError(f"options of {place}", got, f"Use {', '.join(known)}.")
        return cls(**{**defaults, **given})

    def check_version(self, engine: str, packages: tuple[str, ...], tested: tuple[str, ...], remedy: str) -> None:
        """Refuse an untested version of an engine, unless `any_version` is set.

        Parameters
        ----------
        engine
            Its name.
        packages
            Distributions that it may come in.
        tested
            Versions that the tests run with; their patch releases count as they do.
        remedy
            What the user can do.

        Raises
        ------
        ConfigError
            It is another version, or none is installed.
        """
        found = "none"
        for package in packages:
            with suppress(PackageNotFoundError):
                found = version(package)
        if not self.any_version and not any(found == known or found.startswith(f"{known}.") for known in tested):
            raise ConfigError(f"{engine} {' or '.join(tested)}", found, remedy)


class Hosted:
    """What integrations share: count failures, begin and end requests, keep what was learned.

    The kernels that drafts need are compiled, and what was learned is written at exit; engines that are killed have
    written it every half minute.

    Parameters
    ----------
    options
        Of the user.
    shape
        Of the drafts.
    tokenizer
        Makes the model's tokenizer; called where stores are to be checked against it, or a text is to be encoded.
    vocabulary
        Tokens of the model, if that is known.
    replica
        Number of this copy of the model where there are several: each keeps its own state.
    recycling
        As of `ServingDrafter`.

    Attributes
    ----------
    drafter
        What drafts.
    failures
        Steps in which drafting failed, and was left out.

    Raises
    ------
    ConfigError
        An option has a value outside its range, or the state folder cannot be made.
    StoreError, TokenizerMismatchError
        A store cannot be opened, or belongs to another tokenizer.
    """

    def __init__(
        self,
        options: Options,
        shape: Shape,
        tokenizer: Callable[[], Any] = lambda: None,
        vocabulary: int | None = None,
        replica: int | None = None,
        recycling: bool = False,
    ) -> None:
        config = SpeculationConfig(
            session=options.session,
            session_tokens=options.session_tokens,
            phrases=options.phrases,  # type: ignore[arg-type]
            min_path_probability=options.min_path_probability,
        )
        state = None if options.state is None else Path(options.state)
        if state is not None and replica is not None:
            state /= f"replica{replica}"
        given = options.datastores
        stores = [given] if isinstance(given, str | os.PathLike) else given
        known = tokenizer() if stores else None
        opened = [one if isinstance(one, Datastore) else open_datastore(one, tokenizer=known) for one in stores]
        self.drafter = ServingDrafter(
            config, datastores=opened, recycling=recycling, vocabulary=vocabulary, state=state
        )
        self.failures = 0
        self._tokenizer = tokenizer
        self._keep: dict[str, bool] = {}
        self.drafter.prepare([shape])
        atexit.register(call_if_alive, weakref.WeakMethod(self.drafter.save))

    @property
    def is_off(self) -> bool:
        """Whether drafting is off because it failed too often."""
        return self.failures >= _MOST_FAILURES

    def failed(self) -> None:
        """Log the current exception, and end all requests; this step has no drafts."""
        self.failures += 1
        logger.exception("drafting failed, %s", "and is off from now on" if self.is_off else "this step goes without")
        self.abandon()

    def begin(self, name: str, prompt: NDArray[Any] | Sequence[int], wishes: Mapping[str, Any], sampled: bool) -> bool:
        """Begin a request; return False if it has no drafts, by its options or because these are invalid (a warning).

        Parameters
        ----------
        name
            What it is called.
        prompt
            (L,) token ids.
        wishes
            What the request says of drafting.
        sampled
            Whether its tokens are sampled.
        """
        if not _wished(wishes, DRAFT):
            return False
        try:
            self.drafter.start(name, prompt, prediction_ids=self._prediction(wishes.get(PREDICTION)), sampled=sampled)
        except (ConfigError, PromptError) as error:
            logger.warning("a request goes without drafts: %s", in_a_line(error))
            return False
        self._keep[name] = _wished(wishes, KEEP)
        return True

    def _prediction(self, wanted: Any) -> list[int] | None:
        """Return the tokens of a request's expected answer, a text or token ids, if it has one."""
        if not wanted:
            return None
        if isinstance(wanted, str):
            wanted = self._tokenizer()(wanted, add_special_tokens=False)["input_ids"]
        if isinstance(wanted, (list, tuple)) and all(isinstance(one, int) for one in wanted):
            return list(wanted)
        raise PromptError(f"a text or token ids as {PREDICTION}", repr(wanted)[:80], "Leave it out.")

    def end(self, name: str, keep: bool = True) -> None:
        """End a request, if it was begun; with `keep`, session and phrases learn from it if its options allow that."""
        if name in self._keep:
            self.drafter.finish(name, keep=self._keep.pop(name) and keep)

    def abandon(self) -> None:
        """End all requests without learning from them."""
        self._keep.clear()
        self.drafter.abandon()

    def statistics(self) -> dict[str, float]:
        """See `ServingDrafter.statistics`; `failures` are steps without drafts because of an error."""
        return {**self.drafter.statistics(), "failures": self.failures}


def _wished(wishes: Mapping[str, Any], name: str) -> bool:
    """Return whether a request enables an option (the default); strings count as their values."""
    wish = wishes.get(name, True)
    return wish.strip().lower() not in _NO if isinstance(wish, str) else bool(wish)


def call_if_alive(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method at exit, if the object still exists."""
    known = method()
    if known is not None:
        known()
