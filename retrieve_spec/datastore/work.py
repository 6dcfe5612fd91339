"""Work in progress: from a stream of tokenised documents to checkpoints that survive a kill, and to segments.

A change of a store works in ``STORE/work``: `plan.json` says what is being done, ``chunk-N.bin`` and ``chunk-N.json``
hold the token ids and documents read so far, ``segment-N`` the files of finished segments. Each JSON file is put in
place last and atomically, so a step is either done or not begun; a resumed change repeats what was not done. Segment
boundaries depend on the order and length of the documents alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.catalog import Document, rows_checksum
from retrieve_spec.datastore.files import FileEntry, replace_file, sync_folder, write_array
from retrieve_spec.datastore.ingest import Tokenised
from retrieve_spec.datastore.manifest import PLAN, SEGMENTS, WORK, SegmentEntry
from retrieve_spec.datastore.segment import write_segment


@dataclass(frozen=True, slots=True)
class Chunk:
    """One checkpoint of the reading.

    Attributes
    ----------
    consumed
        Results taken from the stream up to its end.
    complete
        Whether the stream ended here.
    tokens
        Entries of the chunk's array, separators included.
    documents
        ``[path, licence, source, sha256, tokens]`` of each document.
    skipped
        ``[path, source, reason]`` of what was left out.
    """

    consumed: int
    complete: bool
    tokens: int
    documents: list[list[Any]]
    skipped: list[list[str]]


class WorkFolder:
    """The folder of a change in progress.

    Parameters
    ----------
    store
        Folder of the store.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.path = store / WORK

    def begin(self, plan: dict[str, Any]) -> None:
        """Throw away any earlier work and record what is going to be done."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        replace_file(self.path / PLAN, json.dumps(plan).encode())

    def plan(self) -> dict[str, Any] | None:
        """What is being done, or None when no change was begun."""
        try:
            plan: dict[str, Any] = json.loads((self.path / PLAN).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return plan

    def end(self) -> None:
        """Remove the folder; the plan goes first, so that half a removal is no work to resume."""
        (self.path / PLAN).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def chunks(self) -> list[Chunk]:
        """Checkpoints so far, in order."""
        found: list[Chunk] = []
        while (path := self.path / f"chunk-{len(found):06d}.json").exists():
            found.append(Chunk(**json.loads(path.read_bytes())))
        return found

    def chunk_ids(self, number: int, chunk: Chunk) -> NDArray[np.uint32]:
        """Token ids of a chunk, separators as 0, mapped into memory."""
        if chunk.tokens == 0:
            return np.empty(0, np.uint32)
        return np.memmap(self.path / f"chunk-{number:06d}.bin", "<u4", "r", shape=(chunk.tokens,))

    def write_chunk(self, number: int, ids: list[NDArray[np.uint32]], chunk: Chunk) -> None:
        """Write a checkpoint: ids first, then the record that makes it count."""
        write_array(self.path / f"chunk-{number:06d}.bin", np.concatenate([np.empty(0, np.uint32), *ids]))
        replace_file(self.path / f"chunk-{number:06d}.json", json.dumps(asdict(chunk)).encode())


def read_into_chunks(
    work: WorkFolder,
    stream: Callable[[int], Iterator[Tokenised]],
    config: StoreConfig,
    *,
    known: Iterable[str] = (),
    max_tokens: int | None = None,
    tick: Callable[[Tokenised], object] = lambda _: None,
) -> list[Chunk]:
    """Read a stream of documents to its end, from where the last checkpoint left off.

    Parameters
    ----------
    work
        Folder of the change.
    stream
        Called with the number of results to leave out; yields the rest.
    config
        Checkpoint interval; a document longer than a segment is cut.
    known
        Content hashes that count as duplicates.
    max_tokens
        Reading stops before the document that would exceed this.
    tick
        Told of every result.

    Returns
    -------
    list of Chunk
        All checkpoints.
    """
    chunks = work.chunks()
    if chunks and chunks[-1].complete:
        return chunks
    seen = set(known) | {document[3] for chunk in chunks for document in chunk.documents}
    consumed = chunks[-1].consumed if chunks else 0
    total = sum(document[4] for chunk in chunks for document in chunk.documents)
    ids: list[NDArray[np.uint32]] = []
    held = 0
    documents: list[list[Any]] = []
    skipped: list[list[str]] = []

    def checkpoint(complete: bool) -> None:
        nonlocal ids, held, documents, skipped
        chunk = Chunk(consumed, complete, held, documents, skipped)
        work.write_chunk(len(chunks), ids, chunk)
        chunks.append(chunk)
        ids, held, documents, skipped = [], 0, [], []

    for result in stream(consumed):
        tick(result)
        reason = result.skip or ("duplicate" if result.sha256 in seen else "")
        if not reason and max_tokens is not None and total + len(result.ids) > max_tokens:
            break
        consumed += 1
        if reason:
            skipped.append([result.path, result.source, reason])
        else:
            seen.add(result.sha256)
            total += len(result.ids)
            for path, digest, part in _parts(result, config.segment_tokens - 1):
                ids += [part, np.zeros(1, np.uint32)]
                held += len(part) + 1
                documents.append([path, result.licence, result.source, digest, len(part)])
        if held >= config.checkpoint_tokens or len(skipped) >= 1 << 16:
            checkpoint(complete=False)
    checkpoint(complete=True)
    return chunks


def _parts(result: Tokenised, limit: int) -> Iterator[tuple[str, str, NDArray[np.uint32]]]:
    """Path, content hash and ids of a document, or of the parts of one that is longer than a segment."""
    if len(result.ids) <= limit:
        yield result.path, result.sha256, result.ids
        return
    for number, start in enumerate(range(0, len(result.ids), limit), 1):
        digest = result.sha256 if number == 1 else sha256(f"{result.sha256}#{number}".encode()).hexdigest()
        yield f"{result.path}#part{number}", digest, result.ids[start : start + limit]


@dataclass(frozen=True, slots=True)
class Cut:
    """A segment to build: its folder name, and the documents ``[first, end)`` of the stream that go into it."""

    name: str
    first: int
    end: int


def cut_segments(lengths: list[int], limit: int, next_number: int) -> list[Cut]:
    """Fill segments with documents in order, each up to `limit` entries, separators included."""
    cuts: list[Cut] = []
    first = 0
    held = 0
    for i, length in enumerate(lengths):
        if held + length + 1 > limit and i > first:
            cuts.append(Cut(f"{next_number + len(cuts):06d}", first, i))
            first, held = i, 0
        held += length + 1
    if len(lengths) > first:
        cuts.append(Cut(f"{next_number + len(cuts):06d}", first, len(lengths)))
    return cuts


def build_segments(
    work: WorkFolder,
    chunks: list[Chunk],
    next_number: int,
    config: StoreConfig,
    added_at: str,
    tick: Callable[[int, int], object] = lambda tokens, total: None,
) -> tuple[list[SegmentEntry], dict[str, list[Document]]]:
    """Index what was read, segment by segment, leaving out those that are done.

    Returns
    -------
    tuple
        Segments, and their documents by segment name. Folders lie in the work folder until `publish_segments`.
    """
    records = [document for chunk in chunks for document in chunk.documents]
    total = sum(record[4] for record in records)
    entries = []
    catalog = {}
    offset = 0  # of the segment's first entry in the concatenation of all chunks
    for cut in cut_segments([record[4] for record in records], config.segment_tokens, next_number):
        part = records[cut.first : cut.end]
        starts = np.cumsum([0, *(record[4] + 1 for record in part)], dtype=np.int64).astype(np.uint32)
        documents = [
            Document(cut.name, i, path, licence, source, digest, int(starts[i]), length, added_at)
            for i, (path, licence, source, digest, length) in enumerate(part)
        ]
        done = work.path / f"segment-{cut.name}.json"
        if not done.exists():
            ids = _slice(work, chunks, offset, int(starts[-1]))
            _build_one(work.path / f"segment-{cut.name}", done, ids, starts, config)
        files = {name: FileEntry(**entry) for name, entry in json.loads(done.read_bytes()).items()}
        tokens = int(starts[-1]) - len(part)
        entries.append(SegmentEntry(cut.name, len(part), tokens, (), rows_checksum(documents), files))
        catalog[cut.name] = documents
        offset += int(starts[-1])
        tick(tokens, total)
    return entries, catalog


def _build_one(
    folder: Path, done: Path, ids: NDArray[np.uint32], starts: NDArray[np.uint32], config: StoreConfig
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files = write_segment(folder, ids, starts, config)
    sync_folder(folder)
    replace_file(done, json.dumps({name: asdict(entry) for name, entry in files.items()}).encode())


def _slice(work: WorkFolder, chunks: list[Chunk], start: int, length: int) -> NDArray[np.uint32]:
    """Entries ``[start, start + length)`` of all chunks one after another."""
    out = np.empty(length, np.uint32)
    at = 0
    for number, chunk in enumerate(chunks):
        a, b = max(start, at), min(start + length, at + chunk.tokens)
        if a < b:
            out[a - start : b - start] = work.chunk_ids(number, chunk)[a - at : b - at]
        at += chunk.tokens
    return out


def publish_segments(work: WorkFolder, names: Iterable[str]) -> None:
    """Move finished segment folders to their place; done already for some when resuming."""
    target = work.store / SEGMENTS
    target.mkdir(exist_ok=True)
    for name in names:
        folder = work.path / f"segment-{name}"
        if folder.exists():
            os.rename(folder, target / name)
    sync_folder(target)


def drop_stale_segments(store: Path, keep: Iterable[str]) -> None:
    """Delete segment folders that no manifest lists: left by an interrupted change, or replaced."""
    folder = store / SEGMENTS
    kept = set(keep)
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            if entry.name not in kept:
                shutil.rmtree(entry, ignore_errors=True)
