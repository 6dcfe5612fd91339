"""Single tokens of the text: what the context source proposes where no longer context matches."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import unigram as kernels
from retrieve_spec.kernels.source_table import KIND_UNIGRAM
from retrieve_spec.sources.rows import Row, source_row

_VOCABULARY = 1 << 19
"""Tokens with higher ids are not listed."""
_SPACES = str.maketrans({"▁": " ", "Ġ": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r"})
"""Characters that stand for white space in vocabularies (SentencePiece; bytes as letters)."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_OTHER, _NEWLINE, _SPACE, _DIGIT, _LETTERS = 0, 1, 2, 3, 4
_WORD = {(True, True): 5, (True, False): 6, (False, True): 7, (False, False): 8}
"""Class of a token that begins with a letter, by a space before it and by upper or lower case."""
_OPEN, _CLOSE, _STOP, _COMMA, _SIGN, _LINE_END = 9, 10, 11, 12, 13, 14
_MARKS = {**dict.fromkeys(")]}>", _CLOSE), **dict.fromkeys(".!?", _STOP), **dict.fromkeys(",;:", _COMMA)}


def token_classes(tokenizer: Any) -> NDArray[np.uint8]:
    """Return the class of every token by its string: white space, beginning or rest of a word, digits, punctuation.

    Parameters
    ----------
    tokenizer
        Anything with ``get_vocab()`` (strings to ids), as tokenizers of both Hugging Face libraries have; of anything
        else, None too, no token is known.

    Returns
    -------
    (vocabulary,) uint8
        Below `retrieve_spec.kernels.unigram.CLASSES`.
    """
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    classes = np.zeros(min(max(vocabulary.values(), default=-1) + 1, _VOCABULARY), np.uint8)
    for string, i in vocabulary.items():
        if 0 <= i < len(classes):
            classes[i] = _class_of(string)
    return classes


def _class_of(string: str) -> int:
    text = string.translate(_SPACES)
    if _BYTE.fullmatch(text):
        text = chr(int(text[3:5], 16))
    bare = text.strip()
    if not bare:
        return _NEWLINE if "\n" in text else _SPACE if text else _OTHER
    if len(text) > 2 and text[0] == "<" and text[-1] == ">":  # special
        return _OTHER
    if not bare.isascii():
        return _LETTERS
    if bare[0].isdigit():
        return _DIGIT
    if bare[0].isalpha() or bare[0] == "_":
        return _WORD[text[0].isspace(), bare[0].isupper()]
    if "\n" in text:
        return _LINE_END
    return _OPEN if bare[-1] in "([{<\"'`" else _MARKS.get(bare[0], _SIGN)


class Unigrams:
    """Recent and frequent tokens of one text, ranked by rates that are learned over all texts.

    Parameters
    ----------
    rates, factors
        (RATES, 2) and (CLASSES + PLACES, 2 · CLASSES) float32 to rank by and to go on learning, as
        `retrieve_spec.kernels.unigram` says.
    classes
        (≤ vocabulary,) uint8 class of each token (`token_classes`); all others are of class 0.
    mute
        Never list anything.
    """

    def __init__(
        self, rates: NDArray[np.float32], factors: NDArray[np.float32], classes: NDArray[np.uint8], mute: bool = False
    ) -> None:
        self.rates, self.factors = rates, factors
        self.tokens: NDArray[np.int32] = np.zeros(kernels.LISTED, np.int32)
        self.shares: NDArray[np.float32] = np.zeros(kernels.LISTED, np.float32)
        self.meta: NDArray[np.int64] = np.zeros(kernels.LIST_META, np.int64)
        self._cells: NDArray[np.int32] = np.zeros(kernels.LISTED, np.int32)
        self._by_classes: NDArray[np.float32] = np.zeros((kernels.PLACES, kernels.LISTED), np.float32)
        self._versions: NDArray[np.int64] = np.zeros(kernels.PLACES, np.int64)
        size = 0 if mute else _VOCABULARY
        self._stats: NDArray[np.int32] = np.zeros((size, kernels.STATS), np.int32)  # pages are allocated on use
        self._stats[: len(classes), kernels.CLASS] = classes[:size]
        self._recent: NDArray[np.int32] = np.zeros(kernels.RECENT, np.int32)
        self._frequent: NDArray[np.int32] = np.zeros(kernels.FREQUENT, np.int32)

    def reset(self) -> None:
        """Begin another text."""
        self._stats[: self.meta[kernels.HIGHEST] + 1, : kernels.CLASS] = 0
        self.meta[: kernels.VERSION] = 0  # invalidates the shares of earlier lists

    def row(self, number: int) -> Row:
        """Row of the mixture's source table; its arrays are never replaced."""
        return source_row(
            KIND_UNIGRAM,
            number,
            "unigram",
            tokens=self.tokens,
            shares=self.shares,
            cells=self._cells,
            meta=self.meta,
            rates=self.rates,
            factors=self.factors,
            by_classes=self._by_classes,
            versions=self._versions,
            stats=self._stats,
            recent=self._recent,
            frequent=self._frequent,
            num_stats=len(self._stats),
        )
