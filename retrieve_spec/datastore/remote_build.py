"""Remote build: builds a store at an address, on a cluster whose machines share no folder.

The stages' inputs and outputs travel through an `Exchange`; through this process go the plan, records and manifest
alone. What comes out is what a build in a folder and a push of it would have put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.addresses import explain_remote_errors
from retrieve_spec.datastore.build import first_plan, make_segments
from retrieve_spec.datastore.card import Told, name_of, public_manifest, store_card
from retrieve_spec.datastore.change import (
    ChangeReport,
    Inputs,
    begin_or_resume,
    check_same_rules,
    event_of,
    nothing_to_index,
)
from retrieve_spec.datastore.cut import Cut
from retrieve_spec.datastore.exchange import Exchange
from retrieve_spec.datastore.fresh import first_manifest
from retrieve_spec.datastore.manifest import WORK, content_name
from retrieve_spec.datastore.progress import Stopwatch
from retrieve_spec.datastore.scratch import scratch_folder
from retrieve_spec.datastore.sources import STDIN, Source
from retrieve_spec.datastore.stages import Stages
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError


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
    _check(url, sources, config, cluster)
    exchange = Exchange(url)
    with explain_remote_errors(url):
        newest = exchange.remote.newest()
    begun = exchange.plan()
    if newest and not (resume and begun is not None and begun["verb"] == "build"):
        remedy = "Choose another address, or `add` to it."
        raise BuildError(f"no datastore at {url}", f"version {newest} of one", remedy)
    if newest:  # it had taken effect, and only tidying up was left
        exchange.end()
        done = exchange.remote.manifest(newest)
        return ChangeReport("build", done.documents, done.tokens, len(done.segments))
    with scratch_folder() as folder:
        work = WorkFolder(folder)

        def make_plan() -> tuple[dict[str, Any], Inputs]:
            return first_plan(work, sources, tokenizer, config, max_tokens, recipe)

        plan = plan_at(work, exchange, "build", resume, make_plan)
        watch = Stopwatch(progress)
        stages, entries, cut = make_segments(work, watch, 1, (), cluster, exchange)
        if not entries:
            exchange.end()
            raise nothing_to_index(cut.skipped, plan, stages.shards)
        named = {name: replace(entry, name=name) for entry in entries if (name := content_name(entry.files))}
        documents = sum(entry.documents for entry in entries)
        tokens = sum(entry.tokens for entry in entries)
        report = ChangeReport("build", documents, tokens, len(named), tuple(cut.skipped), watch.seconds)
        base = replace(first_manifest(work.store, plan["tokenizer"]), config=plan["config"])
        event = {"generation": 1, **event_of(plan, report)}
        manifest = public_manifest(base.following(tuple(named.values()), event))
        with explain_remote_errors(url):
            card = store_card(told_of_cut(stages, cut), manifest)
            exchange.remote.write(exchange.remote.path("README.md"), card)
            exchange.remote.add_version(1, manifest)
        exchange.end()
    return report


def _check(url: str, sources: tuple[Source, ...], config: StoreConfig, cluster: str) -> None:
    instead = f"Build a folder, then `retrieve-spec push` it to {url}."
    if not cluster:
        raise BuildError(f"--cluster for a store that is built at {url}", "none", instead)
    if config.dense is not None:
        raise BuildError(f"a store without a dense index at {url}", "one with --dense", instead)
    check_sources_travel(sources)


def check_sources_travel(sources: tuple[Source, ...]) -> None:
    """Check that every machine of a cluster can read some sources."""
    if any(source.path == STDIN for source in sources):
        raise BuildError("sources that all machines can read", "standard input", "Save it to a file first.")


def plan_at(
    work: WorkFolder,
    exchange: Exchange,
    verb: str,
    resume: bool,
    make_plan: Callable[[], tuple[dict[str, Any], Inputs]],
) -> dict[str, Any]:
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


def told_of_cut(stages: Stages, cut: Cut) -> Iterator[Told]:
    """What the card counts, from the records of the shards."""
    for segment in cut.segments:
        for number, ranges in segment.pieces:
            rows = stages.shard(number).rows
            for row in (row for first, end in ranges for row in rows[first:end]):
                yield row.licence, name_of(row.source), row.tokens
