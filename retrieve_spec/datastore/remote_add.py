"""Remote add: adds documents to a store at an address, of which only the manifest and document tables travel here.

New segments are made here, or on a cluster, and sent there; then a version that lists them beside the others takes
effect. Of two processes that add at once, one gets an error and does it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.addresses import explain_remote_errors
from retrieve_spec.datastore.build import checked, make_segments, plan_of
from retrieve_spec.datastore.card import Told, public_manifest, store_card
from retrieve_spec.datastore.change import ChangeReport, Inputs, begin_or_resume, event_of, explain_write_errors
from retrieve_spec.datastore.documents import TABLE, DocumentTable
from retrieve_spec.datastore.exchange import Exchange
from retrieve_spec.datastore.files import map_array
from retrieve_spec.datastore.fresh import config_of
from retrieve_spec.datastore.manifest import SEGMENTS, TOMBSTONES, WORK, Manifest, SegmentEntry, content_name
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.remote import Remote, changed, read_remote
from retrieve_spec.datastore.remote_build import check_sources_travel, plan_at, told_of_cut
from retrieve_spec.datastore.scratch import scratch_folder
from retrieve_spec.datastore.segment import SUFFIX
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.tombstones import hidden_of, tombstones_of
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError, StoreLockedError

_TABLE = tuple(f"{name}{SUFFIX}" for name in ("documents", *TABLE))
_AGAIN = "Run the command again: it adds to what is there then."


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
        check_sources_travel(sources)
        if resume and (done := _taken_effect(exchange, there)) is not None:
            return done
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
            plan = plan_at(work, exchange, "add", resume, make_plan)
        if plan["onto"] != version:
            remedy = f"Delete {url}/{WORK}, and run the command again."
            raise BuildError(f"version {plan['onto']} at {url}, which was added to", f"version {version}", remedy)
        known = (digest for table in tables for *_, digest in table.texts())
        stages, entries, cut = make_segments(work, watch, workers, known, cluster, exchange)
        made = [replace(entry, name=content_name(entry.files)) for entry in entries]
        report = ChangeReport(
            "add",
            sum(entry.documents for entry in made),
            sum(entry.tokens for entry in made),
            len(there.segments) + len(made),
            tuple(cut.skipped),
            watch.seconds,
        )
        if made:
            if exchange is None:
                _send(remote, work, [entry.name for entry in entries], made, watch)
            following = _following(there, made, event_of(plan, report))
            card = store_card(chain(_told(tables), told_of_cut(stages, cut)), following)
            _publish(remote, version + 1, following, card, exchange)
        if exchange is not None:
            exchange.end()
    return report


def _settings(url: str, there: Manifest, config: StoreConfig | None) -> StoreConfig:
    if there.dense is not None or (config is not None and config.dense is not None):
        remedy = f"Run `retrieve-spec pull {url} FOLDER`, add to that, and `retrieve-spec push FOLDER {url}`."
        raise BuildError(f"a store without a dense index at {url}", "one that has or gets one", remedy)
    return checked(config or config_of(there), there.fingerprint)


def _taken_effect(exchange: Exchange, there: Manifest) -> ChangeReport | None:
    """Report of an interrupted addition of which only tidying up was left; None where it took no effect."""
    if exchange.announced() != there.content:
        return None
    exchange.end()
    last = there.history[-1]
    return ChangeReport("add", last["documents"], last["tokens"], len(there.segments))


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


def _send(
    remote: Remote, work: WorkFolder, numbers: Sequence[str], made: Sequence[SegmentEntry], bars: Stopwatch
) -> None:
    """Bring new segments there."""
    with bars.stage("sending", sum(file.bytes for entry in made for file in entry.files.values()), "B") as bar:
        for number, entry in zip(numbers, made, strict=True):
            for name, file in entry.files.items():
                with explain_remote_errors(remote.url):
                    source = work.path / f"segment-{number}" / name
                    remote.send(source, f"{SEGMENTS}/{entry.name}/{name}", file, bar.update)


def _following(there: Manifest, made: Sequence[SegmentEntry], event: dict[str, Any]) -> Manifest:
    """What the store is going to be; places of this machine stay out of it."""
    new = public_manifest(replace(there, segments=tuple(made), history=(event,)))
    segments = {entry.name: entry for entry in (*there.segments, *new.segments)}
    return there.following(tuple(segments.values()), {"generation": there.generation + 1, **new.history[-1]})


def _publish(remote: Remote, version: int, manifest: Manifest, card: bytes, exchange: Exchange | None) -> None:
    """Make a version take effect, unless another process was quicker."""
    if exchange is not None:
        exchange.announce(manifest.content)
    try:
        with explain_remote_errors(remote.url):
            if remote.newest() >= version:
                raise changed(remote.url, f"version {version} to be this one", "one that another process made")
            remote.write(remote.path("README.md"), card)
            remote.add_version(version, manifest)
    except StoreLockedError as error:
        if exchange is not None:
            exchange.end()  # what it made leaves out other texts than are there now
        raise StoreLockedError(error.expected, error.got, _AGAIN) from error
