"""Building and growing stores on disk, out of sources and with a tokenizer."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.change import (
    ChangeReport,
    Inputs,
    Stopwatch,
    WorkFolder,
    change_store,
    check_folder,
    check_not_begun,
    nothing_to_index,
    publish,
    report_of,
)
from retrieve_spec.datastore.entry_filter import admitted_parts
from retrieve_spec.datastore.files import FileEntry, replace_file, sha256_of
from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.datastore.licences import allow_list
from retrieve_spec.datastore.manifest import (
    Manifest,
    SegmentEntry,
    config_of,
    read_manifest,
    tokenizer_name,
)
from retrieve_spec.datastore.remote import folder_of
from retrieve_spec.datastore.sources import Source, check_sources, file_shards, list_files
from retrieve_spec.datastore.stages import Cut, Done, Stages
from retrieve_spec.datastore.store import open_as_written
from retrieve_spec.errors import BuildError

SPAWN_WORK = 1 << 23
"""Bytes to read, or four times the tokens to sort, from which the start of other processes is worth its second."""


def build_datastore(
    path: str | os.PathLike[str],
    sources: Source | str | list[Source | str] | None = None,
    tokenizer: Any = None,
    *,
    config: StoreConfig | None = None,
    licence: str = "",
    max_tokens: int | None = None,
    workers: int | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    progress: bool = False,
    recipe: str = "",
) -> ChangeReport:
    """Build a new datastore.

    Parameters
    ----------
    path
        Folder to create.
    sources
        Files, folders, checkouts, or `Source` objects with options; not needed to resume.
    tokenizer
        Tokenizer of the model that will draft: an object, a tokenizer.json or a model folder; not needed to resume.
    config
        What to keep, and limits.
    licence
        Licence of the sources given as plain paths.
    max_tokens
        Stop before the document that would exceed this.
    workers
        Processes that read, encode and index; all CPUs by default. The store is the same for any number. Large builds
        start them, so a script calls this below ``if __name__ == "__main__":``.
    part
        ``(rank, count)``: read only one of `count` parts of the sources, numbered from 0. Many machines make a store
        each, which `merge_datastores` joins.
    resume
        Continue an interrupted build with the options it was begun with.
    progress
        Show bars on standard error.
    recipe
        Name of the recipe, for the record.

    Returns
    -------
    ChangeReport
        Counts, what was skipped and why, and seconds by stage.

    Raises
    ------
    BuildError
        When there is a store already, a source is missing, nothing can be indexed or the disk cannot be written.
    StoreIncompleteError
        When an interrupted build lies there and `resume` is not set.
    StoreLockedError
        When another process is writing there.
    """
    store = folder_of(path, "build")
    wished = as_sources(sources, licence) if not resume else ()
    rank, count = part or (0, 1)
    if not 0 <= rank < count:
        raise BuildError(f"a part from 0 to {count - 1} of {count}", f"{rank}", "Number the parts from 0.")

    def make_plan(work: WorkFolder, _: None) -> tuple[dict[str, Any], Inputs]:
        check_not_begun(store, work)
        settings = checked(config or StoreConfig(), tokenizer)
        plan, inputs = plan_of(work, wished, settings, max_tokens)
        plan |= {"recipe": recipe, "part": part, "tokenizer": write_tokenizer(store, tokenizer)}
        return plan, islice(inputs, rank, None, count)

    def apply(work: WorkFolder, _: None, plan: dict[str, Any]) -> ChangeReport:
        manifest = replace(first_manifest(store, plan["tokenizer"]), config=plan["config"])
        return grow(work, manifest, plan, workers=workers, progress=progress)

    if not resume:
        check_folder(store)
    return change_store(store, "build", make_plan, apply, resume=resume)


def add_documents(
    path: str | os.PathLike[str],
    sources: Source | str | list[Source | str] | None = None,
    *,
    config: StoreConfig | None = None,
    licence: str = "",
    max_tokens: int | None = None,
    workers: int | None = None,
    resume: bool = False,
    progress: bool = False,
) -> ChangeReport:
    """Add documents to a datastore as new segments; texts it already has are skipped as duplicates.

    Parameters and errors are those of `build_datastore`; the tokenizer is the store's own.
    """
    store = folder_of(path, "add")
    read_manifest(store)

    def make_plan(work: WorkFolder, manifest: Manifest) -> tuple[dict[str, Any], Inputs]:
        settings = checked(config or config_of(manifest), store / manifest.tokenizer_name)
        plan, inputs = plan_of(work, as_sources(sources, licence), settings, max_tokens)
        return plan | {"tokenizer": manifest.tokenizer_name}, inputs

    def apply(work: WorkFolder, manifest: Manifest, plan: dict[str, Any]) -> ChangeReport:
        return grow(work, manifest, plan, workers=workers, progress=progress, known=live_hashes(store))

    return change_store(store, "add", make_plan, apply, resume=resume)


def as_sources(sources: Source | str | list[Source | str] | None, licence: str) -> tuple[Source, ...]:
    """Normalise what the caller gave.

    Raises
    ------
    BuildError
        When nothing was given, an allowed licence is no SPDX identifier, or there is no such part of the filter.
    """
    given = [sources] if isinstance(sources, Source | str | os.PathLike) else list(sources or ())
    if not given:
        raise BuildError("at least one file or folder to build from", "none", "Give a source.")
    listed = (s if isinstance(s, Source) else Source(str(s), licence) for s in given)
    return tuple(replace(s, licences=allow_list(s.licences), admit=admitted_parts(s.admit)) for s in listed)


def checked(config: StoreConfig, tokenizer: Any) -> StoreConfig:
    """Settings of a change; what is wrong with those of a dense index is found out before any text is read.

    Errors are those of `retrieve_spec.datastore.dense_build.checked_settings`.
    """
    if config.dense is None:
        return config
    from retrieve_spec.datastore.dense_build import checked_settings  # imports torch, which others need not wait for

    return replace(config, dense=checked_settings(config.dense, tokenizer_fingerprint(tokenizer)))


def plan_of(
    work: WorkFolder, sources: tuple[Source, ...], config: StoreConfig, max_tokens: int | None
) -> tuple[dict[str, Any], Inputs]:
    """Plan of new documents, and the inputs."""
    check_sources(sources)
    plan = {"sources": [asdict(source) for source in sources], "config": asdict(config), "max_tokens": max_tokens}
    return plan, file_shards(work, list_files(sources, work.store))


def write_tokenizer(store: Path, tokenizer: Any) -> str:
    """Put a copy of a tokenizer into a store, without truncation and padding; returns its file name.

    Raises
    ------
    BuildError
        When none is given, or it is none of the `tokenizers` library.
    """
    if tokenizer is None:
        raise BuildError(
            "a tokenizer", "none", "Give --tokenizer: the model folder, or tokenizer.json, that drafts are for."
        )
    backend = Tokenizer.from_str(load_tokenizer(tokenizer).to_str())
    backend.no_truncation()
    backend.no_padding()
    content = backend.to_str().encode()
    name = tokenizer_name(FileEntry(len(content), hashlib.sha256(content).hexdigest()))
    replace_file(store / name, content)
    return name


def first_manifest(store: Path, name: str) -> Manifest:
    """Manifest of a store without segments, for the copy of the tokenizer that lies in it under a name."""
    tokenizer = store / name
    backend = load_tokenizer(tokenizer)
    vocabulary = max(backend.get_vocab().values(), default=0) + 1
    return Manifest(
        tokenizer_fingerprint(backend), FileEntry(tokenizer.stat().st_size, sha256_of(tokenizer)), vocabulary
    )


def live_hashes(store: Path) -> Iterator[str]:
    """Content hashes of the documents of a store that can be drafted from."""
    for segment in open_as_written(store).segments:
        yield from (digest for *_, digest in segment.documents.texts())


def grow(
    work: WorkFolder,
    manifest: Manifest,
    plan: dict[str, Any],
    *,
    workers: int | None,
    progress: bool,
    known: Iterable[str] = (),
    kept: tuple[SegmentEntry, ...] | None = None,
    made: Sequence[SegmentEntry] = (),
) -> ChangeReport:
    """Make the segments that a plan describes and publish them.

    Parameters
    ----------
    work, manifest, plan
        The change, and the manifest it starts from.
    workers, progress
        Processes at most (None: all CPUs), and whether to show bars.
    known
        Content hashes that count as duplicates.
    kept
        Segments that stay as they are; None for all of the manifest's.
    made
        Segments that lie in the work folder already, under numbers of their own.
    """
    watch = Stopwatch(progress)
    staying = (*(manifest.segments if kept is None else kept), *made)
    stages, entries, cut = make_segments(work, watch, workers, known)
    if not entries and not staying:
        work.end()
        raise nothing_to_index(cut.skipped, plan, stages.shards)
    dense: dict[str, Any] = {}
    if stages.config.dense is None and not staying:
        manifest = replace(manifest, dense=None)
    elif stages.config.dense is not None and entries:
        from retrieve_spec.datastore.dense_build import add_dense  # imports torch, which others need not wait for

        entries, record, dense = add_dense(work, manifest, entries, stages.config.dense, watch, fresh=not staying)
        manifest = replace(manifest, dense=record)
    report = report_of(plan["verb"], entries, len(entries) + len(staying), cut.skipped, watch.seconds, dense)
    return publish(work, manifest, staying[: len(staying) - len(made)], [*made, *entries], plan, report)


def make_segments(
    work: WorkFolder, watch: Stopwatch, workers: int | None, known: Iterable[str]
) -> tuple[Stages, list[SegmentEntry], Cut]:
    """Run the stages of a plan; returns them, the new segments and the cut."""
    workers = workers or os.cpu_count() or 1
    stages = Stages(work, workers)
    size = int(stages.plan.get("bytes", 0))
    with closing(Workers(stages, workers)) as pool:
        with watch.stage("reading", size or None, "B") as advance:

            def read(ranks: list[int]) -> None:
                for bytes_read, _, _ in pool.run("tokens", ranks, size):
                    advance(bytes_read)

            cut = stages.cut(known, read)
        with watch.stage("indexing", cut.tokens, "tok") as advance:
            ranks = [rank for rank in range(len(cut.segments)) if stages.needs_segment(rank)]
            for _, _, tokens in pool.run("segment", ranks, 4 * cut.tokens):
                advance(tokens)
    return stages, [stages.entry(rank) for rank in range(len(cut.segments))], cut


class Workers:
    """Runs ranks of stages in processes of this machine, which stay for the next stage; little work in this one.

    Parameters
    ----------
    stages
        The stages of the change.
    count
        Processes at most.
    """

    def __init__(self, stages: Stages, count: int) -> None:
        self._stages, self._count = stages, count
        self._executor: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """End the processes."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def run(self, stage: str, ranks: Sequence[int], size: int) -> Iterator[Done]:
        """Run some ranks of a stage, and tell what each did.

        Parameters
        ----------
        stage
            `"tokens"` or `"segment"`.
        ranks
            Which of its ranks.
        size
            How much work it is: bytes to read, or four times the tokens to sort.

        Raises
        ------
        BuildError
            When a worker died, as from a lack of memory.
        """
        if self._executor is None and (min(self._count, len(ranks)) < 2 or size < SPAWN_WORK):
            yield from (getattr(self._stages, stage)(rank) for rank in ranks)
            return
        if self._executor is None:
            context = multiprocessing.get_context("spawn")  # a fork would inherit locks of threads that it lacks
            self._executor = ProcessPoolExecutor(self._count, context, _follow_parent)
        store = self._stages.work.store.absolute()
        waiting = [self._executor.submit(_run_rank, store, stage, rank) for rank in ranks]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BrokenProcessPool as error:
            remedy = (
                "Where memory ran out, continue with --resume and fewer processes; "
                'a script that builds needs `if __name__ == "__main__":`.'
            )
            raise BuildError(f"to finish stage {stage!r}", f"a worker process ended: {error}", remedy) from error


def _run_rank(store: Path, stage: str, rank: int) -> Done:
    done: Done = getattr(Stages(WorkFolder(store)), stage)(rank)
    return done


def _follow_parent() -> None:
    """Let this worker end at Ctrl-C, and when the process that started it does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker"
    parent.join()
    os._exit(1)
