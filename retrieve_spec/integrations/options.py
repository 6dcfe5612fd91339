"""Options of a drafter inside an engine, as its users and their requests write them, made into a `ServingDrafter`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import ConfigError, PromptError
from retrieve_spec.integrations.serving import ServingDrafter

DRAFT, KEEP, PREDICTION = "retrieve_spec_draft", "retrieve_spec_keep", "retrieve_spec_prediction"
"""What a request may say."""
_NO = frozenset({"", "0", "false", "no", "off"})
"""What a wish that is given as text says no with."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user of an engine may say.

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

    datastores: tuple[Datastore | str | os.PathLike[str], ...] = ()
    session: bool = False
    session_tokens: int = SpeculationConfig().session_tokens
    phrases: str = AUTO
    state: str | os.PathLike[str] | None = None
    min_path_probability: float = 0.05
    any_version: bool = False

    @classmethod
    def of(cls, given: Any, place: str, **defaults: Any) -> Options:
        """Options from what a user wrote.

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
        values = {**defaults, **given}
        stores = values.get("datastores", ())
        values["datastores"] = (stores,) if isinstance(stores, str) else tuple(stores)
        return cls(**values)

    def drafter(
        self, tokenizer: Callable[[], Any], vocabulary: int | None, replica: int | None = None
    ) -> ServingDrafter:
        """The drafter that these options describe.

        Parameters
        ----------
        tokenizer
            Makes the model's tokenizer; called where stores are to be checked against it.
        vocabulary
            Tokens of the model, if that is known.
        replica
            Number of this copy of the model where there are several: each keeps its own state.

        Raises
        ------
        ConfigError
            An option has a value outside its range, or the state folder cannot be made.
        StoreError, TokenizerMismatchError
            A store cannot be opened, or belongs to another tokenizer.
        """
        config = SpeculationConfig(
            session=self.session,
            session_tokens=self.session_tokens,
            phrases=self.phrases,  # type: ignore[arg-type]
            min_path_probability=self.min_path_probability,
        )
        state = None if self.state is None else Path(self.state)
        if state is not None and replica is not None:
            state /= f"replica{replica}"
        known = tokenizer() if self.datastores else None
        given = [one if isinstance(one, Datastore) else open_datastore(one, tokenizer=known) for one in self.datastores]
        return ServingDrafter(config, datastores=given, vocabulary=vocabulary, state=state)


def wished(wishes: Mapping[str, Any], name: str) -> bool:
    """Whether a request wants something, as it does by default; texts count as they read."""
    wish = wishes.get(name, True)
    return wish.strip().lower() not in _NO if isinstance(wish, str) else bool(wish)


def prediction_of(wishes: Mapping[str, Any], tokenizer: Callable[[], Any]) -> list[int] | None:
    """Tokens of the text that a request expects its answer to repeat, if it says one.

    Parameters
    ----------
    wishes
        What the request says: of `retrieve_spec_prediction`, a text or token ids.
    tokenizer
        Makes the model's tokenizer; called where a text is to be encoded.

    Raises
    ------
    PromptError
        It is neither.
    """
    wanted = wishes.get(PREDICTION)
    if not wanted:
        return None
    if isinstance(wanted, str):
        return list(tokenizer()(wanted, add_special_tokens=False)["input_ids"])
    if isinstance(wanted, (list, tuple)) and all(isinstance(one, int) for one in wanted):
        return list(wanted)
    raise PromptError(f"a text or token ids as {PREDICTION}", repr(wanted)[:80], "Leave it out.")


def check_version(engine: str, packages: tuple[str, ...], tested: tuple[str, ...], remedy: str) -> None:
    """Refuse a version of an engine that was never tested.

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
    found = next((known for known in map(installed_version, packages) if known), "none")
    if not any(found == known or found.startswith(f"{known}.") for known in tested):
        raise ConfigError(f"{engine} {' or '.join(tested)}", found, remedy)


def installed_version(package: str) -> str:
    """Version of an installed distribution, empty where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
