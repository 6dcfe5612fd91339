"""Guides: logits processors that allow few tokens, and tell where they allow only one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation import LogitsProcessor
from transformers.generation import logits_process as hf

from retrieve_spec.errors import ConfigError

SPACE = r"( |\n[ \t]{0,40})?"
"""Space between the parts of a JSON document: bounded, since some models never stop indenting."""
_FEW = 256
"""Where a grammar allows no more tokens than this, they tell where in it a text is: between values, not inside one."""
EXTRA = "pip install 'retrieve-spec[json]'"


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]
    """Makes every token impossible that a grammar does not allow next; where it allows only one, that one is drafted.

    It is called with a text that grows by one token each time, as plain decoding calls processors. A text that does not
    continue the last one after the same prompt is a new prompt, to which the grammar does not apply.

    Parameters
    ----------
    vocabulary, grammar
        As llguidance has them (`read_vocabulary`, `json_grammar`).
    """

    judges_drafts = True

    def __init__(self, vocabulary: Any, grammar: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(vocabulary, grammar, log_level=0)
        self._rows: list[_FollowedText] = []

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        lark: str | None = None,
        end_ids: Collection[int] = (),
    ) -> GrammarProcessor:
        """A processor for one of the kinds of grammars that llguidance reads.

        Parameters
        ----------
        tokenizer
            The model's.
        json_schema, regex, lark
            The grammar: a JSON schema, a regular expression, or one in Lark's language.
        end_ids
            Tokens that end a text; by default the tokenizer's.

        Raises
        ------
        ConfigError
            llguidance is not installed, not one grammar is given, it is none, or the vocabulary cannot be read.

        Examples
        --------
        >>> held = rs.GrammarProcessor.of(tokenizer, json_schema={"type": "object", "properties": {"n": {"const": 1}}})
        >>> model.generate(**inputs, logits_processor=[held], max_new_tokens=100)
        """
        kinds = {"json_schema": json_schema, "regex": regex, "lark": lark}
        given = {kind: grammar for kind, grammar in kinds.items() if grammar is not None}
        if len(given) != 1:
            raise ConfigError("one of json_schema, regex and lark", f"{len(given)} of them", "Give one grammar.")
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise ConfigError("llguidance for grammars", "no such package", f"Install it: {EXTRA}.") from None
        readers: dict[str, Callable[[Any], str]] = {
            "json_schema": json_grammar,
            "regex": regex_grammar,
            "lark": LLMatcher.grammar_from_lark,
        }
        ((kind, wanted),) = given.items()
        grammar = readers[kind](wanted)
        vocabulary = read_vocabulary(tokenizer, end_ids)
        if problem := check_grammar(grammar, vocabulary)[0]:
            raise ConfigError("a grammar that llguidance reads", problem, "Change what it names.")
        return cls(vocabulary, grammar)

    def fresh(self) -> GrammarProcessor:
        """Return a processor that has followed no text yet."""
        one = copy.copy(self)
        one._rows = []
        return one

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """(rows, vocab) scores after texts (rows, n)."""
        allowed = np.zeros(scores.shape, np.bool_)
        for row, ids in enumerate(input_ids.cpu().numpy()):
            if row < len(self._rows) and not self._rows[row].goes_on(ids):
                self._rows[row] = self._followed(ids)
            allowed[row] = self._row(row, ids).allowed(ids, scores.shape[-1])
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), -torch.inf)

    def forced(self, ids: NDArray[np.int64]) -> tuple[int, float] | None:
        """Return the token that must follow the text (n,) of the only row, and how probable that is
        (`drafting.forced`).
        """
        return self._row(0, ids).forced(ids)

    def _row(self, row: int, ids: NDArray[np.int64]) -> _FollowedText:
        while len(self._rows) <= row:
            self._rows.append(self._followed(ids))
        return self._rows[row]

    def _followed(self, prompt: NDArray[np.int64]) -> _FollowedText:
        return _FollowedText(self._matcher.deep_copy(), prompt)


class _FollowedText:
    """The state of one text in a grammar, and the tokens it took before where the same few were allowed.

    A text that does not continue the last one is followed from where the two differ.
    """

    def __init__(self, matcher: Any, prompt: NDArray[np.int64]) -> None:
        self._matcher, self._prompt, self._prompt_length = matcher, prompt, len(prompt)
        self._length = len(prompt) - 1  # of the text in the last call of `allowed`
        self._said: NDArray[np.int64] = np.empty(0, np.int64)
        self._last: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._took: dict[bytes, tuple[int, int]] = {}  # choices taken, and how often in a row

    def goes_on(self, ids: NDArray[np.int64]) -> bool:
        """Whether a text (n,) has the prompt of the last one and at least one token after it."""
        return len(ids) == self._length + 1 and np.array_equal(ids[: self._prompt_length], self._prompt)

    def allowed(self, ids: NDArray[np.int64], vocabulary: int) -> NDArray[np.bool_]:
        """(vocabulary,) tokens that may follow a text (n,); all of them after its end."""
        self._length = len(ids)
        if not self._follow(ids[self._prompt_length :]):
            if self._matcher.is_stopped():
                return np.ones(vocabulary, np.bool_)
            raise RuntimeError("the grammar does not allow the text that it was given")
        if len(self._last) and len(self._said):
            self._learn(self._last.tobytes(), int(self._said[-1]))
        self._last = self._mask()
        known = self._last[:vocabulary]
        return np.pad(known, (0, vocabulary - len(known)))

    def _learn(self, choices: bytes, token: int) -> None:
        last, times = self._took.get(choices, (token, 0))
        self._took[choices] = token, times + 1 if token == last else 1

    def forced(self, ids: NDArray[np.int64]) -> tuple[int, float] | None:
        """Return the token that must follow a text (n,), or that always followed where the same few were allowed."""
        if not self._follow(ids[self._prompt_length :]):
            return None
        mask = self._mask()
        count = np.count_nonzero(mask)
        if count == 1:
            return int(mask.argmax()), 1.0
        token, times = self._took.get(mask.tobytes(), (0, 0)) if count <= _FEW else (0, 0)
        return (token, (1.0 + times) / (1.5 + times)) if times else None

    def _mask(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little").view(np.bool_)

    def _follow(self, said: NDArray[np.int64]) -> bool:
        """Advance the matcher over a text as far as the grammar allows it; return whether that is all of it."""
        least = min(len(said), len(self._said))
        parted = np.flatnonzero(said[:least] != self._said[:least])
        kept = int(parted[0]) if len(parted) else least
        if kept < len(self._said):
            self._matcher.rollback(len(self._said) - kept)
        taken = self._matcher.try_consume_tokens(said[kept:].tolist())
        self._said = said[: kept + taken].copy()
        return len(self._said) == len(said)


def json_grammar(schema: Mapping[str, Any], **options: Any) -> str:
    """llguidance's grammar of a JSON schema, under options of its own."""
    from llguidance import LLMatcher

    overrides: Any = {"whitespace_pattern": SPACE, **options}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))


def regex_grammar(pattern: str) -> str:
    """llguidance's grammar of a regular expression."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(pattern))


def read_vocabulary(tokenizer: Any, end_ids: Collection[int] = ()) -> Any:
    """A tokenizer as llguidance wants it.

    Raises
    ------
    ConfigError
        It cannot be read.
    """
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=sorted(end_ids) or None)
    except (ValueError, RuntimeError) as error:
        raise ConfigError("a tokenizer that llguidance reads", str(error), "Use the model's fast tokenizer.") from error


def check_grammar(grammar: str, vocabulary: Any) -> tuple[str, list[str]]:
    """Return what is wrong with a grammar, empty where nothing is, and what llguidance leaves out of it."""
    from llguidance import LLMatcher

    wrong, said = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
    return ("\n".join(said).splitlines()[0], []) if wrong else ("", list(said))


class AllowedTokens:
    """Makes a guide of the `prefix_allowed_tokens_fn` of a call of one row.

    The function is only called with texts that occur: it may not know others.
    """

    judges_drafts = False

    def __init__(self, processor: hf.PrefixConstrainedLogitsProcessor) -> None:
        self._allowed = processor._prefix_allowed_tokens_fn

    def forced(self, ids: NDArray[np.int64]) -> tuple[int, float] | None:
        """Return the only token that may follow a text (n,); None where there are several."""
        allowed = self._allowed(0, torch.from_numpy(ids))
        return (int(allowed[0]), 1.0) if len(allowed) == 1 else None


def guide_of(processors: Iterable[Any]) -> GrammarProcessor | AllowedTokens | None:
    """Return the first processor of a row that tells where only one token is allowed; None where none does."""
    for processor in processors:
        if isinstance(processor, GrammarProcessor):
            return processor
        if type(processor) is hf.PrefixConstrainedLogitsProcessor:
            return AllowedTokens(processor)
    return None
