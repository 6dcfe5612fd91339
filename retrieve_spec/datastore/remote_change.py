"""Remote change: builds a store at an address, on a cluster whose machines share no folder, or adds documents to one.

Of a store that is there only the manifest and the document tables travel here. New segments are made here and sent
there, or made on a cluster, where what its stages read and write travels through an `Exchange`; then a version that
lists them beside the others takes effect. What comes out is what a change in a folder and a push of it would have put
there. Of two processes that change a store at once, one gets an error and does it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.addresses import explain_remote_errors
from retrieve_spec.datastore.build import checked, first_plan, make_segments, plan_of
from retrieve_spec.datastore.card import Told, name_of, public_manifest, put_card
from retrieve_spec.datastore.change import (
    ChangeReport,
    Inputs,
    begin_or_resume,
    check_same_rules,
    event_of,
    explain_write_errors,
    last_report,
    nothing_to_index,
    report_of,
)
from retrieve_spec.datastore.cut import Cut
from retrieve_spec.datastore.documents import TABLE, DocumentTable
from retrieve_spec.datastore.exchange import Exchange
from retrieve_spec.datastore.files import map_array
from retrieve_spec.datastore.fresh import config_of, first_manifest
from retrieve_spec.datastore.manifest import SEGMENTS, TOMBSTONES, WORK, Manifest, SegmentEntry, content_name
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.remote import Remote, changed, read_remote
from retrieve_spec.datastore.scratch import scratch_folder
from retrieve_spec.datastore.segment import SUFFIX
from retrieve_spec.datastore.sources import STDIN, Source
from retrieve_spec.datastore.stages import Stages
from retrieve_spec.datastore.tombstones import hidden_of, tombstones_of
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError, StoreLockedError

_TABLE = tuple(f"{name}{SUFFIX}" for name in ("documents", *TABLE))
_AGAIN = "Run the command again: it adds to what is there then."
MakePlan = Callable[[], tuple[dict[str, Any], Inputs]]


def build_remote(
    url: str,
    sources: tuple[Source, ...],
    tokenizer: Any,
    config: StoreConfig,
    cluster: str,
    max_tokens: int | None = None,
    *,
    resume: bool = False,
    progress: bool = False,
    recipe: str = "",
) -> ChangeReport:
    """Build a new store at an address; parameters and errors are those of `build_datastore`."""
    instead = f"Build a folder, then `retrieve-spec push` it to {url}."
    if not cluster:
        raise BuildError(f"--cluster for a store that is built at {url}", "none", instead)
    if config.dense is not None:
        raise BuildError(f"a store without a dense index at {url}", "one with --dense", instead)
    _check_sources_travel(sources)
    exchange = Exchange(url)
    with explain_remote_errors(url):
        newest = exchange.remote.newest()
        if not newest:
            exchange.remote.check_free()
    begun = exchange.plan()
    if newest and not (resume and begun is not None and begun["verb"] == "build"):
        remedy = "Choose another address, or `add` to it."
        raise BuildError(f"no datastore at {url}", f"version {newest} of one", remedy)
    if newest:  # it had taken effect, and only tidying up was left
        exchange.end()
        done = exchange.remote.manifest(newest)
        return ChangeReport("build", done.documents, done.tokens, len(done.segments))
    watch = Stopwatch(progress)
    with scratch_folder() as folder, explain_write_errors(folder):
        work = WorkFolder(folder)

        def make_plan() -> tuple[dict[str, Any], Inputs]:
            return first_plan(work, sources, tokenizer, config, max_tokens, recipe)

        plan = _plan_at(work, exchange, "build", resume, make_plan)
        stages, made, cut = make_segments(work, watch, 1, (), cluster, exchange)
        if not made:
            exchange.end()
            raise nothing_to_index(cut.skipped, plan, stages.shards)
        base = replace(first_manifest(work.store, plan["tokenizer"]), config=plan["config"])
        following, report = _following(base, made, plan, cut, watch)
        _publish(exchange.remote, 1, following, _told_of_cut(stages, cut), exchange)
    exchange.end()
    return report


def add_remote(
    url: str,
    sources: tuple[Source, ...],
    config: StoreConfig | None = None,
    cluster: str = "",
    max_tokens: int | None = None,
    *,
    workers: int | None = None,
    resume: bool = False,
    progress: bool = False,
) -> ChangeReport:
    """Add documents to the store at an address; parameters and errors are those of `add_documents`.

    Without a `cluster` there is nothing to resume: what was interrupted left the store as it was.
    """
    remote, version, there = read_remote(url)
    settings = _settings(url, there, config)
    exchange = Exchange(url) if cluster else None
    if exchange is None and resume:
        raise BuildError(f"--cluster to resume an `add` at {url}", "none", "Run the command again without --resume.")
    if exchange is not None:
        _check_sources_travel(sources)
        if resume and exchange.announced() == there.content:  # it had taken effect, and only tidying up was left
            exchange.end()
            return last_report(there, "add")
    watch = Stopwatch(progress)
    with scratch_folder() as folder, explain_write_errors(folder):
        work = WorkFolder(folder)
        tables = _fetch(remote, there, work.store, watch)

        def make_plan() -> tuple[dict[str, Any], Inputs]:
            plan, inputs = plan_of(work, sources, settings, max_tokens, there.fingerprint)
            return plan | {"tokenizer": there.tokenizer_name, "onto": version}, inputs

        if exchange is None:
            plan = begin_or_resume(work, None, "add", False, make_plan)
            assert plan is not None, "a new change"
        else:
            plan = _plan_at(work, exchange, "add", resume, make_plan)
        if plan["onto"] != version:
            remedy = f"Delete {url}/{WORK}, and run the command again."
            raise BuildError(f"version {plan['onto']} at {url}, which was added to", f"version {version}", remedy)
        known = (digest for table in tables for *_, digest in table.texts())
        stages, made, cut = make_segments(work, watch, workers, known, cluster, exchange)
        following, report = _following(there, made, plan, cut, watch)
        if made:
            if exchange is None:
                _send(remote, work, made, watch)
            _publish(remote, version + 1, following, chain(_told(tables), _told_of_cut(stages, cut)), exchange)
    if exchange is not None:
        exchange.end()
    return report


def _check_sources_travel(sources: tuple[Source, ...]) -> None:
    """Check that every machine of a cluster can read some sources."""
    if any(source.path == STDIN for source in sources):
        raise BuildError("sources that all machines can read", "standard input", "Save it to a file first.")


def _settings(url: str, there: Manifest, config: StoreConfig | None) -> StoreConfig:
    if there.dense is not None or (config is not None and config.dense is not None):
        remedy = f"Run `retrieve-spec pull {url} FOLDER`, add to that, and `retrieve-spec push FOLDER {url}`."
        raise BuildError(f"a store without a dense index at {url}", "one that has or gets one", remedy)
    return checked(config or config_of(there), there.fingerprint)


def _plan_at(work: WorkFolder, exchange: Exchange, verb: str, resume: bool, make_plan: MakePlan) -> dict[str, Any]:
    """The plan of a change at an address, in the work folder and there; `make_plan` makes that of a new one.

    Raises
    ------
    BuildError
        When there is none to resume, it is of another verb, or was begun by another version or under other rules.
    StoreIncompleteError
        When one has been begun there and is not to be resumed.
    """
    begun = exchange.plan()
    if not resume:
        if begun is not None:
            raise exchange.begun()
        begin_or_resume(work, None, verb, False, make_plan)
        exchange.begin(work)
    elif begun is None or begun["verb"] != verb:
        got, remedy = "none", "Run the command again without --resume."
        if begun is not None:
            got = f"an interrupted {begun['verb']}"
            remedy = f"Continue that one with `retrieve-spec {begun['verb']} {exchange.url} --resume`."
        raise BuildError(f"an interrupted {verb} at {exchange.url}", got, remedy)
    else:
        exchange.resume(work)
    plan = work.plan()
    assert plan is not None, "a change in progress"
    check_same_rules(plan, "build", f"{exchange.url}/{WORK}")
    return plan


def _fetch(remote: Remote, there: Manifest, folder: Path, watch: Stopwatch) -> list[DocumentTable]:
    """The tokenizer of a store, into a folder, and its document tables."""
    wanted = [(there.tokenizer_name, there.tokenizer)]
    for entry in there.segments:
        wanted += [(f"{SEGMENTS}/{entry.name}/{name}", entry.files[name]) for name in _TABLE]
        wanted += [(f"{TOMBSTONES}/{name}", file) for name, file in entry.tombstones.items()]
    with watch.stage("fetching", sum(file.bytes for _, file in wanted), "B") as bar:
        for place, file in wanted:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            with explain_remote_errors(remote.url):
                remote.fetch(place, folder / place, file, bar.update)
    return [_table(folder, entry) for entry in there.segments]


def _table(folder: Path, entry: SegmentEntry) -> DocumentTable:
    place = folder / SEGMENTS / entry.name
    starts, *arrays = (np.array(map_array(place / name, entry.files[name])) for name in _TABLE)
    removed = hidden_of(tombstones_of(folder, entry), len(starts) - 1, entry.name)
    table = dict(zip(TABLE, arrays, strict=True))
    return DocumentTable(entry.name, entry.added_at, entry.origins, starts, table, removed)


def _told(tables: Sequence[DocumentTable]) -> Iterator[Told]:
    """What the card counts of the documents that are there."""
    for table in tables:
        for document in table.live():
            yield document.licence, document.source, document.tokens


def _told_of_cut(stages: Stages, cut: Cut) -> Iterator[Told]:
    """What the card counts, from the records of the shards."""
    for segment in cut.segments:
        for number, ranges in segment.pieces:
            rows = stages.shard(number).rows
            for row in (row for first, end in ranges for row in rows[first:end]):
                yield row.licence, name_of(row.source), row.tokens


def _send(remote: Remote, work: WorkFolder, made: Sequence[SegmentEntry], bars: Stopwatch) -> None:
    """Bring new segments there."""
    with bars.stage("sending", sum(file.bytes for entry in made for file in entry.files.values()), "B") as bar:
        for entry in made:
            for name, file in entry.files.items():
                with explain_remote_errors(remote.url):
                    source = work.path / f"segment-{entry.name}" / name
                    remote.send(source, f"{SEGMENTS}/{content_name(entry.files)}/{name}", file, bar.update)


def _following(
    there: Manifest, made: Sequence[SegmentEntry], plan: dict[str, Any], cut: Cut, watch: Stopwatch
) -> tuple[Manifest, ChangeReport]:
    """What a store is going to be, in which places of this machine stay out, and the report of that."""
    named = {entry.name: entry for entry in there.segments}
    before = len(named)
    named |= {name: replace(entry, name=name) for entry in made if (name := content_name(entry.files))}
    report = report_of(plan["verb"], made, len(named), cut.skipped, watch.seconds)
    new = public_manifest(replace(there, segments=tuple(named.values())[before:], history=(event_of(plan, report),)))
    event = {"generation": there.generation + 1, **new.history[-1]}
    return there.following((*there.segments, *new.segments), event), report


def _publish(remote: Remote, version: int, manifest: Manifest, told: Iterable[Told], exchange: Exchange | None) -> None:
    """Make a version take effect, unless another process was quicker."""
    if exchange is not None:
        exchange.announce(manifest.content)
    try:
        with explain_remote_errors(remote.url):
            if remote.newest() >= version:
                raise changed(remote.url, f"version {version} to be this one", "one that another process made")
            put_card(remote, told, manifest)
            remote.add_version(version, manifest)
    except StoreLockedError as error:
        if exchange is not None:
            exchange.end()  # what it made leaves out other texts than are there now
        raise StoreLockedError(error.expected, error.got, _AGAIN) from error
