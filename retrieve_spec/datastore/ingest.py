"""Reading: from listed files to documents as token ids, in order, whatever the number of workers."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.datastore.entry_filter import EntryFilter, Reason, refused
from retrieve_spec.datastore.licences import LicenceRule, allow_list, own_licence
from retrieve_spec.datastore.sources import FILTERED_BYTES, STDIN, Source, SourceFile
from retrieve_spec.errors import BuildError

_A = TypeVar("_A")
_B = TypeVar("_B")
GROUP = 32
"""Texts handed to a worker at once."""
PIECE_CHARS = 1 << 20
"""Longer texts are encoded in pieces, cut at line ends, so that memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text still to be read and encoded: `content` for a record, otherwise the file itself."""

    file: SourceFile
    path: str
    content: bytes | str | None = None
    skip: str = ""


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


def texts_of(files: Iterable[SourceFile], sources: tuple[Source, ...], limit: int) -> Iterator[Text]:
    """Go through files in order: one text per plain file, one per record of JSON Lines and Parquet files.

    Raises
    ------
    BuildError
        When a Parquet file is met and pyarrow is not installed.
    """
    for file in files:
        if file.skip or file.kind == "text":
            yield Text(file, file.path, skip=file.skip)
        elif file.kind == "jsonl":
            yield from _json_lines(file, limit)
        else:
            yield from _parquet(file, sources[file.source].field)


@contextmanager
def _opened(file: SourceFile) -> Iterator[IO[bytes]]:
    with open(file.location, "rb") as raw:
        if file.compression == "gz":
            yield gzip.GzipFile(fileobj=raw)  # type: ignore[misc]
        elif file.compression == "zst":
            yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))
        else:
            yield raw


_READ_ERRORS = (OSError, EOFError, zstandard.ZstdError)


def _json_lines(file: SourceFile, limit: int) -> Iterator[Text]:
    try:
        with _opened(file) as stream:
            number = file.line
            if file.start:
                stream.seek(file.start)
            while (not file.end or stream.tell() < file.end) and (line := stream.readline(limit + 1)):
                number += 1
                name = f"{file.path}#{number}"
                if len(line) > limit:
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(limit)
                    yield Text(file, name, skip="huge")
                elif line.strip():
                    yield Text(file, name, line)
    except _READ_ERRORS:
        yield Text(file, file.path, skip="unreadable")


def _parquet(file: SourceFile, field: str) -> Iterator[Text]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise BuildError(
            "pyarrow to read Parquet", f"{file.location} without it", "pip install 'retrieve-spec[parquet]'."
        ) from error
    column = field.partition(".")[0]
    try:
        with pyarrow.parquet.ParquetFile(file.location) as table:
            if column not in table.schema_arrow.names:
                yield Text(file, file.path, skip=f"no column {column!r}")
                return
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                for row in batch.to_pylist():
                    number += 1
                    value = _field(row, field)
                    name = f"{file.path}#{number}"
                    yield Text(file, name, value) if isinstance(value, str) else Text(file, name, skip="no text")
    except (OSError, pyarrow.ArrowException):
        yield Text(file, file.path, skip="unreadable")


def _field(record: Any, field: str) -> Any:
    for name in field.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _read(text: Text, source: Source, limit: int) -> tuple[str, int, str]:
    """Text, bytes read and reason to skip (one of the first and the last is empty)."""
    if text.skip:
        return "", 0, text.skip
    content = text.content
    if content is None and source.filtered:
        return _admitted(Path(text.file.location), Path(source.path))
    if content is None:
        try:
            with _opened(text.file) as stream:
                content = stream.read(limit + 1)
        except _READ_ERRORS:
            return "", 0, "unreadable"
    elif isinstance(content, bytes):
        try:
            value = _field(json.loads(content), source.field)
        except (ValueError, RecursionError):
            return "", len(content), "no JSON"
        if not isinstance(value, str):
            return "", len(content), f"no field {source.field!r}"
        content = value
    return _decode(content, limit)


def _admitted(path: Path, root: Path) -> tuple[str, int, str]:
    """Text of a file of a filtered folder, as `_read`."""
    found = EntryFilter([root], max_bytes=FILTERED_BYTES).read(path)
    if isinstance(found, Reason):
        return "", 0, str(found)
    return (found, len(found), "") if found.strip() else ("", 0, "empty")


def _decode(content: bytes | str, limit: int) -> tuple[str, int, str]:
    size = len(content)
    if size > limit:
        return "", size, "huge"
    if isinstance(content, bytes):
        if b"\0" in content:
            return "", size, "binary"
        try:
            content = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            return "", size, "undecodable"
    try:
        content.encode()
    except UnicodeEncodeError:  # lone surrogates from JSON escapes
        return "", size, "undecodable"
    return (content, size, "") if content.strip() else ("", size, "empty")


def encode(tokenizer: Tokenizer, text: str) -> NDArray[np.uint32]:
    """Encode a text without special tokens, (n,) uint32."""
    parts = []
    start = 0
    while start < len(text):
        end = start + PIECE_CHARS
        if end < len(text):
            end = text.find("\n", end, end + PIECE_CHARS) + 1 or end
        # A batch of one releases the interpreter lock and stays in its thread.
        encoded = tokenizer.encode_batch_fast([text[start:end]], add_special_tokens=False)[0]
        parts.append(np.array(encoded.ids, np.uint32))
        start = end
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def _tokenise(text: Text, source: Source, rule: LicenceRule | None, tokenizer: Tokenizer, limit: int) -> Tokenised:
    content, size, skip = _read(text, source, limit)
    licence = text.file.licence
    if rule is not None and not skip:
        is_file = source.path != STDIN and text.path == text.file.path  # rows are not under the licence of a collection
        path = Path(text.file.location).resolve() if is_file else None
        licence = rule.licence(path, own_licence(content))
        skip = refused(rule, licence) or ""
    if skip:
        return Tokenised(text.path, licence, source.path, "", np.empty(0, np.uint32), size, skip)
    ids = encode(tokenizer, content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Tokenised(text.path, licence, source.path, digest, ids, size, "" if len(ids) else "empty")


def _rule(source: Source) -> LicenceRule | None:
    """Which licences of a source are allowed, None for every one."""
    if not source.licences:
        return None
    root = Path(source.path).resolve()
    return LicenceRule([root if root.is_dir() else root.parent], allow_list(source.licences), source.licence)


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

    rules = [_rule(source) for source in sources]

    def work(group: list[Text]) -> list[Tokenised]:
        places = ((text, text.file.source) for text in group)
        return [_tokenise(text, sources[at], rules[at], tokenizer, limit) for text, at in places]

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
