"""Records: the texts of listed files, one of a plain file, one of each row of JSON Lines and Parquet files."""

from __future__ import annotations

import errno
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from retrieve_spec.datastore.addresses import IrregularFileError, open_file
from retrieve_spec.datastore.entry_filter import Reason, decoded, is_utf16
from retrieve_spec.datastore.sources import Source, SourceFile
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
            for text in _texts_in(file, sources[file.source].field, limit):
                yield text
                read += 1
        except BuildError:  # a remote that cannot be reached any more, among others
            raise
        except _READ_ERRORS as error:
            yield Text(file, file.path, skip=Reason.DAMAGED if read else _reason(error))


def _texts_in(file: SourceFile, field: str, limit: int) -> Iterator[Text]:
    if file.skip or file.kind == "text":
        yield Text(file, file.path, skip=file.skip)
    elif file.kind == "jsonl":
        yield from _json_lines(file, limit)
    else:
        yield from _parquet(file, field)


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
    return _decode(content, limit)


def _decode(content: bytes | str, limit: int) -> tuple[str, int, str]:
    size = len(content)
    if size > limit:
        return "", size, Reason.LARGE
    if isinstance(content, bytes):
        content = decoded(content)
        if isinstance(content, Reason):
            return "", size, content
    try:
        content.encode()
    except UnicodeEncodeError:  # lone surrogates from JSON escapes
        return "", size, Reason.ENCODING
    return content, size, ""
