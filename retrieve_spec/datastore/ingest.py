"""Reading of listed files: the texts and records that they hold, filtered, as documents of token ids, in order."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.datastore.entry_filter import EntryFilter, Reason, decoded, is_utf16, refused
from retrieve_spec.datastore.files import IrregularFileError
from retrieve_spec.datastore.fingerprint import encode
from retrieve_spec.datastore.licences import LicenceRule, allow_list, own_licence
from retrieve_spec.datastore.remote import is_address, open_file
from retrieve_spec.datastore.segment import text_hash
from retrieve_spec.datastore.sources import STDIN, Source, SourceFile
from retrieve_spec.errors import BuildError

_PACKED = 1 << 12
"""Compressed bytes that are unpacked at once: they may become thirty thousand times as many."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text still to be read and encoded: `content` for a record, otherwise the file itself."""

    file: SourceFile
    path: str
    content: bytes | str | None = None
    skip: str = ""


def texts_of(files: Iterable[SourceFile], sources: tuple[Source, ...], limit: int) -> Iterator[Text]:
    """Go through files in order: one text per plain file, one per record of JSON Lines and Parquet files.

    Raises
    ------
    BuildError
        When a Parquet file is met and pyarrow is not installed.
    """
    for file in files:
        read = 0
        try:
            if file.skip or file.kind == "text":
                yield Text(file, file.path, skip=file.skip)
                continue
            records = _json_lines(file, limit) if file.kind == "jsonl" else _parquet(file, sources[file.source].field)
            for text in records:
                yield text
                read += 1
        except BuildError:  # a remote that cannot be reached any more, among others
            raise
        except _READ_ERRORS as error:
            yield Text(file, file.path, skip=Reason.DAMAGED if read else _reason(error))


class _Zstandard(io.RawIOBase):
    """Decompressed content of all frames of a file; `EOFError` where the last one is cut short.

    The library's own reader ends silently there, and behind the first frame.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._frame = raw, zstandard.ZstdDecompressor().decompressobj()
        self._packed, self._content = b"", memoryview(b"")
        self._within = False

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of a buffer; 0 at the end."""
        while not self._content:
            self._packed = self._packed or self._raw.read(_PACKED)
            if not self._packed:
                if self._within:
                    raise EOFError("a frame that is cut short")
                return 0
            self._content, self._within = memoryview(self._frame.decompress(self._packed)), True
            self._packed = b""
            if self._frame.eof:
                self._packed, self._within = self._frame.unused_data, False
                self._frame = zstandard.ZstdDecompressor().decompressobj()
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size


@contextmanager
def _opened(file: SourceFile) -> Iterator[Any]:
    with open_file(file.location, listed=True) as raw:
        if file.compression == "gz":
            yield gzip.GzipFile(fileobj=raw)
        elif file.compression == "zst":
            yield io.BufferedReader(_Zstandard(raw))
        else:
            yield raw


_READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib.error, zstandard.ZstdError)


def _reason(error: Exception) -> Reason:
    """Why a file is left out whose reading raised an error."""
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return Reason.LINK
    if isinstance(error, IrregularFileError | IsADirectoryError):
        return Reason.NOT_A_FILE
    return Reason.GONE if isinstance(error, FileNotFoundError) else Reason.UNREADABLE


def _json_lines(file: SourceFile, limit: int) -> Iterator[Text]:
    with _opened(file) as stream:
        if not file.end and is_utf16(stream.peek(2)):
            lines = io.TextIOWrapper(stream, "utf-16", newline="\n")
            yield from _records(file, limit, lambda most: lines.readline(most).encode())
            return
        if file.end and stream.seek(0, io.SEEK_END) < file.end:
            yield Text(file, file.path, skip=Reason.CHANGING)  # since it was cut into parts
            return
        if file.end:
            stream.seek(file.start)
        end = file.end or (0 if file.compression else file.size)  # what is written behind it meanwhile may never end
        yield from _records(file, limit, lambda most: stream.readline(most) if not end or stream.tell() < end else b"")


def _records(file: SourceFile, limit: int, readline: Callable[[int], bytes]) -> Iterator[Text]:
    """Records of a file of JSON Lines, whose lines are read up to so many bytes at once."""
    number = file.line
    while line := readline(limit + 1):
        number += 1
        name = f"{file.path}#{number}"
        if len(line) > limit:
            while line and not line.endswith(b"\n"):
                line = readline(limit)
            yield Text(file, name, skip=Reason.LARGE)
        elif line.strip():
            yield Text(file, name, line)


def _parquet(file: SourceFile, field: str) -> Iterator[Text]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise BuildError(
            f"to read {file.location}", "pyarrow is not installed", "Run: pip install 'retrieve-spec[parquet]'"
        ) from error
    column = field.partition(".")[0]
    try:
        with open_file(file.location, listed=True) as raw, pyarrow.parquet.ParquetFile(raw) as table:
            if column not in table.schema_arrow.names:
                yield Text(file, file.path, skip=f"no column {column!r}")
                return
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                for cell in batch.column(0):
                    number += 1
                    name = f"{file.path}#{number}"
                    try:
                        value = _field({column: cell.as_py()}, field)
                    except (ValueError, OverflowError) as error:  # not UTF-8, or a time that Python lacks
                        skip = Reason.ENCODING if isinstance(error, UnicodeDecodeError) else "no text"
                        yield Text(file, name, skip=skip)
                        continue
                    yield Text(file, name, value) if isinstance(value, str) else Text(file, name, skip="no text")
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error


def _field(record: Any, field: str) -> Any:
    for name in field.split("."):
        record = record.get(name) if isinstance(record, dict) else None
    return record


def content_of(text: Text, field: str, limit: int) -> tuple[str, int, str]:
    """Content of a record, of a compressed or a remote file, bytes read and reason to skip."""
    content = text.content
    if content is None:
        try:
            with _opened(text.file) as stream:
                content = stream.read(limit + 1)
        except BuildError:
            raise
        except _READ_ERRORS as error:
            return "", 0, _reason(error)
    elif isinstance(content, bytes):
        try:
            value = _field(json.loads(content), field)
        except (ValueError, RecursionError):
            return "", len(content), "no JSON"
        if not isinstance(value, str):
            return "", len(content), f"no field {field!r}"
        content = value
    size = len(content)
    if size > limit:
        return "", size, Reason.LARGE
    if isinstance(content, bytes):
        found = decoded(content)
        if isinstance(found, Reason):
            return "", size, found
        content = found
    try:
        content.encode()
    except UnicodeEncodeError:  # lone surrogates from JSON escapes
        return "", size, Reason.ENCODING
    return content, size, ""


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
    """What decides about the texts of one source: its filter, and the licences that it may be under.

    Attributes
    ----------
    place
        Where the source lies, whatever folder it was named in: what documents have as theirs.
    """

    def __init__(self, source: Source, limit: int) -> None:
        self.source, self.limit = source, limit
        anywhere = source.path == STDIN or is_address(source.path)
        self.place = source.path if anywhere else os.path.realpath(source.path)
        self._filters: dict[str, EntryFilter] = {}
        self.rule: LicenceRule | None = None
        if source.licences:
            root = Path(self.place)
            top = root if root.is_dir() else root.parent
            self.rule = LicenceRule([top], allow_list(source.licences), source.licence)

    def filter(self, location: str) -> EntryFilter:
        """The filter of a file of the source."""
        if is_address(location):
            root, named = self.source.path, location.rstrip("/") == self.source.path
        else:
            named = self.source.path == STDIN or not os.path.isdir(self.source.path)
            root = os.path.dirname(location) if named else self.place
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


def tokenise(
    files: Iterable[SourceFile], sources: tuple[Source, ...], tokenizer: Tokenizer, limit: int
) -> Iterator[Tokenised]:
    """Read and encode files, one result per text, in order.

    Parameters
    ----------
    files, sources, limit
        As for `texts_of`.
    tokenizer
        Backend.
    """

    @cache
    def gate(number: int) -> Gate:
        return Gate(sources[number], limit)

    for text in texts_of(files, sources, limit):
        rules = gate(text.file.source)
        content, size, skip = rules.read(text)
        licence, source = text.file.licence, rules.place
        if rules.rule is not None and not skip:
            is_file = source != STDIN and text.path == text.file.path and not is_address(text.file.location)
            # (rows are not under the licence of a collection)
            path = Path(text.file.location).resolve() if is_file else None
            licence = rules.rule.licence(path, own_licence(content))
            skip = refused(rules.rule, licence) or ""
        ids = encode(tokenizer, "" if skip else content)
        digest = "" if skip else text_hash(content)
        yield Tokenised(text.path, licence, source, digest, ids, size, skip or ("" if len(ids) else Reason.EMPTY))
