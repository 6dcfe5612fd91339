"""Open datastores: memory-mapped segments, n-gram tables, and the documents that text comes from."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.datastore.dense import DenseIndex
from retrieve_spec.datastore.files import check_content, map_array
from retrieve_spec.datastore.fingerprint import (
    fingerprint_of,
    is_fingerprint,
    load_tokenizer,
    pipeline_differences,
    tokenizer_fingerprint,
)
from retrieve_spec.datastore.indexes import ContextFilter, NgramTable, filter_contexts
from retrieve_spec.datastore.manifest import SEGMENTS, Manifest, SegmentEntry, read_manifest
from retrieve_spec.datastore.remote import local_folder
from retrieve_spec.datastore.segment import TABLE, Document, Segment, open_segment, tombstones_of
from retrieve_spec.errors import StoreCorruptError, TokenizerMismatchError
from retrieve_spec.kernels.source_table import ORIGIN_BITS
from retrieve_spec.processors import memory

log = logging.getLogger("retrieve_spec")

_CARRIED = {f"{name}.bin" for name in ("documents", *TABLE, "tokens", "vocabulary", "suffix_array")}


class Datastore:
    """An open datastore; later changes of its folder do not affect it.

    Attributes
    ----------
    path
        The folder.
    manifest
        The store's manifest.
    segments
        Its segments, in order; their counts add up.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        segments: tuple[Segment, ...],
        tokenizer: NDArray[np.uint8],
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.segments = segments
        self._tokenizer = tokenizer  # the mapped file: `retokenize` deletes it from the folder

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer the store was built with."""
        return self.manifest.fingerprint

    @property
    def ngrams(self) -> tuple[NgramTable, ...]:
        """N-gram tables of the segments that have one; their counts add up."""
        return tuple(segment.ngram for segment in self.segments if segment.ngram is not None)

    @cached_property
    def contexts(self) -> ContextFilter:
        """Filter that tells which small n-gram tables may hold a context; made on first use."""
        return filter_contexts([segment.ngram for segment in self.segments])

    @property
    def dense(self) -> list[tuple[int, DenseIndex]]:
        """Dense indexes with the numbers of their segments."""
        return [(i, segment.dense) for i, segment in enumerate(self.segments) if segment.dense is not None]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the store was built with, loaded from its copy in the store.

        Raises
        ------
        StoreCorruptError
            The copy is damaged.
        """
        try:
            return Tokenizer.from_str(self._tokenizer.tobytes().decode())
        except Exception as error:  # the library raises bare Exception
            place = self.path / self.manifest.tokenizer_name
            raise StoreCorruptError(f"a tokenizer in {place}", str(error)) from None

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that the store was built with a tokenizer (anything that `tokenizer_fingerprint` takes).

        For stores of early releases, whose fingerprints do not cover the whole pipeline, the copy is compared.

        Raises
        ------
        TokenizerMismatchError
            The tokenizers differ; the message names the parts that do.
        """
        fingerprint = tokenizer_fingerprint(tokenizer)
        if fingerprint == self.fingerprint:
            return
        built_with = fingerprint_of(self.tokenizer)
        if fingerprint == built_with:
            return
        got = f"{self.path}, built with tokenizer {built_with[7:19]}"
        if not is_fingerprint(tokenizer):
            parts = pipeline_differences(self.tokenizer, load_tokenizer(tokenizer))
            got += f", which differs in {', '.join(parts)}"
        raise TokenizerMismatchError(
            f"a store built with the model's tokenizer ({fingerprint[7:19]})",
            got,
            f"Convert it with `retrieve-spec retokenize {self.path} --tokenizer MODEL`, or build one for this model.",
        )

    def document_at(self, segment: int, position: int) -> Document:
        """Find the document that contains a token position.

        Parameters
        ----------
        segment
            Index into `segments`.
        position
            Position of the token in that segment.

        Raises
        ------
        StoreCorruptError
            No document contains it, or the document table is damaged.
        """
        part = self.segments[segment]
        if not 0 <= position < (end := int(part.document_starts[-1])):
            raise StoreCorruptError(f"positions below {end:,} in segment {part.name}", f"{position:,}")
        return part.documents[part.document_of(position)]

    def documents(self) -> Iterator[Document]:
        """Yield all documents that can be drafted from, in order.

        Raises
        ------
        StoreCorruptError
            A document table is damaged.
        """
        for segment in self.segments:
            yield from segment.documents.live()

    def check_ids(self, known: int) -> None:
        """Check that all token ids of the store's text are below a number.

        Fingerprints do not cover added tokens: a store of a chat variant may have tokens that the base model lacks.

        Raises
        ------
        TokenizerMismatchError
            There are other ids.
        """
        highest = max((int(segment.to_global.max(initial=0)) for segment in self.segments), default=0)
        if highest >= known:
            raise TokenizerMismatchError(
                f"a store of tokens below {known:,}, as many as the model embeds",
                f"token {highest:,} in {self.path}",
                f"Convert it with `retrieve-spec retokenize {self.path} --tokenizer MODEL`.",
            )

    def calibration_path(self, model_key: str) -> Path | None:
        """Return the file in the store's folder for the calibration of one model, None if the store is read-only."""
        folder = self.path / "calibration"
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", model_key).strip(".-")[:120] or "model"
        if not os.access(folder if folder.exists() else self.path, os.W_OK):
            return None
        folder.mkdir(exist_ok=True)
        return folder / f"{name}.npy"

    def __repr__(self) -> str:
        m = self.manifest
        return f"<Datastore {self.path}: {m.documents:,} documents, {m.tokens:,} tokens, {len(m.segments)} segments>"


def open_datastore(path: str | os.PathLike[str], *, tokenizer: Any = None) -> Datastore:
    """Open a datastore by mapping its arrays; takes milliseconds whatever its size.

    Parameters
    ----------
    path
        Folder of the store, or address of a remote (``hf://…``, ``s3://…``) that a store was pushed to.
    tokenizer
        The model's tokenizer (anything that `tokenizer_fingerprint` takes, including a fingerprint), or None to skip
        the comparison.

    Raises
    ------
    StoreNotFoundError, StoreIncompleteError, StoreVersionError
        There is no store, its build was interrupted, or it was written by another version.
    StoreCorruptError
        A file is missing or has the wrong size (`verify_datastore` checks every byte).
    StoreError
        A file may not be read.
    TokenizerMismatchError
        The store was built with another tokenizer.
    """
    store = _opened(local_folder(path), as_written=False)
    if tokenizer is not None:
        store.check_tokenizer(tokenizer)
    return store


def open_as_written(path: str | os.PathLike[str]) -> Datastore:
    """Open a store in order to change it: removed documents stay in its indexes.

    Hiding them would take a while if much was removed. Otherwise like `open_datastore`.
    """
    return _opened(Path(path), as_written=True)


def _opened(folder: Path, *, as_written: bool) -> Datastore:
    before = None
    while True:
        manifest = read_manifest(folder)
        try:
            return open_segments(folder, manifest, as_written=as_written)
        except StoreCorruptError:
            # A change may have deleted files since the manifest was read: then open the new state.
            if manifest == before:
                raise
            before = manifest


def open_segments(folder: Path, manifest: Manifest, *, as_written: bool) -> Datastore:
    """Open the segments of a manifest that may not be published yet."""
    segments = tuple(
        open_segment(
            folder / SEGMENTS / entry.name,
            entry,
            manifest.vocabulary,
            manifest.dense,
            tombstones_of(folder, entry),
            as_written=as_written,
        )
        for entry in manifest.segments
    )
    tokenizer = map_array(folder / manifest.tokenizer_name, replace(manifest.tokenizer, dtype="|u1"), ("|u1",))
    return Datastore(folder, manifest, segments, tokenizer)


def check_files(folder: Path, entry: SegmentEntry) -> None:
    """Compare the checksums of a segment's files, before a change derives new files from them.

    Parameters
    ----------
    folder, entry
        The store's folder, and the segment's entry.

    Raises
    ------
    StoreCorruptError
        A file is damaged.
    """
    for name, file in sorted(entry.files.items()):
        if name in _CARRIED:
            check_content(folder / SEGMENTS / entry.name / name, file)


def check_tokenizer(folder: Path, manifest: Manifest, tokenizer: Any) -> None:
    """Do as `Datastore.check_tokenizer` for a store that may be incomplete."""
    open_segments(folder, replace(manifest, segments=()), as_written=True).check_tokenizer(tokenizer)


SHARE = 0.25
"""Largest share of memory to read ahead; what does not fit is read on use."""
_STEP = 1 << 17


def read_ahead(stores: Sequence[Datastore]) -> None:
    """Let the system read the segments' files in the background, if it can.

    Parameters
    ----------
    stores
        Open stores. The smallest files are read first: n-gram tables and top tables are used most.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    most_bytes = SHARE * memory()
    files = sorted(
        (file.bytes, store.path / SEGMENTS / segment.name / name)
        for store in stores
        for segment in store.manifest.segments
        for name, file in segment.files.items()
    )
    asked = accumulate(size for size, _ in files)
    chosen = [path for (_, path), size in zip(files, asked, strict=True) if size <= most_bytes]
    threading.Thread(target=_request_reads, args=(chosen,), name="datastore-read-ahead", daemon=True).start()


def _request_reads(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            with path.open("rb") as file:
                for start in range(0, os.fstat(file.fileno()).st_size, _STEP):  # Linux reads no more per request
                    os.posix_fadvise(file.fileno(), start, _STEP, os.POSIX_FADV_WILLNEED)
        except OSError:  # the store was compacted or removed meanwhile; its maps stay valid, and this is only a hint
            continue


class OriginRun(NamedTuple):
    """Accepted draft tokens that a source read in one piece.

    Attributes
    ----------
    position, tokens
        Index of the first among the new tokens, and their number.
    origin
        Where the source read the first: `segment << ORIGIN_BITS | token position`.
    """

    position: int
    tokens: int
    origin: int

    def is_continued_by(self, position: int, origin: int) -> bool:
        """Whether a token with this position and origin is the next one of the run."""
        return self.position + self.tokens == position and self.origin + self.tokens == origin


@dataclass(frozen=True, slots=True)
class SourcedRun:
    """Accepted draft tokens that occur verbatim in one document of a store.

    Attributes
    ----------
    position, tokens
        Index of the first among the new tokens, and their number.
    store, path, licence
        Folder of the store, path of the document, and its licence (`""`: none stated).
    store_position
        Position of the first token in the store's segment.
    """

    position: int
    tokens: int
    store: str
    path: str
    licence: str
    store_position: int


def sourced_runs(runs: Iterable[OriginRun], datastores: Sequence[Datastore]) -> list[SourcedRun]:
    """Look up the documents of runs; runs from outside the stores are left out.

    Raises
    ------
    StoreCorruptError
        The document table of a store is damaged.
    """
    segments = [(store, index) for store in datastores for index in range(len(store.segments))]
    found = []
    for position, tokens, origin in runs:
        number, place = origin >> ORIGIN_BITS, origin & ((1 << ORIGIN_BITS) - 1)
        if 0 <= number < len(segments):
            store, segment = segments[number]
            document = store.document_at(segment, place)
            found.append(SourcedRun(position, tokens, str(store.path), document.path, document.licence, place))
    return found
