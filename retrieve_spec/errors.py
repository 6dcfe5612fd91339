"""Errors that a user can cause, each saying what was expected, what was got and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]*@")
_SIGNATURE = re.compile(r"(https?://[^\s?]*\?)[^\s'\"]*[^\s'\".,:;)]")
"""What is asked for after an address of the web: it may let in whom it is shown to."""


def _public(text: str) -> str:
    """A text whose addresses let nobody in."""
    return _SIGNATURE.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def in_a_line(error: Exception, most: int = 160) -> str:
    """Name of an exception and the first line of what it says, of which `most` characters are kept."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:most] if lines else ''}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """What to do about an unknown name: "Did you mean …?" with the one most like it, empty where none is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"Did you mean {close[0]!r}?" if close else ""


class RetrieveSpecError(Exception):
    """Base of all errors raised by this library.

    Its text is "expected …, got …. Do …." or, of something that was to be done, "could not …: why. Do …." Passwords in
    addresses are left out: messages are logged.

    Parameters
    ----------
    expected
        What would have been right, as a noun phrase; or what was to be done, as "to listen on port 8012".
    got
        What was there instead; or why it was not done.
    remedy
        What the user can do about it, as an imperative sentence.
    """

    def __init__(self, expected: str, got: str, remedy: str) -> None:
        expected, got, remedy = (_public(str(part)) for part in (expected, got, remedy))
        done = expected.startswith("to ")
        happened = f"could not {expected[3:]}: {got}" if done else f"expected {expected}, got {got}"
        super().__init__(f"{happened}. {remedy}")
        self.expected = expected
        self.got = got
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[RetrieveSpecError], tuple[str, str, str]]:
        """Its parts, so that worker processes can raise it."""
        return type(self), (self.expected, self.got, self.remedy)


class ConfigError(RetrieveSpecError, ValueError):
    """An option has a value outside its range, or options contradict each other."""


def require(right: bool, expected: str, got: object, remedy: str) -> None:
    """Refuse an option's value with `ConfigError`, whose `got` is its `repr`, unless it is right."""
    if not right:
        raise ConfigError(expected, repr(got)[:60], remedy)


class UnknownPresetError(ConfigError):
    """`draft=` names no preset."""


class MissingSourceError(ConfigError):
    """A preset needs a source that was not given (a store, a prediction, hidden states)."""


class PromptError(RetrieveSpecError, ValueError):
    """The prompt is empty, or leaves no room for a new token."""


class PositionError(PromptError, IndexError):
    """The text has become longer than the table of positions that the model has."""


class UnknownTokenError(PromptError, IndexError):
    """The prompt has a token that the model does not embed."""


class RequestError(RetrieveSpecError, KeyError):
    """A request that an engine names is not under way, or is already."""

    def __str__(self) -> str:
        return str(self.args[0])


class DistributionError(RetrieveSpecError, RuntimeError):
    """Scores to sample from are NaN, infinite or all -inf: the model overflowed, or processors left no token."""


class RankError(RetrieveSpecError, RuntimeError):
    """The first rank of a tensor-parallel model raised while the others waited for its decision."""


class TokenizerMismatchError(RetrieveSpecError, ValueError):
    """The tokenizer does not belong to the model, or a store was built with another one."""


class ModelMismatchError(RetrieveSpecError, ValueError):
    """A dense index was built with another model."""


class UnsupportedModelError(RetrieveSpecError, TypeError):
    """The object given is not a Hugging Face causal language model that can generate."""


class ModelNotFoundError(RetrieveSpecError, OSError):
    """There is no model by the name given, on disk or on the hub."""


class StoreError(RetrieveSpecError, OSError):
    """Base of errors about a datastore on disk."""


class StoreNotFoundError(StoreError):
    """There is no datastore at the path."""


class StoreIncompleteError(StoreError):
    """A build was interrupted, or is running."""


class StoreCorruptError(StoreError):
    """A file of the store is truncated, altered or inconsistent."""

    def __init__(
        self, expected: str, got: str, remedy: str = "Restore the store from a copy, or build it again."
    ) -> None:
        super().__init__(expected, got, remedy)


class StoreVersionError(StoreError):
    """The store was written by another version of this library, in another format."""


class StoreLockedError(StoreError):
    """Another process is writing to the store."""


class BuildError(StoreError):
    """A store cannot be built from what was given."""


class NothingToIndexError(BuildError):
    """A change of a datastore found no text.

    Attributes
    ----------
    left_out
        How many files stay out, by reason.
    """

    def __init__(self, expected: str, got: str, remedy: str, left_out: Mapping[str, int] | None = None) -> None:
        super().__init__(expected, got, remedy)
        self.left_out = dict(left_out or {})


class TraceError(RetrieveSpecError, ValueError):
    """A trace or prompt file is not in the documented format."""


class ServeError(RetrieveSpecError):
    """The server cannot start as configured."""
