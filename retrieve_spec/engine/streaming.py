"""Streaming of text: token ids become visible text as soon as no later token can change it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.engine.report import GenerationReport


@dataclass(frozen=True, slots=True)
class Piece:
    """What became visible with one pass.

    Attributes
    ----------
    token_ids
        (t,) int32, the accepted tokens and the bonus token.
    text
        Their text; a character whose bytes are spread over tokens appears with the last of them. Empty without a
        tokenizer.
    logprobs, raw_logprobs
        (t,) float32 with `return_logprobs=True`: log-probabilities of the tokens under the distribution they were
        chosen by, and under that of the model's own logits; else None.
    """

    token_ids: NDArray[np.int32]
    text: str = ""
    logprobs: NDArray[np.float32] | None = None
    raw_logprobs: NDArray[np.float32] | None = None


class Stream(Iterator[Piece]):
    """The pieces of one generation, as `generate_stream` hands them out.

    Closing it, leaving it in a `with` statement, or losing it ends the generation.

    Parameters
    ----------
    pieces
        Makes them; ends its generation when it is closed.
    report
        Tells what the generation did so far, None before its first piece.
    """

    def __init__(self, pieces: Generator[Piece, None, None], report: Callable[[], GenerationReport | None]) -> None:
        self._pieces, self._report = pieces, report

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the generation."""
        self._pieces.close()

    @property
    def report(self) -> GenerationReport | None:
        """What this generation did so far, whatever else the model is doing; None before the first piece."""
        return self._report()


class TextDecoder:
    """Decodes a growing list of token ids piece by piece; the pieces joined are the decoded whole.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer.
    skip_special_tokens
        Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._begin = 0  # decoding starts here: far enough back for joining rules (leading spaces) to apply
        self._shown = 0  # tokens whose text has been shown

    def push(self, token_ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Add tokens; return the text that is certain by now."""
        self._ids.extend(int(token) for token in token_ids)
        return self._take(final=False)

    def flush(self) -> str:
        """Return what is left, incomplete characters included."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        """Text not shown yet; nothing while it ends inside a character, unless that is final."""
        before = self._decode(self._ids[self._begin : self._shown])
        whole = self._decode(self._ids[self._begin :])
        if not final and whole.endswith("\ufffd"):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return whole[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text


class StreamerFeed:
    """Feeds a `transformers` streamer as plain decoding does: prompts, a token of every row at a time, then the end.

    A row that has ended goes on with padding while others are under way.

    Parameters
    ----------
    streamer
        Object with `put` and `end`, or None.
    rows
        Texts that are decoded together.
    pad
        Token behind the end of a row.
    """

    def __init__(self, streamer: Any, rows: int = 1, pad: int = 0) -> None:
        self._streamer, self._pad = streamer, pad
        self._waiting: list[deque[int]] = [deque() for _ in range(rows)]
        self._over = [False] * rows

    def prompt(self, input_ids: torch.Tensor) -> None:
        """Show the prompts, (rows, L)."""
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())

    def put(self, row: int, token_ids: NDArray[np.int32] | None) -> None:
        """Take the next tokens of a row, None behind its last, and show what all rows have by now."""
        if token_ids is None:
            self._over[row] = True
        else:
            self._waiting[row].extend(token_ids.tolist())
        while any(self._waiting) and all(map(operator.or_, map(bool, self._waiting), self._over)):
            step = [waiting.popleft() if waiting else self._pad for waiting in self._waiting]
            if self._streamer is not None:
                self._streamer.put(torch.tensor(step))

    def end(self) -> None:
        """Tell the streamer that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()
