"""Token healing: a word that was begun left of the cursor is said again by the model, in tokens of its own.

Text is not always cut where tokens end: behind ``ret`` a model that learnt ``return`` as one token does not expect
``urn``. So what was begun is taken out of the prompt, and until the answer has said it only tokens that agree with it
are possible. What the client sees begins behind it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from functools import lru_cache
from typing import Any

from retrieve_spec.server.text import TextCodec

_MOST = 64
"""Characters of the longest beginning that is said again."""


class Beginnings:
    """Which tokens agree with a text that has been begun; for vocabularies that spell bytes.

    Attributes
    ----------
    possible
        Whether the vocabulary spells bytes, so that every text can be said in tokens.
    """

    def __init__(self, codec: TextCodec) -> None:
        spelled = _spelled_bytes(codec)
        self.possible = bool(spelled) and len({spelling for spelling in spelled.values() if len(spelling) == 1}) == 256
        self._ids = sorted(spelled, key=lambda token_id: spelled[token_id])
        self._spellings = [spelled[token_id] for token_id in self._ids]
        self._spelled = spelled
        self._split = codec.split

    def of(self, line: str) -> str:
        """The end of a line that may be the beginning of a token, "" where there is none, or an overlong one.

        Tokenizers cut a text into words first, and each word into tokens: that is the last word.
        """
        words = self._split(line[-2 * _MOST :]) if self.possible else []
        return words[-1] if words and len(words[-1]) <= _MOST else ""

    @lru_cache(maxsize=4096)  # noqa: B019 - one for each model, which lives as long
    def agreeing(self, rest: bytes) -> tuple[int, ...]:
        """Tokens whose bytes begin a text, or begin with it."""
        found: list[int] = []
        for length in range(1, len(rest) + 1):
            at = bisect_left(self._spellings, rest[:length])
            while at < len(self._ids) and self._spellings[at] == rest[:length]:
                found.append(self._ids[at])
                at += 1
        while at < len(self._ids) and self._spellings[at].startswith(rest):
            found.append(self._ids[at])
            at += 1
        return tuple(found)

    def forget(self) -> None:
        """Drop what is remembered of words that were begun."""
        Beginnings.agreeing.cache_clear()

    def processor(self, begun: str, prompt_length: int) -> Any:
        """A ``LogitsProcessor`` for one text behind a prompt of so many tokens."""
        return BeginningProcessor(self, begun.encode(), prompt_length)

    def rest(self, begun: bytes, said: list[int]) -> bytes:
        """What of a text is still to be said."""
        for token_id in said:
            if not begun:
                break
            begun = begun[len(self._spelled.get(token_id, begun)) :]
        return begun


class BeginningProcessor:
    """Makes every token impossible that does not agree with what was begun; a `LogitsProcessor` in all but its base."""

    def __init__(self, beginnings: Beginnings, begun: bytes, prompt_length: int) -> None:
        self._beginnings, self._begun, self._prompt_length = beginnings, begun, prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """(1, vocab) scores behind a text (1, n)."""
        import torch

        if not (rest := self._rest(input_ids[0])):
            return scores
        allowed = torch.tensor(self._beginnings.agreeing(rest), device=scores.device)
        out = torch.full_like(scores, -torch.inf)
        out[:, allowed] = scores[:, allowed]
        return out

    def acts_on(self, ids: Any) -> bool:
        """Whether what was begun is still to be said behind a text (n,)."""
        return bool(self._rest(ids))

    def _rest(self, ids: Any) -> bytes:
        if len(ids) - self._prompt_length >= len(self._begun):  # every token says a byte or more
            return b""
        return self._beginnings.rest(self._begun, ids[self._prompt_length :].tolist())


def _spelled_bytes(codec: TextCodec) -> dict[int, bytes]:
    """Bytes of every token that is no control token; empty where the vocabulary spells something else."""
    described = json.loads(codec.plain_description)
    if (described.get("decoder") or {}).get("type") != "ByteLevel":
        return {}
    byte_of = _letters_of_bytes()
    spelled = {
        token_id: bytes(byte_of[letter] for letter in spelling)
        for spelling, token_id in described["model"]["vocab"].items()
        if spelling and all(letter in byte_of for letter in spelling)
    }
    added = codec.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    kept = {token["id"]: token["content"].encode() for token in described.get("added_tokens") or []}
    return {i: text for i, text in spelled.items() if i not in added} | kept


def _letters_of_bytes() -> dict[str, int]:
    """How vocabularies of bytes write them (Radford and others, 2019): printable ones as they are, others from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(sorted(set(range(256)) - set(printable))):
        letters[chr(256 + number)] = byte
    return letters
