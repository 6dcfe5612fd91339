"""Grammars: a logits processor that lets through nothing but the JSON that a request asks for (by llguidance)."""

from __future__ import annotations

import json
from collections.abc import Collection
from threading import Lock
from typing import Any

import numpy as np

from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.schemas import Common

_EXTRA = "pip install 'retrieve-spec[json]'"
_SPACE = r"( |\n[ \t]{0,40})?"
"""Space between the parts of a document: bounded, since some models never stop indenting."""


class Grammars:
    """Grammars for the vocabulary of one model."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, sorted(end_ids)
        self._vocabulary: Any = None
        self._lock = Lock()

    def of(self, request: Common) -> str:
        """The grammar of what a request asks for; empty where it asks for any text.

        Raises
        ------
        Refusal
            400: the library is not installed, or the schema is none that it knows.
        """
        schema, name = request.wanted_json()
        if schema is None:
            return ""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise Refusal(400, f'"{name}" needs the package llguidance: {_EXTRA}', "unsupported_field") from None
        vocabulary = self._read_vocabulary(name)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _SPACE})
        if problem := LLMatcher.validate_grammar(grammar, vocabulary):
            if problem.startswith("WARNING"):
                return str(grammar)
            raise Refusal(400, f'"{name}": {problem.splitlines()[0]}')
        return str(grammar)

    def _read_vocabulary(self, name: str) -> Any:
        """The tokenizer as llguidance wants it, read once."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = from_tokenizer(self._tokenizer, eos_token=self._end_ids)
                except (ValueError, RuntimeError) as error:
                    raise Refusal(400, f'"{name}" cannot be served with this model: {error}') from error
            return self._vocabulary

    def processor(self, grammar: str, prompt_length: int) -> Any:
        """A ``LogitsProcessor`` for one text behind a prompt of so many tokens."""
        from llguidance import LLMatcher

        return GrammarProcessor(LLMatcher(self._vocabulary, grammar, log_level=0), prompt_length)


class GrammarProcessor:
    """Makes every token impossible that the grammar does not allow next; a `LogitsProcessor` in all but its base.

    It is called with longer and longer texts, as plain decoding calls processors; a text that does not go on from the
    last one is followed anew from where they part. The tokens of the prompt are not the grammar's.
    """

    def __init__(self, matcher: Any, prompt_length: int) -> None:
        self._matcher, self._prompt_length = matcher, prompt_length
        self._said: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """(1, vocab) scores behind a text (1, n)."""
        import torch

        self._follow(input_ids[0, self._prompt_length :].tolist())
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(scores.shape[-1], np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: len(allowed)].astype(np.bool_)
        allowed[: len(known)] = known
        return scores.masked_fill(torch.from_numpy(~allowed).to(scores.device), -torch.inf)

    def _follow(self, said: list[int]) -> None:
        """Let the matcher stand behind a text."""
        kept = 0
        for old, new in zip(self._said, said, strict=False):
            if old != new:
                break
            kept += 1
        if kept < len(self._said):
            self._matcher.rollback(len(self._said) - kept)
        if kept < len(said) and not self._matcher.consume_tokens(said[kept:]):
            raise RuntimeError(f"the grammar cannot be followed: {self._matcher.get_error()}")
        self._said = said
