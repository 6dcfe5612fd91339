"""Stop rules of completions: the text a client may see, and the token at which a completion ends.

A verified pass emits several tokens at once; each is looked at on its own, so that a run of accepted tokens ends
exactly where decoding one token at a time would have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from retrieve_spec.generation.streams import TextDecoder
from retrieve_spec.server.text import TextCodec

StopType = Literal["none", "eos", "limit", "word"]


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
        self._line_start = -1
        self._shown = 0
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
            self._append(self._behind_begun(token_id, self._decoder.push([token_id])), now)
            if not self.stopped and 0 <= self._rules.max_tokens <= self.counted:
                self._end("limit")
            if self.stopped:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """No further token comes: release what was held back, but for half a character, whose rest was to follow."""
        if not self.stopped:
            self._flush(whole=False)

    def visible(self) -> str:
        """Text that became certain since the last call; what could still become a stop string is held back."""
        end = len(self.text) if self.stopped else len(self.text) - self._held()
        fresh = self.text[self._shown : end] if end > self._shown else ""
        self._shown = max(self._shown, end)
        return fresh

    def remaining(self) -> str:
        """Text not yet shown, when the completion is over."""
        fresh, self._shown = self.text[self._shown :], len(self.text)
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

    def _behind_begun(self, token_id: int, piece: str) -> str:
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
        if self._cut_at_word(before, piece) or self._cut_at_indent():
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

    def _cut_at_indent(self) -> bool:
        if self._rules.min_indent <= 0:
            return False
        while True:
            if self._line_start >= 0:
                line = self.text[self._line_start :]
                width = len(line) - len(line.lstrip(" \t"))
                if width < min(len(line), self._rules.min_indent):
                    self.text = self.text[: self._line_start + width]
                    self._end("limit")
                    return True
            newline = self.text.find("\n", max(self._line_start, 0))
            if newline < 0:
                return False
            self._line_start = newline + 1

    def _held(self) -> int:
        """Characters at the end that are the beginning of a stop string, or of a line that may be cut."""
        return max((watched.matched for watched in self._words), default=0)
