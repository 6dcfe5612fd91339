"""Source text and token ids: encoding through which no text can smuggle control tokens, and decoding."""

from __future__ import annotations

import copy
import json
import re
import threading
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

_CONTROL = re.compile(r"^[▁\s]*[<\[].*[>\]]$", re.DOTALL)
"""What an added token that steers a model looks like; runs of blanks, which some vocabularies add, do not."""
_SENTINEL = "\n"
_CACHED_CHARS = 2_000_000
_BORDER = re.compile(r"\n(?=[A-Za-z])|\n +(?= [A-Za-z])")
"""Behind this every tokenizer begins a new word, whatever follows: a line's first word, with one blank before it."""
_BEGINNINGS = 8
_LONG = 4096
"""Longer texts are encoded as a batch of one: other threads go on meanwhile."""


def line_end(*texts: str) -> str:
    """How most lines of a document, given in parts, end: ``"\\r\\n"`` or ``"\\n"``."""
    ends = sum(text.count("\r\n") for text in texts)
    return "\r\n" if 0 < sum(text.count("\n") for text in texts) <= 2 * ends else "\n"


def with_line_feeds(value: Any) -> Any:
    """A text, or a JSON value with texts in it, whose lines end in line feeds: what models and drafters are shown."""
    if isinstance(value, str):
        return value.replace("\r\n", "\n")
    if isinstance(value, list):
        return [with_line_feeds(part) for part in value]
    return {key: with_line_feeds(part) for key, part in value.items()} if isinstance(value, dict) else value


class TextCodec:
    """The two ways a server reads text, and the one way it writes it, by a tokenizer with a Rust backend.

    Code is encoded by a copy of the tokenizer whose control tokens were removed, so that a file which contains the
    characters ``<|fim_suffix|>`` yields ordinary tokens. Only `encode_prompt` understands control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        described["added_tokens"] = [
            token
            for token in described.get("added_tokens") or []
            if not (token["special"] or _CONTROL.match(token["content"]))
        ]
        described["post_processor"] = None
        described["truncation"] = described["padding"] = None
        self.plain_description = json.dumps(described)
        self._plain = Tokenizer.from_str(self.plain_description)
        self._full: Tokenizer = tokenizer.backend_tokenizer
        self.vocab: dict[str, int] = tokenizer.get_vocab()
        self.longest = max(map(len, self.vocab))
        """Characters of the longest token: a text has at least as many tokens as this goes into its length."""
        self._guard = self._sentinel_ids()
        self.forget()

    def forget(self) -> None:
        """Drop what is remembered of texts that were encoded."""
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_chars = 0
        self._beginnings: deque[tuple[str, int, list[int]]] = deque(maxlen=_BEGINNINGS)

    def apart(self) -> TextCodec:
        """The same codec with nothing remembered, and a memory of its own."""
        other = copy.copy(self)
        other.forget()
        return other

    @property
    def cached(self) -> int:
        """Texts whose encoding is remembered."""
        return len(self._cache)

    def _sentinel_ids(self) -> list[int]:
        """Ids to strip where the tokenizer puts a blank before a text, so that a segment starts as written."""
        whole = self._plain.encode("a", add_special_tokens=False).tokens
        return self._plain.encode(_SENTINEL, add_special_tokens=False).ids if whole and whole[0].startswith("▁") else []

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of code; control tokens in it are ordinary characters."""
        if not text:
            return []
        ids = _encoding(self._plain, _SENTINEL + text if self._guard else text).ids
        return list(ids[len(self._guard) :])

    def split(self, text: str) -> list[str]:
        """The words that a text is cut into before each is cut into tokens; none where the tokenizer does not tell."""
        words = self._plain.pre_tokenizer
        return [text[start:end] for _, (start, end) in words.pre_tokenize_str(text)] if words else []

    def encode_cached(self, text: str, *, grows: bool = False) -> list[int]:
        """`encode`, remembering recent texts (chunks of other files come with every request).

        Of a text that ``grows`` at its end, only what was added since a recent one is read.
        """
        with self._lock:
            known = self._cache.get(text)
            if known is not None:
                self._cache.move_to_end(text)
                return known
        ids = self._encode_grown(text) if grows else self.encode(text)
        with self._lock:
            if text not in self._cache:
                self._cache[text] = ids
                self._cached_chars += len(text)
            while self._cached_chars > _CACHED_CHARS and len(self._cache) > 1:
                dropped, _ = self._cache.popitem(last=False)
                self._cached_chars -= len(dropped)
        return ids

    def _encode_grown(self, text: str) -> list[int]:
        """`encode`, going on from the longest known beginning of the text."""
        known = (begun for begun in list(self._beginnings) if text.startswith(begun[0]))
        _, cut, before = max(known, key=lambda begun: begun[1], default=("", 0, []))
        lead = _SENTINEL if self._guard else ""
        encoding = _encoding(self._plain, lead + text[cut:])
        ids = encoding.ids[len(self._guard) :]
        border = max((m.end() for m in _BORDER.finditer(text, cut)), default=0)
        starts = [start + cut - len(lead) for start, _ in encoding.offsets[len(self._guard) :]]
        at = bisect_left(starts, border)
        if border and starts[at : at + 1] == [border]:
            # Two more characters must be the same, so that the border is one in the longer text, too.
            self._beginnings.append((text[: border + 2], border, [*before, *ids[:at]]))
        return [*before, *ids]

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt, control tokens spelled in it included (the OpenAI dialects need that)."""
        return list(_encoding(self._full, text, add_special_tokens).ids)

    def token_id(self, spelling: str) -> int | None:
        """Id of a text that is exactly one entry of the vocabulary."""
        return self.vocab.get(spelling)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of a run of tokens."""
        return self._full.decode(list(token_ids), skip_special_tokens=skip_special)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token on its own."""
        return self._full.decode_batch([[i] for i in token_ids], skip_special_tokens=False)


def _encoding(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> Encoding:
    """Encoding of one text; while a long one is encoded other threads go on, which only the batch call allows."""
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
