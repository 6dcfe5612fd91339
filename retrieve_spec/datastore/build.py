"""Building and growing stores: from sources and a tokenizer to a store on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.catalog import Catalog
from retrieve_spec.datastore.change import (
    ChangeReport,
    begin_or_resume,
    existing_manifest,
    finished,
    nothing_to_index,
    publish,
    writer,
)
from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.datastore.fresh import check_folder, check_not_begun, config_of, first_manifest, write_tokenizer
from retrieve_spec.datastore.ingest import Tokenised, texts_of, tokenise
from retrieve_spec.datastore.manifest import CATALOG, Manifest, read_manifest
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.sources import STDIN, Source, SourceFile, list_files
from retrieve_spec.datastore.work import WorkFolder, build_segments, read_into_chunks
from retrieve_spec.errors import BuildError


def build_datastore(
    path: str | os.PathLike[str],
    sources: Source | str | list[Source | str] | None = None,
    tokenizer: Any = None,
    *,
    config: StoreConfig | None = None,
    licence: str = "",
    max_tokens: int | None = None,
    workers: int | None = None,
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
        Threads that read and encode; all CPUs by default. The store is the same for any number.
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
    store = Path(path)

    def make_plan() -> dict[str, Any]:
        check_not_begun(store, work)
        plan = _plan(store, as_sources(sources, licence), checked(config or StoreConfig(), tokenizer), max_tokens)
        return plan | {"recipe": recipe, "tokenizer": write_tokenizer(store, tokenizer)}

    if not resume:
        check_folder(store)
    with writer(store) as work:
        plan = begin_or_resume(work, existing_manifest(store), "build", resume, make_plan)
        if plan is None:
            return finished(work, "build")
        return _grow(work, first_manifest(store, plan["tokenizer"]), plan, workers, progress)


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
    store = Path(path)
    read_manifest(store)

    def make_plan() -> dict[str, Any]:
        settings = checked(config or config_of(manifest), manifest.fingerprint)
        return _plan(store, as_sources(sources, licence), settings, max_tokens)

    with writer(store) as work:
        manifest = read_manifest(store)
        plan = begin_or_resume(work, manifest, "add", resume, make_plan)
        return _grow(work, manifest, plan, workers, progress) if plan else finished(work, "add")


def as_sources(sources: Source | str | list[Source | str] | None, licence: str) -> tuple[Source, ...]:
    """Normalise what the caller gave.

    Raises
    ------
    BuildError
        When nothing was given.
    """
    given = [sources] if isinstance(sources, Source | str | os.PathLike) else list(sources or ())
    if not given:
        raise BuildError("at least one file or folder to build from", "none", "Give a source.")
    return tuple(s if isinstance(s, Source) else Source(str(s), licence) for s in given)


def checked(config: StoreConfig, tokenizer: Any) -> StoreConfig:
    """Settings of a change; what is wrong with those of a dense index is found out before any text is read.

    Errors are those of `retrieve_spec.datastore.dense_build.checked_settings`.
    """
    if config.dense is None:
        return config
    from retrieve_spec.datastore.dense_build import checked_settings  # imports torch, which others need not wait for

    return replace(config, dense=checked_settings(config.dense, tokenizer_fingerprint(tokenizer)))


def _plan(store: Path, sources: tuple[Source, ...], config: StoreConfig, max_tokens: int | None) -> dict[str, Any]:
    return {
        "sources": [asdict(source) for source in sources],
        "files": [asdict(file) for file in list_files(sources, store)],
        "config": asdict(config),
        "max_tokens": max_tokens,
    }


def _grow(
    work: WorkFolder, manifest: Manifest, plan: dict[str, Any], workers: int | None, progress: bool
) -> ChangeReport:
    """Read the files of a plan and add them as segments."""
    sources = tuple(
        Source(**{**s, "include": tuple(s["include"]), "exclude": tuple(s["exclude"])}) for s in plan["sources"]
    )
    files = [SourceFile(**file) for file in plan["files"]]
    config = StoreConfig(**plan["config"])
    backend = load_tokenizer(work.store / manifest.tokenizer_name)
    threads = workers or os.cpu_count() or 1

    def stream(consumed: int) -> Iterator[Tokenised]:
        if consumed and any(file.location == STDIN for file in files):
            raise BuildError("sources that can be read again", "standard input", "Start the build again.")
        texts = texts_of(files, sources, config.document_bytes)
        for _ in range(consumed):
            next(texts, None)
        return tokenise(texts, sources, backend, threads, config.document_bytes)

    known: set[str] = set()
    if (work.store / CATALOG).exists():
        with Catalog(work.store / CATALOG) as catalog:
            known = catalog.live_hashes(segment.name for segment in manifest.segments)
    size = sum(file.size for file in files if not file.skip)
    return grow(work, manifest, plan, stream, config, known=known, size=size or None, progress=progress)


def grow(
    work: WorkFolder,
    manifest: Manifest,
    plan: dict[str, Any],
    stream: Callable[[int], Iterator[Tokenised]],
    config: StoreConfig,
    *,
    known: set[str],
    size: int | None,
    progress: bool,
    replaces: bool = False,
) -> ChangeReport:
    """Read a stream of documents into new segments and publish them.

    Parameters
    ----------
    work, manifest, plan
        The change, and the manifest it starts from.
    stream
        Called with the number of results to leave out.
    config, known, size, progress
        Limits, hashes that count as duplicates, bytes to read if known, whether to show bars.
    replaces
        The new segments replace all old ones instead of joining them.
    """
    watch = Stopwatch(progress)
    read = 0
    with watch.stage("reading", size, "B") as bar:

        def tick(result: Tokenised) -> None:
            nonlocal read
            read += len(result.ids)
            bar.set_postfix_str(f"{read:,} tokens", refresh=False)
            bar.update(result.bytes)

        chunks = read_into_chunks(work, stream, config, known=known, max_tokens=plan.get("max_tokens"), tick=tick)
    skipped = tuple((path, source, reason) for chunk in chunks for path, source, reason in chunk.skipped)
    total = sum(document[4] for chunk in chunks for document in chunk.documents)
    if total == 0 and not manifest.segments:
        work.end()
        raise nothing_to_index(skipped, plan)
    with watch.stage("indexing", total, "tok") as bar:
        entries, documents = build_segments(
            work, chunks, manifest.next_segment, config, plan["at"], tick=lambda tokens, _: bar.update(tokens)
        )
    dense: dict[str, Any] = {}
    if config.dense is None and replaces:
        manifest = replace(manifest, dense=None)
    elif config.dense is not None and entries:
        from retrieve_spec.datastore.dense_build import add_dense  # imports torch, which others need not wait for

        fresh = replaces or not manifest.segments
        entries, record, dense = add_dense(work, manifest, entries, config.dense, watch, fresh=fresh)
        manifest = replace(manifest, dense=record)
    report = ChangeReport(
        plan["verb"],
        sum(entry.documents for entry in entries),
        sum(entry.tokens for entry in entries),
        len(entries) + (0 if replaces else len(manifest.segments)),
        skipped,
        watch.seconds,
        dense,
    )
    segments = (*(() if replaces else manifest.segments), *entries)
    return publish(work, manifest, segments, documents, plan, report)
