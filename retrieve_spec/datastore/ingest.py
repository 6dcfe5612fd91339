"""Ingest listed files: read texts and records, filter them, and encode them as documents of token ids."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.datastore.entry_filter import READ_ERRORS, EntryFilter, open_packed, reason_of
from retrieve_spec.datastore.files import open_listed
from retrieve_spec.datastore.fingerprint import encode
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.licences import LicenceRule, own_licence
from retrieve_spec.datastore.segment import Row, text_hash
from retrieve_spec.datastore.sources import Source, SourceFile
from retrieve_spec.errors import BuildError


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is still to be read and encoded: a whole file, or a record (of JSON Lines, its undecoded line)."""

    file: SourceFile
    path: str
    record: bytes | dict[str, Any] | None = None
    skip: str = ""


def texts_of(files: Iterable[SourceFile], limit: int) -> Iterator[Text]:
    """Yield the texts of files in order: one per plain file, one per record of JSON Lines and Parquet files.

    Raises
    ------
    BuildError
        There is a Parquet file, and pyarrow is not installed.
    """
    for file in files:
        try:
            if file.skip or file.kind == "text":
                yield Text(file, file.path, skip=file.skip)
            else:
                yield from _json_lines(file, limit) if file.kind == "jsonl" else _parquet(file)
        except BuildError:  # it is an OSError, too
            raise
        except READ_ERRORS as error:  # the records before the damage are kept
            yield Text(file, file.path, skip=reason_of(error))


def _json_lines(file: SourceFile, limit: int) -> Iterator[Text]:
    """Yield the records of a JSON Lines file, or of a part of one; no more than `limit` bytes of a line are read."""
    with open_packed(file.location, file.compression) as stream:
        stream.seek(file.start)
        end = file.end or (math.inf if file.compression else file.size)  # the rest of the line may never end
        number = file.line
        while stream.tell() < end and (line := stream.readline(limit + 1)):
            number += 1
            name = f"{file.path}#{number}"
            if len(line) > limit:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(limit)
                yield Text(file, name, skip=Reason.LARGE)
            elif line.strip():
                yield Text(file, name, line)


def _parquet(file: SourceFile) -> Iterator[Text]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise BuildError(
            f"to read {file.location}", "pyarrow is not installed", "Run: pip install 'retrieve-spec[parquet]'"
        ) from error
    column = file.source.field.partition(".")[0]
    try:
        with open_listed(file.location) as raw, pyarrow.parquet.ParquetFile(raw) as table:
            if column not in table.schema_arrow.names:
                yield Text(file, file.path, skip=f"no column {column!r}")
                return
            number = 0
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                for cell in batch.column(0):
                    number += 1
                    try:
                        value = cell.as_py()
                    except (ValueError, OverflowError):  # not UTF-8, or a time that Python lacks
                        value = None
                    yield Text(file, f"{file.path}#{number}", {column: value})
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error


def read_text(text: Text, entries: EntryFilter) -> tuple[str, str]:
    """Return the content of a text and the reason why it may not enter, one of which is empty."""
    file, content, field = text.file, text.record, text.file.source.field
    if text.skip:
        return "", text.skip
    if content is None:
        found = entries.read(Path(file.location), file.compression)
        return ("", str(found)) if isinstance(found, Reason) else (found, "")
    if isinstance(content, bytes):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError):
            return "", "no JSON"
    for name in field.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    if not isinstance(content, str):
        return "", f"no field {field!r}"
    if len(content) > entries.max_bytes:
        return "", Reason.LARGE
    try:
        content.encode()
    except UnicodeEncodeError:  # lone surrogates from JSON escapes
        return "", Reason.ENCODING
    skip = entries.content("", content)
    return ("", str(skip)) if skip else (content, "")


@dataclass(frozen=True, slots=True)
class Tokenised:
    """A document as token ids, or the reason why it was skipped.

    Attributes
    ----------
    row
        Its entry in the document table.
    ids
        (n,) uint32 token ids.
    skip
        Why it was skipped, or ``""``.
    """

    row: Row
    ids: NDArray[np.uint32]
    skip: str = ""


def tokenise(files: Iterable[SourceFile], tokenizer: Tokenizer, limit: int) -> Iterator[Tokenised]:
    """Read and encode files; yield one result per text, in order.

    Parameters
    ----------
    files, limit
        As for `texts_of`.
    tokenizer
        Backend.
    """

    @cache
    def known(source: Source) -> tuple[str, EntryFilter, LicenceRule | None]:
        """Cached per source: its resolved path, the filter and the licence rule of its files."""
        place = os.path.realpath(source.path)
        is_folder = os.path.isdir(place)
        top = Path(place) if is_folder else Path(place).parent
        return place, source.entry_filter(top, limit, named=not is_folder), source.licence_rule(top)

    for text in texts_of(files, limit):
        place, entries, rule = known(text.file.source)
        content, skip = read_text(text, entries)
        licence = text.file.source.licence
        if rule is not None and not skip:
            is_file = text.path == text.file.path  # records are not under the licence of their collection
            licence = rule.licence(Path(text.file.location).resolve() if is_file else None, own_licence(content))
            skip = rule.refuses(licence) or ""
        ids = encode(tokenizer, "" if skip else content)
        row = Row(text.path, licence, place, "" if skip else text_hash(content), len(ids))
        yield Tokenised(row, ids, skip or ("" if len(ids) else Reason.EMPTY))
