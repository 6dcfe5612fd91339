"""Reading of listed files as documents of token ids, in order, whatever the number of workers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.datastore.addresses import is_address
from retrieve_spec.datastore.documents import text_hash
from retrieve_spec.datastore.entry_filter import EntryFilter, Reason, refused
from retrieve_spec.datastore.fingerprint import PIECE_CHARS, encode
from retrieve_spec.datastore.licences import LicenceRule, allow_list, own_licence
from retrieve_spec.datastore.records import Text, content_of
from retrieve_spec.datastore.sources import STDIN, Source

_A = TypeVar("_A")
_B = TypeVar("_B")
GROUP = 32
"""Texts handed to a worker at once."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A document as token ids, or the reason (`skip`) why there are none.

    Attributes
    ----------
    path, licence, source, sha256
        As in `Document`.
    ids
        (n,) uint32 token ids.
    bytes
        Bytes read for it.
    skip
        ``""``, or why it was left out.
    """

    path: str
    licence: str
    source: str
    sha256: str
    ids: NDArray[np.uint32]
    bytes: int = 0
    skip: str = ""


class Gate:
    """What decides about the texts of one source: its filter, and the licences that it may be under."""

    def __init__(self, source: Source, limit: int) -> None:
        self.source, self.limit = source, limit
        self._filters: dict[str, EntryFilter] = {}
        self.rule: LicenceRule | None = None
        if source.licences:
            root = Path(source.path).resolve()
            top = root if root.is_dir() else root.parent
            self.rule = LicenceRule([top], allow_list(source.licences), source.licence)

    def filter(self, location: str) -> EntryFilter:
        """The filter of a file of the source."""
        if is_address(location):
            root, named = self.source.path, location.rstrip("/") == self.source.path
        else:
            named = self.source.path == STDIN or not os.path.isdir(self.source.path)
            root = os.path.dirname(location) if named else os.path.realpath(self.source.path)
        if root not in self._filters:
            self._filters[root] = self.source.entry_filter(Path(root), self.limit, named=named)
        return self._filters[root]

    def read(self, text: Text) -> tuple[str, int, str]:
        """Text, bytes read and reason to skip (one of the first and the last is empty)."""
        file = text.file
        if text.skip:
            return "", 0, text.skip
        entries = self.filter(file.location)
        if text.content is None and not file.compression and not is_address(file.location):
            found = entries.read(Path(file.location))
            return ("", 0, str(found)) if isinstance(found, Reason) else (found, file.size, "")
        content, size, skip = content_of(text, self.source.field, self.limit)
        if not skip:
            name = Path(file.location).stem if file.compression else os.path.basename(file.location)
            skip = entries.content("" if text.content is not None else name, content) or ""
        return content, size, str(skip)


def _tokenise(text: Text, gate: Gate, tokenizer: Tokenizer) -> Tokenised:
    content, size, skip = gate.read(text)
    licence, source = text.file.licence, gate.source.path
    if gate.rule is not None and not skip:
        is_file = source != STDIN and text.path == text.file.path and not is_address(text.file.location)
        # (rows are not under the licence of a collection)
        path = Path(text.file.location).resolve() if is_file else None
        licence = gate.rule.licence(path, own_licence(content))
        skip = refused(gate.rule, licence) or ""
    if skip:
        return Tokenised(text.path, licence, source, "", np.empty(0, np.uint32), size, skip)
    ids = encode(tokenizer, content)
    return Tokenised(text.path, licence, source, text_hash(content), ids, size, "" if len(ids) else Reason.EMPTY)


def tokenise(
    texts: Iterator[Text], sources: tuple[Source, ...], tokenizer: Tokenizer, workers: int, limit: int
) -> Iterator[Tokenised]:
    """Read and encode texts in threads; results come in the order of the texts.

    Parameters
    ----------
    texts, sources
        What `texts_of` goes through.
    tokenizer
        Backend; encodes outside the interpreter lock.
    workers
        Threads.
    limit
        Longest text in bytes.

    Yields
    ------
    Tokenised
        One per text.
    """

    @cache
    def gate(number: int) -> Gate:
        return Gate(sources[number], limit)

    def work(group: list[Text]) -> list[Tokenised]:
        return [_tokenise(text, gate(text.file.source), tokenizer) for text in group]

    yield from (result for group in ordered_map(work, _groups(texts), workers) for result in group)


def _groups(texts: Iterator[Text]) -> Iterator[list[Text]]:
    group: list[Text] = []
    weight = 0
    for text in texts:
        group.append(text)
        weight += text.file.size if text.content is None else len(text.content)
        if len(group) == GROUP or weight > PIECE_CHARS:
            yield group
            group, weight = [], 0
    if group:
        yield group


def ordered_map(function: Callable[[_A], _B], items: Iterator[_A], workers: int) -> Iterator[_B]:
    """Apply a function in threads with a bounded number in flight; results in order."""
    waiting: deque[Future[_B]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
