"""Building and growing stores on disk, out of sources and with a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import tokenised
from retrieve_spec.datastore.addresses import is_address
from retrieve_spec.datastore.change import (
    ChangeReport,
    Inputs,
    begin_or_resume,
    existing_manifest,
    finished,
    nothing_to_index,
    publish,
    report_of,
    writer,
)
from retrieve_spec.datastore.cut import Cut
from retrieve_spec.datastore.entry_filter import admitted_parts
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.datastore.fresh import check_folder, check_not_begun, config_of, first_manifest, write_tokenizer
from retrieve_spec.datastore.licences import allow_list
from retrieve_spec.datastore.manifest import Manifest, SegmentEntry, read_manifest
from retrieve_spec.datastore.pool import Pool, Runner
from retrieve_spec.datastore.progress import Bar, Stopwatch
from retrieve_spec.datastore.shards import file_shards
from retrieve_spec.datastore.sources import Source, SourceFile, check_sources, list_files
from retrieve_spec.datastore.stages import Done, Stages
from retrieve_spec.datastore.store import open_as_written
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError

if TYPE_CHECKING:
    from retrieve_spec.datastore.exchange import Exchange


def build_datastore(
    path: str | os.PathLike[str],
    sources: Source | str | list[Source | str] | None = None,
    tokenizer: Any = None,
    *,
    config: StoreConfig | None = None,
    licence: str = "",
    max_tokens: int | None = None,
    workers: int | None = None,
    cluster: str = "",
    resume: bool = False,
    progress: bool = False,
    recipe: str = "",
) -> ChangeReport:
    """Build a new datastore.

    Parameters
    ----------
    path
        Folder to create, or an address that fsspec reaches (``s3://…``), for a build on a `cluster` whose machines
        share no folder: files travel through there.
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
        Processes that read, encode and index; all CPUs by default. The store is the same for any number.
    cluster
        Where the stages run instead: ``local[:WORKERS]``, ``ray[:ADDRESS]`` or ``slurm:PARTITION`` (all
        machines see the store and the sources under the same paths). The store is the same as well.
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
    wished = as_sources(sources, licence) if not resume else ()
    runner_of(cluster, 1)  # wrong ones are found out before anything is begun
    if is_address(path):
        from retrieve_spec.datastore.remote_change import build_remote

        settings = checked(config or StoreConfig(), tokenizer)
        return build_remote(
            str(path), wished, tokenizer, settings, cluster, max_tokens, resume=resume, progress=progress, recipe=recipe
        )

    def make_plan() -> tuple[dict[str, Any], Inputs]:
        check_not_begun(store, work)
        return first_plan(work, wished, tokenizer, checked(config or StoreConfig(), tokenizer), max_tokens, recipe)

    if not resume:
        check_folder(store)
    with writer(store) as work:
        plan = begin_or_resume(work, existing_manifest(store), "build", resume, make_plan)
        if plan is None:
            return finished(work, "build")
        manifest = replace(first_manifest(store, plan["tokenizer"]), config=plan["config"])
        return grow(work, manifest, plan, workers=workers, progress=progress, cluster=cluster)


def add_documents(
    path: str | os.PathLike[str],
    sources: Source | str | list[Source | str] | None = None,
    *,
    config: StoreConfig | None = None,
    licence: str = "",
    max_tokens: int | None = None,
    workers: int | None = None,
    cluster: str = "",
    resume: bool = False,
    progress: bool = False,
) -> ChangeReport:
    """Add documents to a datastore as new segments; texts it already has are skipped as duplicates.

    Parameters and errors are those of `build_datastore`; the tokenizer is the store's own. A store at an address needs
    no cluster: new segments are made here otherwise, and sent there (`retrieve_spec.datastore.remote_change`).
    """
    store = Path(path)
    runner_of(cluster, 1)
    if is_address(path):
        from retrieve_spec.datastore.remote_change import add_remote

        wished = as_sources(sources, licence) if not resume else ()
        return add_remote(
            str(path), wished, config, cluster, max_tokens, workers=workers, resume=resume, progress=progress
        )
    read_manifest(store)

    def make_plan() -> tuple[dict[str, Any], Inputs]:
        settings = checked(config or config_of(manifest), manifest.fingerprint)
        plan, inputs = plan_of(work, as_sources(sources, licence), settings, max_tokens, manifest.fingerprint)
        return plan | {"tokenizer": manifest.tokenizer_name}, inputs

    with writer(store) as work:
        manifest = read_manifest(store)
        plan = begin_or_resume(work, manifest, "add", resume, make_plan)
        if plan is None:
            return finished(work, "add")
        known = live_hashes(store)
        return grow(work, manifest, plan, workers=workers, progress=progress, known=known, cluster=cluster)


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


def first_plan(
    work: WorkFolder,
    sources: tuple[Source, ...],
    tokenizer: Any,
    config: StoreConfig,
    max_tokens: int | None,
    recipe: str,
) -> tuple[dict[str, Any], Inputs]:
    """Plan of a new store, whose tokenizer is put into its folder, and the inputs."""
    plan, inputs = plan_of(work, sources, config, max_tokens, tokenizer)
    return plan | {"recipe": recipe, "tokenizer": write_tokenizer(work.store, tokenizer)}, inputs


def plan_of(
    work: WorkFolder, sources: tuple[Source, ...], config: StoreConfig, max_tokens: int | None, tokenizer: Any
) -> tuple[dict[str, Any], Inputs]:
    """Plan of new documents, and the inputs."""
    check_sources(sources)
    plan = {"sources": [asdict(source) for source in sources], "config": asdict(config), "max_tokens": max_tokens}
    return plan, file_shards(work, _of(tokenizer, list_files(sources, work.store)))


def _of(tokenizer: Any, files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    """Files, of which the tokenised ones must be those of a tokenizer."""
    for file in files:
        if file.kind == "ds" and not file.skip:
            tokenised.check_tokenizer(file.location, tokenised.layout_of(file.location), tokenizer)
        yield file


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
    cluster: str = "",
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
    cluster
        As for `build_datastore`.
    """
    watch = Stopwatch(progress)
    staying = (*(manifest.segments if kept is None else kept), *made)
    stages, entries, cut = make_segments(work, watch, workers, known, cluster)
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
    work: WorkFolder,
    watch: Stopwatch,
    workers: int | None,
    known: Iterable[str],
    cluster: str = "",
    exchange: Exchange | None = None,
) -> tuple[Stages, list[SegmentEntry], Cut]:
    """Run the stages of a plan; returns them, the new segments and the cut."""
    workers = workers or os.cpu_count() or 1
    stages = Stages(work, workers)
    size = int(stages.plan.get("bytes", 0))
    with runner_of(cluster, workers, exchange) as run_ranks:
        with watch.stage("reading", size or None, "B") as bar:
            tell = _teller(bar)

            def run(ranks: list[int]) -> None:
                run_ranks(stages, "tokens", ranks, size, lambda done: tell(done, done[0]))

            cut = stages.cut(known, run)
        with watch.stage("indexing", cut.tokens, "tok") as bar:
            tell = _teller(bar)
            ranks = [rank for rank in range(len(cut.segments)) if stages.needs_segment(rank)]
            run_ranks(stages, "segment", ranks, 4 * cut.tokens, lambda done: tell(done, done[2]))
    return stages, [stages.entry(rank) for rank in range(len(cut.segments))], cut


def runner_of(cluster: str, workers: int, exchange: Exchange | None = None) -> AbstractContextManager[Runner]:
    """What runs the ranks of stages inside of a `with`: a cluster, or processes of this machine.

    Raises
    ------
    BuildError
        When the cluster is none, or what it needs is not installed.
    """
    if not cluster:
        return Pool(workers)
    from retrieve_spec.datastore.cluster import cluster_runner

    return cluster_runner(cluster, exchange)


def _teller(bar: Bar) -> Callable[[Done, int], None]:
    """Tells a bar of finished ranks: units, and documents and tokens beside them."""
    documents = tokens = 0

    def tell(done: Done, units: int) -> None:
        nonlocal documents, tokens
        documents, tokens = documents + done[1], tokens + done[2]
        bar.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens", refresh=False)
        bar.update(units)

    return tell
