"""Building and growing stores: sources are read as shards of tokens, cut into segments, and indexed.

Reading a shard and indexing a segment are functions of their arguments that write one output each, so any number of
processes runs them, in any order, with the same bytes as the result. The cut between them is the one step that sees all
documents: it drops duplicates and says where segments begin, from the order and length of the documents alone.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.change import (
    ChangeReport,
    Stopwatch,
    WorkFolder,
    begin_change,
    check_folder,
    nothing_to_index,
    publish,
    writer,
)
from retrieve_spec.datastore.entry_filter import disabled_parts
from retrieve_spec.datastore.files import FileEntry, replace_file
from retrieve_spec.datastore.fingerprint import encode, load_tokenizer, tokenizer_fingerprint
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.ingest import Tokenised, tokenise
from retrieve_spec.datastore.licences import allow_list
from retrieve_spec.datastore.manifest import (
    SEGMENTS,
    Manifest,
    SegmentEntry,
    config_of,
    read_manifest,
)
from retrieve_spec.datastore.remote import folder_of
from retrieve_spec.datastore.segment import (
    Row,
    Segment,
    hidden_of,
    index_text,
    open_segment,
    tombstones_of,
    write_segment,
)
from retrieve_spec.datastore.sources import SHARD_BYTES, Recipe, Source, SourceFile, file_shards, list_files
from retrieve_spec.datastore.store import Datastore, check_files, open_as_written, open_datastore
from retrieve_spec.errors import (
    BuildError,
    StoreError,
    StoreIncompleteError,
    StoreNotFoundError,
    TokenizerMismatchError,
)
from retrieve_spec.kernels.compiled_code import compiles, log_compiling
from retrieve_spec.processors import processes

SPAWN_WORK = 1 << 23
"""Smallest job worth a second of starting worker processes, in bytes to read or four times the tokens to sort."""
SHARD_TOKENS = 1 << 21
"""Tokens of a segment read at once."""
_TOKEN_BYTES = 4
"""Approximate bytes of text per token."""
_INDEXING_BYTES = 25
"""Bytes of memory per token while a segment is indexed."""
_PIECE, _PIECES = 1 << 24, 8
"""When a text is divided only for speed: fewest entries per segment, and most segments."""
_SMALL_SHARE = 16
"""A segment is small if this many of its size fit into the largest allowed one."""
_SEPARATOR = np.zeros(1, np.uint32)
_T = TypeVar("_T")
_R = TypeVar("_R")


def build_datastore(
    path: str | os.PathLike[str],
    sources: Source | str | Sequence[Source | str],
    tokenizer: Any,
    *,
    config: StoreConfig | None = None,
    max_tokens: int | None = None,
    workers: int | None = None,
    part: tuple[int, int] | None = None,
    progress: bool = False,
    recipe: str = "",
) -> ChangeReport:
    """Build a new datastore; anything left by an interrupted build is deleted.

    Parameters
    ----------
    path
        Folder to create.
    sources
        Files, folders and git checkouts, or `Source` objects with options.
    tokenizer
        Tokenizer of the model that will draft: an object, a tokenizer.json or a model folder.
    config
        What to keep, and limits.
    max_tokens
        Stop before the document that would exceed this.
    workers
        Processes that read, encode and index; by default one per available processor, if memory allows. The
        store does not depend on the number. Large builds start processes, so scripts call this below
        ``if __name__ == "__main__":``.
    part
        ``(rank, count)``: read only part `rank` of `count`, counted from 0, so that several machines can each
        build a part. `merge_datastores` joins them.
    progress
        Show bars on standard error.
    recipe
        Name of the recipe, recorded in the manifest.

    Returns
    -------
    ChangeReport
        Counts, what was skipped and why, and seconds by stage.

    Raises
    ------
    BuildError
        A store exists already, a source is missing, there is nothing to index, or the disk cannot be written.
    StoreLockedError
        When another process is writing there.
    """
    store = folder_of(path, "build")
    wished = as_sources(sources)
    rank, count = part or (0, 1)
    if not 0 <= rank < count:
        raise BuildError(f"a part from 0 to {count - 1} of {count}", f"{rank}", "Number the parts from 0.")
    check_folder(store)
    with writer(store) as work:
        check_folder(store)  # another process may have built it meanwhile
        settings = checked(config or StoreConfig(), tokenizer)
        files = list(list_files(wished, store))
        manifest = first_manifest(store, tokenizer, settings)
        event = begin_change(work, "build", recipe=recipe, part=part, max_tokens=max_tokens, sources=wished)
        shards = list(islice(file_shards(files), rank, None, count))
        return grow(work, manifest, event, shards, settings, workers=workers, progress=progress)


def create_datastore(path: Path, tokenizer: Any) -> None:
    """Create a datastore without documents, to which documents can be added.

    Raises
    ------
    BuildError
        The folder is not empty, no tokenizer is given, or the disk cannot be written.
    """
    with writer(path) as work:
        check_folder(path)
        event = begin_change(work, "build")
        publish(work, first_manifest(path, tokenizer, StoreConfig()), (), (), event)


def add_documents(
    path: str | os.PathLike[str],
    sources: Source | str | Sequence[Source | str],
    *,
    config: StoreConfig | None = None,
    max_tokens: int | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> ChangeReport:
    """Add documents to a datastore as new segments; texts that it already has are skipped as duplicates.

    Parameters and errors are those of `build_datastore`; the tokenizer is the store's own.
    """
    with changing(path, "add") as (work, manifest):
        settings = checked(config or config_of(manifest), work.store / manifest.tokenizer_name)
        wished = as_sources(sources)
        files = list(list_files(wished, work.store))
        event = begin_change(work, "add", max_tokens=max_tokens, sources=wished)
        shards = list(file_shards(files))
        known = (document.sha256 for document in open_as_written(work.store).documents())
        return grow(work, manifest, event, shards, settings, workers=workers, progress=progress, known=known)


@contextmanager
def changing(path: str | os.PathLike[str], verb: str) -> Iterator[tuple[WorkFolder, Manifest]]:
    """Hold the write lock of an existing store; without a store, no lock file is created.

    Errors are those of `folder_of`, `read_manifest` and `writer`.
    """
    store = folder_of(path, verb)
    read_manifest(store)
    with writer(store) as work:
        yield work, read_manifest(store)


def open_or_build(
    path: Path,
    recipe: Recipe,
    tokenizer: Any,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[ChangeReport], object] = lambda report: None,
    progress: bool = False,
) -> Datastore:
    """Open a store, or build it if there is none that can be used.

    An incomplete, damaged or outdated store, or one for another tokenizer, is deleted: use a path where nothing else is
    kept.

    Parameters
    ----------
    path
        Folder of the store.
    recipe, tokenizer
        What to build it from.
    before, after
        Called before a build begins, and with its report.
    progress
        Show bars on standard error.

    Raises
    ------
    BuildError
        It cannot be built.
    StoreLockedError
        Another process is building it.
    """
    try:
        return open_datastore(path, tokenizer=tokenizer)
    except (StoreNotFoundError, StoreIncompleteError):
        pass
    except (StoreError, TokenizerMismatchError):
        shutil.rmtree(path, ignore_errors=True)
    before()
    after(build_datastore(path, recipe.sources, tokenizer, config=recipe.config, recipe=recipe.name, progress=progress))
    return open_datastore(path, tokenizer=tokenizer)


def as_sources(sources: Source | str | Sequence[Source | str]) -> tuple[Source, ...]:
    """Return sources as `Source` objects.

    Raises
    ------
    BuildError
        An allowed licence is no SPDX identifier, or there is no such part of the filter.
    """
    given = [sources] if isinstance(sources, Source | str | os.PathLike) else list(sources)
    listed = (s if isinstance(s, Source) else Source(str(s)) for s in given)
    return tuple(replace(s, licences=allow_list(s.licences), admit=disabled_parts(s.admit)) for s in listed)


def checked(config: StoreConfig, tokenizer: Any) -> StoreConfig:
    """Check the settings of a change before any text is read.

    Errors are those of `retrieve_spec.datastore.dense_build.checked_settings`.
    """
    if config.dense is None:
        return config
    from retrieve_spec.datastore.dense_build import checked_settings  # imports torch, which others need not wait for

    return replace(config, dense=checked_settings(config.dense, tokenizer_fingerprint(tokenizer)))


def first_manifest(store: Path, tokenizer: Any, config: StoreConfig) -> Manifest:
    """Write a copy of the tokenizer, without truncation and padding; return the manifest of a store without segments.

    Raises
    ------
    BuildError
        No tokenizer is given, or it does not come from the `tokenizers` library.
    """
    if tokenizer is None:
        raise BuildError(
            "a tokenizer", "none", "Give --tokenizer: the model folder, or tokenizer.json, that drafts are for."
        )
    backend = Tokenizer.from_str(load_tokenizer(tokenizer).to_str())
    backend.no_truncation()
    backend.no_padding()
    content = backend.to_str().encode()
    vocabulary = max(backend.get_vocab().values(), default=0) + 1
    copy = FileEntry(len(content), hashlib.sha256(content).hexdigest())
    manifest = Manifest(tokenizer_fingerprint(backend), copy, vocabulary, asdict(config))
    replace_file(store / manifest.tokenizer_name, content)
    return manifest


@dataclass(frozen=True, slots=True)
class TokenShard:
    """A shard of sources as encoded documents in a folder, and a list of what was skipped."""

    path: Path
    skipped: list[tuple[str, str, str]]

    def rows(self) -> list[Row]:
        """Return all documents, in order."""
        return [Row(*row) for row in json.loads(self.path.with_suffix(".json").read_bytes())]

    def take(self, numbers: NDArray[np.uint32]) -> tuple[list[Row], NDArray[np.uint32]]:
        """Return some documents, in order, and their token ids, each followed by an entry for its separator."""
        rows = self.rows()
        taken = np.isin(np.arange(len(rows)), numbers)
        ids = np.fromfile(self.path.with_suffix(".bin"), "<u4")
        return [rows[number] for number in numbers.tolist()], ids[np.repeat(taken, [row.tokens + 1 for row in rows])]


@dataclass(frozen=True, slots=True)
class SegmentShard:
    """Documents of a segment that is to be rewritten.

    Attributes
    ----------
    store, entry, vocabulary
        The store, the segment's entry, and the size of its tokenizer's vocabulary.
    first, end, size
        Documents `[first, end)`, and the bytes of their token ids.
    tokenizer
        Path of the tokenizer they were encoded with, if they are converted to another one.
    """

    store: Path
    entry: SegmentEntry
    vocabulary: int
    first: int
    end: int
    size: int
    tokenizer: Path | None

    def tokenised(self, tokenizer: Tokenizer) -> Iterator[Tokenised]:
        """Yield the documents that are not removed; with a tokenizer, encode them again."""
        segment = open_segment(self.store / SEGMENTS / self.entry.name, self.entry, self.vocabulary)
        hidden = {*hidden_of(tombstones_of(self.store, self.entry), len(segment.documents), self.entry.name)}
        old = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        for number in range(self.first, self.end):
            if number in hidden:
                continue
            document, ids = segment.documents[number], segment.text_ids(number)
            if old is not None:
                ids = encode(tokenizer, old.decode(ids.tolist(), skip_special_tokens=False))
            row = Row(document.path, document.licence, document.source, document.sha256, len(ids))
            yield Tokenised(row, ids, "" if len(ids) else Reason.EMPTY)


Shard = list[SourceFile] | SegmentShard


def segment_shards(store: Path, manifest: Manifest, *, convert: bool = False) -> Iterator[SegmentShard]:
    """Divide segments into shards; if they are converted, their documents are encoded again."""
    tokenizer = store / manifest.tokenizer_name if convert else None
    for entry in manifest.segments:
        check_files(store, entry)  # before its content gets new checksums
        segment = open_segment(store / SEGMENTS / entry.name, entry, manifest.vocabulary)
        check_text(segment, store)
        starts = segment.document_starts.tolist()
        first = 0
        for end in range(1, len(starts)):
            if end == len(starts) - 1 or starts[end + 1] - starts[first] > SHARD_TOKENS:
                size = 4 * (starts[end] - starts[first])
                yield SegmentShard(store, entry, manifest.vocabulary, first, end, size, tokenizer)
                first = end


def check_text(segment: Segment, store: Path, remedy: str = "Build it again from sources.") -> None:
    """Raise an error if a segment does not keep its text.

    Raises
    ------
    BuildError
        It keeps n-grams only.
    """
    if not len(segment.tokens):
        raise BuildError("a store that keeps its text", f"{store}, which keeps n-grams only", remedy)


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that worker processes need to know of a change."""

    work: Path
    tokenizer: Path
    config: StoreConfig
    at: str


def read_shard(job: _Job, given: tuple[int, Shard]) -> TokenShard:
    """Read and encode a numbered shard."""
    number, shard = given
    tokenizer = _kept_tokenizer(job.tokenizer)
    results = (
        shard.tokenised(tokenizer)
        if isinstance(shard, SegmentShard)
        else tokenise(shard, tokenizer, job.config.document_bytes)
    )
    found = TokenShard(job.work / f"shard-{number:06d}", [])
    rows: list[tuple[Any, ...]] = []
    with found.path.with_suffix(".bin").open("wb") as file:
        for result in results:
            if result.skip:
                found.skipped.append((result.row.path, result.row.source, str(result.skip)))
                continue
            file.write(np.concatenate([result.ids, _SEPARATOR]).astype("<u4", copy=False).data)
            rows.append(astuple(result.row))
    found.path.with_suffix(".json").write_text(json.dumps(rows))
    return found


@lru_cache(maxsize=1)
def _kept_tokenizer(path: Path) -> Tokenizer:
    """Load a store's tokenizer, and cache it: loading a large one takes longer than a small change."""
    return load_tokenizer(path)


@dataclass(slots=True)
class SegmentCut:
    """Contents of one segment: how many tokens and documents, and from which shards, by number."""

    tokens: int
    documents: int
    pieces: list[tuple[TokenShard, NDArray[np.uint32]]]


def small_size(limit: int) -> int:
    """Return how many entries a segment that counts as small has at most, if none may have more than `limit`.

    Segments that a text was divided into for speed are larger: joined, they would be divided again.
    """
    return min(limit, _PIECES * _PIECE) // _SMALL_SHARE


def _segment_size(total: int, limit: int) -> float:
    """Return the entries per segment when `total` entries are divided into segments of at most `limit`."""
    shared = 1 << (min(_PIECES, max(1, total // _PIECE)).bit_length() - 1)
    return total / max(shared, -(-total // limit))


class Choice:
    """Chooses documents from shards, in order: each text once, up to a limit of tokens.

    It is the only step that sees all documents, and it holds their hashes.
    """

    def __init__(self, known: Iterable[str], most: int | None) -> None:
        self.most, self.full = most, False
        self.skipped: list[tuple[str, str, str]] = []
        self._seen = {bytes.fromhex(digest) for digest in known}
        self._total = 0
        self._chosen: list[tuple[TokenShard, NDArray[np.uint32], NDArray[np.uint32]]] = []

    def take(self, shard: TokenShard) -> None:
        """Choose from the next shard."""
        numbers, lengths = [], []
        for number, row in enumerate(() if self.full else shard.rows()):
            if (key := bytes.fromhex(row.sha256)) in self._seen:
                self.skipped.append((row.path, row.source, "duplicate"))
                continue
            if self.most is not None and self._total + row.tokens > self.most:
                self.full = True
                break
            self._seen.add(key)
            self._total += row.tokens
            numbers.append(number)
            lengths.append(row.tokens)
        self._chosen.append((shard, np.array(numbers, np.uint32), np.array(lengths, np.uint32)))

    def cut(self, limit: int) -> list[SegmentCut]:
        """Divide the chosen documents into segments of similar size, at most `limit` entries each, separators included.

        A longer document is a segment by itself. There are as few segments as possible, or more so that cores can share
        the work: a power of two up to `_PIECES`, if each gets at least `_PIECE` entries.
        """
        size = _segment_size(
            sum(int(lengths.sum(dtype=np.int64)) + len(lengths) for _, _, lengths in self._chosen), limit
        )
        segments: list[SegmentCut] = []
        at = 0
        for shard, numbers, lengths in self._chosen:
            places = np.empty(len(numbers), np.int64)
            for i, length in enumerate(lengths.tolist()):
                last = segments[-1] if segments else None
                full = last is not None and last.tokens + last.documents + length + 1 > limit
                if last is None or full or at + (length + 1) / 2 > size * len(segments):
                    last = SegmentCut(0, 0, [])
                    segments.append(last)
                places[i] = len(segments) - 1
                at += length + 1
                last.tokens += length
                last.documents += 1
            for place in np.unique(places).tolist():
                segments[place].pieces.append((shard, numbers[places == place]))
        return segments


def index_segment(job: _Job, given: tuple[int, SegmentCut]) -> SegmentEntry:
    """Index a numbered segment of a cut into the work folder; return its manifest entry."""
    number, part = given
    rows: list[Row] = []
    ids = np.empty(part.tokens + part.documents, np.uint32)
    at = 0
    for shard, numbers in part.pieces:
        listed, found = shard.take(numbers)
        rows += listed
        ids[at : at + len(found)] = found
        at += len(found)
    folder = job.work / f"segment-{number:06d}"
    folder.mkdir()
    handed = [ids]
    del ids
    files, origins = write_segment(folder, handed.pop(), rows, job.config)
    return SegmentEntry(f"{number:06d}", len(rows), part.tokens, job.at, origins, files)


def rewrite(
    work: WorkFolder,
    manifest: Manifest,
    verb: str,
    segments: Sequence[SegmentEntry],
    *,
    workers: int | None,
    progress: bool,
) -> ChangeReport:
    """Rewrite segments of a store into as few as possible, without removed documents."""
    config = checked(config_of(manifest), work.store / manifest.tokenizer_name)
    event = begin_change(work, verb)
    kept = tuple(entry for entry in manifest.segments if entry not in segments)
    shards = list(segment_shards(work.store, replace(manifest, segments=tuple(segments))))
    return grow(work, manifest, event, shards, config, workers=workers, progress=progress, kept=kept)


def grow(
    work: WorkFolder,
    manifest: Manifest,
    event: dict[str, Any],
    shards: Sequence[Shard],
    config: StoreConfig,
    *,
    workers: int | None,
    progress: bool,
    known: Iterable[str] = (),
    kept: tuple[SegmentEntry, ...] | None = None,
) -> ChangeReport:
    """Index shards as new segments, and publish them.

    Parameters
    ----------
    work, manifest, event
        The change's folder, the manifest it starts from, and its history entry.
    shards
        Shards to read.
    config
        What to keep, and limits.
    workers, progress
        Most processes (None: as many as memory allows), and whether to show progress bars.
    known
        Content hashes of documents to skip as duplicates.
    kept
        Segments that stay unchanged; None for all of the manifest's.
    """
    watch = Stopwatch(progress)
    staying = manifest.segments if kept is None else kept
    choice = Choice(known, event.get("max_tokens"))
    job = _Job(work.path, work.store / manifest.tokenizer_name, config, event["at"])
    size = sum(map(_bytes, shards))
    segment_bytes = int(_INDEXING_BYTES * _segment_size(max(size // _TOKEN_BYTES, 1), config.segment_tokens))
    with closing(Workers(workers or processes(segment_bytes))) as pool:
        with watch.stage("reading", size or None, "B") as advance:
            for done in _read(pool, job, shards, choice):
                advance(done)
        cut = choice.cut(config.segment_tokens)
        tokens = sum(part.tokens for part in cut)
        entries: list[SegmentEntry] = []
        if cut:
            _compile_indexing(config)
        with watch.stage("indexing", tokens, "tok") as advance:
            for entry in pool.run(partial(index_segment, job), list(enumerate(cut)), _TOKEN_BYTES * tokens):
                advance(entry.tokens)
                entries.append(entry)
    if not entries and not staying:
        work.end()
        raise nothing_to_index(choice.skipped, event)
    dense: dict[str, int] = {}
    if config.dense is None and not staying:
        manifest = replace(manifest, dense=None)
    elif config.dense is not None and entries:
        from retrieve_spec.datastore.dense_build import add_dense  # imports torch, which others need not wait for

        entries, record, dense = add_dense(work, manifest, entries, config.dense, watch, fresh=not staying)
        manifest = replace(manifest, dense=record)
    return publish(work, manifest, staying, entries, event, skipped=choice.skipped, seconds=watch.seconds, dense=dense)


@log_compiling()
@compiles
def _compile_indexing(config: StoreConfig) -> None:
    """Compile the kernels once, before every worker process would."""
    index_text(np.array([1, 2, 1, 0], np.uint16), np.arange(3, dtype=np.uint32), config)


def _bytes(shard: Shard) -> int:
    """Return the bytes that a shard reads."""
    if isinstance(shard, SegmentShard):
        return shard.size
    return sum(file.size for file in shard if not file.skip)


def _read(pool: Workers, job: _Job, shards: Sequence[Shard], choice: Choice) -> Iterator[int]:
    """Read shards and choose from their documents; with a limit of tokens, stop soon after it is reached.

    Yields the bytes of each shard.
    """
    step = len(shards)
    if choice.most is not None:
        step = max(1, min(4 * pool.count, _TOKEN_BYTES * choice.most // SHARD_BYTES))
    for first in range(0, len(shards), step or 1):
        if choice.full:
            return
        group = shards[first : first + step]
        done = pool.run(partial(read_shard, job), list(enumerate(group, first)), sum(map(_bytes, group)))
        for shard, read in zip(group, done, strict=True):
            choice.take(read)
            choice.skipped += read.skipped
            yield _bytes(shard)


class Workers:
    """Runs functions in worker processes, which are reused; small jobs run in this process.

    Parameters
    ----------
    count
        Most processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """Stop the processes."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, function: Callable[[_T], _R], given: Sequence[_T], size: int) -> Iterator[_R]:
        """Apply a function to arguments and yield the results in order.

        Parameters
        ----------
        function, given
            The function, and the arguments it is called with, one at a time.
        size
            Amount of work: bytes to read, or four times the tokens to sort.

        Raises
        ------
        BuildError
            A worker died, for example because memory ran out.
        """
        if self._executor is None and (min(self.count, len(given)) < 2 or size < SPAWN_WORK):
            yield from map(function, given)
            return
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # a fork inherits locks of threads, but not the threads
            self._executor = ProcessPoolExecutor(self.count, context, _follow_parent)
        try:
            yield from self._executor.map(function, given)
        except BrokenProcessPool as error:
            remedy = (
                "Where memory ran out, run it again with fewer processes; "
                'a script that builds needs `if __name__ == "__main__":`.'
            )
            raise BuildError("to finish the change", f"a worker process ended: {error}", remedy) from error


def _follow_parent() -> None:
    """End this worker at Ctrl-C and when its parent process ends, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker"
    parent.join()
    os._exit(1)
