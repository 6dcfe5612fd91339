"""Trace files: recorded conversations, read as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import TraceError

Ids = NDArray[np.int32]


class Encoder(Protocol):
    """What replay needs of a tokenizer (`tokenizers.Tokenizer`)."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any:
        """Object with ``.ids``."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded conversation: the prompt, then segments in order; only generated ones are drafted.

    Rows of one group share text (a repository, a question asked again) and are kept on one side of a split.
    """

    task: str
    prompt: Ids
    segments: list[tuple[Ids, bool]]
    group: str = ""


def read_trace(path: str | Path, tokenizer: Encoder, limit: int | None = None) -> Iterator[TraceRow]:
    """Rows of a trace file, encoded: the prompt with special tokens, every later segment without.

    Parameters
    ----------
    path
        JSON Lines with ``prompt``, ``output`` and optionally ``more`` ([[context, generation], …]), ``task``,
        ``meta.loop`` (true: the row is left out), ``group`` (rows without one are groups of their own).
    tokenizer
        Encodes text.
    limit
        Rows read at most, in file order, left-out rows counted.

    Raises
    ------
    TraceError
        When a line is not JSON or lacks a field.
    """
    with open(path, encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and number > limit:
                return
            row = _parse(line, number, path)
            if (row.get("meta") or {}).get("loop"):
                continue
            segments = [(_ids(tokenizer, row["output"], False), True)]
            for context, generated in row.get("more") or []:
                segments += [(_ids(tokenizer, context, False), False), (_ids(tokenizer, generated, False), True)]
            group = row.get("group")
            prompt = _ids(tokenizer, row["prompt"], True)
            yield TraceRow(row.get("task") or "", prompt, segments, f"line {number}" if group is None else str(group))


def _parse(line: str, number: int, path: str | Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
        turns = [text for context, generated in row.get("more") or [] for text in (context, generated)]
        texts = [row["prompt"], row["output"], row.get("task") or "", *turns]
        "".join(texts).encode()  # fails for what is no string, or none that can be encoded
        if not isinstance(row.get("meta") or {}, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TraceError(
            "one JSON object per line with the strings 'prompt' and 'output' (and 'more' as pairs of strings)",
            f"line {number} of {path}: {line[:60].rstrip()!r}",
            "Write the log in that form (docs/benchmarks.md).",
        ) from None
    return row  # type: ignore[no-any-return]


def _ids(tokenizer: Encoder, text: str, special: bool) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=special).ids, np.int32)
