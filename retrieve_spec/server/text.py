"""Source text and token ids: encoding through which no text can smuggle control tokens, and decoding."""

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
"""What an added token that steers a model looks like; runs of blanks, which some vocabularies add, do not."""
_SENTINEL = "\n"
_REMEMBERED, _LARGE = 128, 65_536
"""Texts whose encoding is remembered, and characters that such a text has at most."""
_LONG = 4096
"""Longer texts are encoded as a batch of one: other threads go on meanwhile."""


def line_end(*texts: str) -> str:
    """How most lines of a document, given in parts, end: ``"\\r\\n"`` or ``"\\n"``."""
    ends = sum(text.count("\r\n") for text in texts)
    return "\r\n" if 0 < sum(text.count("\n") for text in texts) <= 2 * ends else "\n"


def with_texts(value: Any, change: Callable[[str], str], keys: bool = False) -> Any:
    """A text, or a JSON value, with every text in it changed; of objects the `keys`, too, if they are to be."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(part, change, keys) for part in value]
    if isinstance(value, dict):
        return {change(key) if keys else key: with_texts(part, change, keys) for key, part in value.items()}
    return value


def with_line_feeds(value: Any) -> Any:
    """A text, or a JSON value with texts in it, whose lines end in line feeds: what models and drafters are shown."""
    return with_texts(value, lambda text: text.replace("\r\n", "\n"))


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """What finds the longest of some texts; vocabularies have a thousand, few of which begin like anything."""
    by_start = dict[str, list[str]]()
    for text in sorted(filter(None, texts), key=len, reverse=True):
        by_start.setdefault(text[:3], []).append(re.escape(text[3:]))
    starts = sorted(by_start, key=len, reverse=True)
    cases = [f"{re.escape(start)}(?:{'|'.join(by_start[start])})" for start in starts]
    return re.compile(f"({'|'.join(cases) or '(?!)'})")


def _is_control(token: dict[str, Any]) -> bool:
    """Whether an added token steers the model, instead of standing for text."""
    return bool(token["special"] or _CONTROL.match(token["content"]))


class TextCodec:
    """The two ways a server reads text, and the one way it writes it, by a tokenizer with a Rust backend.

    Code is encoded by a copy of the tokenizer whose control tokens were removed, so that a file which contains the
    characters ``<|fim_suffix|>`` yields ordinary tokens. Only `encode_prompt` understands control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        added = described.get("added_tokens") or []
        described["added_tokens"] = [token for token in added if not _is_control(token)]
        self.controls = any_of([token["content"] for token in added if _is_control(token)])
        """Finds control tokens that are spelled in a text."""
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
        self._remembered = lru_cache(_REMEMBERED)(self.encode)

    def apart(self) -> TextCodec:
        """Return a copy with an empty memory of its own."""
        other = copy.copy(self)
        other.forget()
        return other

    @property
    def cached(self) -> int:
        """Texts whose encoding is remembered."""
        return self._remembered.cache_info().currsize

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

    def encode_cached(self, text: str) -> list[int]:
        """`encode`, remembering recent texts (chunks of other files come with every request)."""
        return self._remembered(text) if len(text) <= _LARGE else self.encode(text)

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


StopType = Literal["none", "eos", "limit", "word"]


class HiddenText:
    """Control tokens that are spelled in what people and tools say: hidden from a template, and encoded as text.

    Parameters
    ----------
    codec
        Text codec of the model.
    kept_in_answers
        Those that stay what they are where the model said them, for its template to find.
    """

    def __init__(self, codec: TextCodec, kept_in_answers: Sequence[str] = ()) -> None:
        self._codec, self._kept = codec, frozenset(kept_in_answers)
        self._mark = f"hidden{uuid.uuid4().hex}"
        self._spelled: list[str] = []

    def of(self, value: Any) -> Any:
        """Return a JSON value without them, in keys and in texts."""
        return with_texts(value, lambda text: self._codec.controls.sub(self._placeholder, text), keys=True)

    def of_turns(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the turns of a conversation without them."""
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
        """Return the token ids of what a template made of it, in which only its own control tokens are such."""
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
        Tokens at most; -1 for no limit but the context.
    end_ids
        Tokens that end the text and are not part of it.
    words
        Strings that end the text and are not part of it.
    min_indent
        A line indented less ends the text (0: off). The line's own characters are cut, its indentation stays.
    newline_after_s
        Seconds after the first token from which the next newline ends the text (None: off).
    begun
        What the tokens say first and the client has already: no part of the text, nor are its tokens counted.
    """

    max_tokens: int = -1
    end_ids: frozenset[int] = frozenset()
    words: tuple[str, ...] = ()
    min_indent: int = 0
    newline_after_s: float | None = None
    begun: str = ""


class StopWord:
    """One stop string, and how much of it the text ends with (Knuth, Morris and Pratt, 1977).

    What a mismatch falls back to is worked out as far as the text has matched: a long string costs what is read of it.

    Attributes
    ----------
    matched
        Characters of its beginning that the text ends with.
    """

    def __init__(self, word: str) -> None:
        self.word, self.matched = word, 0
        self._falls = [0]  # by characters matched less one, those that still match one character later

    def read(self, piece: str) -> int:
        """Read more of the text; how much of the piece it takes for the whole string to stand there, else -1."""
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
        Tokens read, but for one that ended the text.
    shown_ids
        The same without those that say what was begun; one that says more is encoded anew without it.
    shown
        Characters of the text that were visible.
    """

    def __init__(self, codec: TextCodec, rules: StopRules, clock: Callable[[], float] = monotonic) -> None:
        self._rules = rules
        self._words = [StopWord(word) for word in rules.words]
        self._clock = clock
        self._decoder = TextDecoder(codec.tokenizer, skip_special_tokens=False)
        self._decoder.push(codec.encode_prompt("a", add_special_tokens=False))  # else some leave out the first blank
        self._first_token_at: float | None = None
        self._begun = len(rules.begun)
        self._codec = codec
        self._unseen = 0  # tokens that said nothing but what was begun
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
        """Tokens that said something new, of which there may be `max_tokens`."""
        return len(self.token_ids) - self._unseen

    def push(self, token_ids: Sequence[int]) -> int:
        """Read accepted tokens up to the one that ends the completion; returns how many were read."""
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
        """No further token comes: release what was held back, but for half a character, whose rest was to follow."""
        if not self.stopped:
            self._flush(whole=False)
            self._words.clear()

    def visible(self) -> str:
        """Text that became certain since the last call; what could still become a stop string is held back."""
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
        """Take what was held back for the end of a character; half of one only where the model ended there itself."""
        rest = self._decoder.flush() if whole else self._decoder.flush().rstrip("\ufffd")
        self.text += rest[self._begun :]
        self._begun -= min(self._begun, len(rest))

    def _without_begun(self, token_id: int, piece: str) -> str:
        """The text of a token without what the client has of it already; its tokens are those that are shown."""
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
        """End the text in front of the first sign of a line that is indented too little; its blanks stay."""
        if self._outdented is None:
            return False
        found = self._outdented.search(self.text, max(0, self.text.rfind("\n", 0, before)))
        if found is None:
            return False
        self.text = self.text[: found.end()]
        self._end("limit")
        return True
