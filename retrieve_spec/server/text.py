"""Text and token ids: an encoding in which no text can contain control tokens, and decoding."""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from time import monotonic
from typing import Any, Literal

from tokenizers import Encoding, Tokenizer

from retrieve_spec.generation.streams import TextDecoder

_CONTROL = re.compile(r"^[▁\s]*[<\[].*[>\]]$", re.DOTALL)
"""Form of added tokens that are control tokens; runs of blanks, which some vocabularies add, are not."""
_SENTINEL = "\n"
_REMEMBERED, _LARGE = 128, 65_536
"""The most texts whose encoding is cached, and the most characters of such a text."""
_LONG = 4096
"""Longer texts are encoded by the batch call, which lets other threads run."""
_MANY = 256
"""As many token ids are decoded by the batch call, likewise."""


def line_end(*texts: str) -> str:
    """Return the most frequent line end of a document given in parts: ``"\\r\\n"`` or ``"\\n"``."""
    ends = sum(text.count("\r\n") for text in texts)
    return "\r\n" if 0 < sum(text.count("\n") for text in texts) <= 2 * ends else "\n"


def with_texts(value: Any, change: Callable[[str], str], keys: bool = False) -> Any:
    """Return a JSON value with a function applied to every string, with `keys` also to the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(part, change, keys) for part in value]
    if isinstance(value, dict):
        return {change(key) if keys else key: with_texts(part, change, keys) for key, part in value.items()}
    return value


def with_line_feeds(value: Any) -> Any:
    """Return a JSON value whose strings have LF as line ends, as models and drafters read them."""
    return with_texts(value, lambda text: text.replace("\r\n", "\n"))


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return an expression that finds the longest of some texts; it first tests the few different first characters."""
    by_start = dict[str, list[str]]()
    for text in sorted(filter(None, texts), key=len, reverse=True):
        by_start.setdefault(text[:3], []).append(re.escape(text[3:]))
    starts = sorted(by_start, key=len, reverse=True)
    cases = [f"{re.escape(start)}(?:{'|'.join(by_start[start])})" for start in starts]
    return re.compile(f"({'|'.join(cases) or '(?!)'})")


def _is_control(token: dict[str, Any]) -> bool:
    """Whether an added token is a control token, not text."""
    return bool(token["special"] or _CONTROL.match(token["content"]))


class TextCodec:
    """Encodes and decodes text with a tokenizer that has a Rust backend.

    Code is encoded by a copy of the tokenizer without control tokens, so that ``<|fim_suffix|>`` in a file gives
    ordinary tokens. Only `encode_prompt` has control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        added = described.get("added_tokens") or []
        described["added_tokens"] = [token for token in added if not _is_control(token)]
        self.controls = any_of([token["content"] for token in added if _is_control(token)])
        """Finds control tokens in a text."""
        described["post_processor"] = None
        described["truncation"] = described["padding"] = None
        self.plain_description = json.dumps(described)
        self._plain = Tokenizer.from_str(self.plain_description)
        self._full: Tokenizer = tokenizer.backend_tokenizer
        self.vocab: dict[str, int] = tokenizer.get_vocab()
        self.longest = max(map(len, self.vocab))
        """Characters of the longest token; a text of n characters has at least n / this many tokens."""
        self._guard = self._sentinel_ids()
        self.forget()

    def forget(self) -> None:
        """Empty the cache of encodings."""
        self._remembered = lru_cache(_REMEMBERED)(self.encode)

    def apart(self) -> TextCodec:
        """Return a copy with an empty cache of its own."""
        other = copy.copy(self)
        other.forget()
        return other

    @property
    def cached(self) -> int:
        """Number of cached encodings."""
        return self._remembered.cache_info().currsize

    def _sentinel_ids(self) -> list[int]:
        """Return the ids to remove if the tokenizer adds a blank before a text, so that a segment starts as written."""
        whole = self._plain.encode("a", add_special_tokens=False).tokens
        return self._plain.encode(_SENTINEL, add_special_tokens=False).ids if whole and whole[0].startswith("▁") else []

    def encode(self, text: str) -> list[int]:
        """Encode code; control tokens in it are ordinary characters."""
        if not text:
            return []
        ids = _encoding(self._plain, _SENTINEL + text if self._guard else text).ids
        return list(ids[len(self._guard) :])

    def split(self, text: str) -> list[str]:
        """Return the words into which the pre-tokenizer cuts a text; none if the tokenizer has no pre-tokenizer."""
        words = self._plain.pre_tokenizer
        return [text[start:end] for _, (start, end) in words.pre_tokenize_str(text)] if words else []

    def encode_cached(self, text: str) -> list[int]:
        """Encode with a cache of recent texts (excerpts of other files come with every request)."""
        return self._remembered(text) if len(text) <= _LARGE else self.encode(text)

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a raw prompt, in which control tokens are control tokens (OpenAI's dialects need that)."""
        return list(_encoding(self._full, text, add_special_tokens).ids)

    def token_id(self, spelling: str) -> int | None:
        """Return the id of a text that is exactly one entry of the vocabulary."""
        return self.vocab.get(spelling)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids; many by the batch call, which lets other threads run."""
        if len(token_ids) < _MANY:
            return self._full.decode(list(token_ids), skip_special_tokens=False)
        return self._full.decode_batch([list(token_ids)], skip_special_tokens=False)[0]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Decode each token on its own."""
        return self._full.decode_batch([[i] for i in token_ids], skip_special_tokens=False)


def _encoding(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> Encoding:
    """Encode one text; a long one by the batch call, which lets other threads run."""
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


StopType = Literal["none", "eos", "limit", "word"]


class HiddenText:
    """Control tokens that users and tools write: hidden from a template, then encoded as text.

    Parameters
    ----------
    codec
        Text codec of the model.
    kept_in_answers
        Control tokens that are not hidden in the model's own messages, because the template looks for them.
    """

    def __init__(self, codec: TextCodec, kept_in_answers: Sequence[str] = ()) -> None:
        self._codec, self._kept = codec, frozenset(kept_in_answers)
        self._mark = f"hidden{uuid.uuid4().hex}"
        self._spelled: list[str] = []

    def of(self, value: Any) -> Any:
        """Return a JSON value with them hidden, in keys and strings."""
        return with_texts(value, lambda text: self._codec.controls.sub(self._placeholder, text), keys=True)

    def of_turns(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the turns of a conversation with them hidden."""
        return [
            {**self.of(turn), "content": self._codec.controls.sub(self._in_an_answer, turn["content"])}
            if turn["role"] == "assistant"
            else self.of(turn)
            for turn in turns
        ]

    def _in_an_answer(self, found: re.Match[str]) -> str:
        return found[0] if found[0] in self._kept else self._placeholder(found)

    def _placeholder(self, found: re.Match[str]) -> str:
        self._spelled.append(found[0])
        return f"{self._mark}n{len(self._spelled) - 1}n"

    def encoded(self, prompt: str) -> list[int]:
        """Encode a rendered prompt; only the template's own control tokens become control tokens."""
        if not self._spelled:
            return self._codec.encode_prompt(prompt, add_special_tokens=False)
        ids, read = list[int](), ""
        for piece in self._codec.controls.split(prompt):
            if self._mark not in piece:
                read += piece
                continue
            text = re.sub(f"{self._mark}n([0-9]+)n", lambda found: self._spelled[int(found[1])], piece)
            ids += [*self._codec.encode_prompt(read, add_special_tokens=False), *self._codec.encode(text)]
            read = ""
        return [*ids, *self._codec.encode_prompt(read, add_special_tokens=False)]


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a completion ends.

    Attributes
    ----------
    max_tokens
        Limit of tokens; -1: the context is the limit.
    end_ids
        Tokens that end the text and are not part of it.
    words
        Strings that end the text and are not part of it.
    min_indent
        A line with less indentation ends the text (0: off). Its characters are cut, its indentation is kept.
    newline_after_s
        Seconds after the first token from which the next newline ends the text (None: off).
    begun
        Begun word that the answer repeats; it is no part of the text, and its tokens are not counted.
    """

    max_tokens: int = -1
    end_ids: frozenset[int] = frozenset()
    words: tuple[str, ...] = ()
    min_indent: int = 0
    newline_after_s: float | None = None
    begun: str = ""


class StopWord:
    """A stop string, matched incrementally (Knuth, Morris and Pratt, 1977).

    The failure function is computed as far as the text has matched, so a long stop string costs only that much.

    Attributes
    ----------
    matched
        Number of its first characters that the text ends with.
    """

    def __init__(self, word: str) -> None:
        self.word, self.matched = word, 0
        self._falls = [0]  # failure links: for each number of matched characters less one, the fallback

    def read(self, piece: str) -> int:
        """Read more text; return how many of its characters complete the stop string, or -1."""
        for count, letter in enumerate(piece, 1):
            self.matched = self._after(letter, self.matched)
            if self.matched == len(self.word):
                return count
            if self.matched > len(self._falls):
                self._falls.append(self._after(letter, self._falls[-1]))
        return -1

    def _after(self, letter: str, matched: int) -> int:
        while matched and self.word[matched] != letter:
            matched = self._falls[matched - 1]
        return matched + (self.word[matched] == letter)


class StopScanner:
    """Reads tokens one by one and keeps the text of a completion.

    Parameters
    ----------
    codec
        Text codec of the model.
    rules
        When to stop.
    clock
        Seconds, monotonic (tests give their own).

    Attributes
    ----------
    token_ids
        Tokens read, without one that ended the text.
    shown_ids
        The same without the begun word; a token that continues it is encoded again without it.
    shown
        Number of characters that were returned by `visible`.
    """

    def __init__(self, codec: TextCodec, rules: StopRules, clock: Callable[[], float] = monotonic) -> None:
        self._rules = rules
        self._words = [StopWord(word) for word in rules.words]
        self._clock = clock
        self._decoder = TextDecoder(codec.decode)
        self._decoder.push(codec.encode_cached("a"))  # else some drop leading spaces
        self._first_token_at: float | None = None
        self._begun = len(rules.begun)
        self._codec = codec
        self._unseen = 0  # tokens with no text beyond the begun one
        blanks = f"[ \\t]{{0,{rules.min_indent - 1}}}"
        self._outdented = re.compile(rf"\n{blanks}(?=[^ \t])") if rules.min_indent > 0 else None
        self.shown = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.shown_ids: list[int] = []
        self.stop_type: StopType = "none"
        self.stopping_word = ""

    @property
    def stopped(self) -> bool:
        """Whether the completion has ended."""
        return self.stop_type != "none"

    @property
    def counted(self) -> int:
        """Number of tokens that count towards `max_tokens`."""
        return len(self.token_ids) - self._unseen

    def push(self, token_ids: Sequence[int]) -> int:
        """Read accepted tokens up to the one that ends the completion; return how many were read."""
        now = self._clock()
        if self._first_token_at is None:
            self._first_token_at = now
        for count, token_id in enumerate(token_ids, 1):
            if token_id in self._rules.end_ids:
                self._end("eos")
                return count
            self.token_ids.append(token_id)
            self._append(self._without_begun(token_id, self._decoder.push([token_id])), now)
            if not self.stopped and 0 <= self._rules.max_tokens <= self.counted:
                self._end("limit")
            if self.stopped:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """Release what was held back at the end, except for half a character whose rest is missing."""
        if not self.stopped:
            self._flush(whole=False)
            self._words.clear()

    def visible(self) -> str:
        """Return the text that is certain since the last call; the beginning of a stop string is held back."""
        held = 0 if self.stopped else max((watched.matched for watched in self._words), default=0)
        end = len(self.text) - held
        fresh = self.text[self.shown : end] if end > self.shown else ""
        self.shown = max(self.shown, end)
        return fresh

    def _end(self, stop_type: StopType) -> None:
        self.stop_type = stop_type
        if stop_type != "word":
            self._flush(whole=stop_type == "eos")

    def _flush(self, *, whole: bool) -> None:
        """Release what was held back; half a character at its end only if the model itself ended there."""
        rest = self._decoder.flush() if whole else self._decoder.flush().rstrip("\ufffd")
        self.text += rest[self._begun :]
        self._begun -= min(self._begun, len(rest))

    def _without_begun(self, token_id: int, piece: str) -> str:
        """Return a token's text without the begun word, and note the tokens that are shown."""
        known = min(self._begun, len(piece))
        fresh, self._begun = piece[known:], self._begun - known
        if self._begun or (known and not fresh):
            self._unseen += 1
        else:
            self.shown_ids += self._codec.encode(fresh) if known else [token_id]
        return fresh

    def _append(self, piece: str, now: float) -> None:
        if not piece:
            return
        before = len(self.text)
        self.text += piece
        if self._cut_at_word(before, piece) or self._cut_at_indent(before):
            return
        late, started = self._rules.newline_after_s, now if self._first_token_at is None else self._first_token_at
        if "\n" in piece and late is not None and now - started > late:
            self._end("limit")

    def _cut_at_word(self, before: int, piece: str) -> bool:
        ends = [(watched.read(piece), watched.word) for watched in self._words]
        hits = [(before + end - len(word), word) for end, word in ends if end >= 0]
        if not hits:
            return False
        at, self.stopping_word = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        self.text = self.text[:at]
        self._end("word")
        return True

    def _cut_at_indent(self, before: int) -> bool:
        """End the text before the first character of a line that is indented too little; its indentation stays."""
        if self._outdented is None:
            return False
        found = self._outdented.search(self.text, max(0, self.text.rfind("\n", 0, before)))
        if found is None:
            return False
        self.text = self.text[: found.end()]
        self._end("limit")
        return True
