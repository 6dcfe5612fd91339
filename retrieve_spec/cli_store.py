"""Commands of datastores: each is one library call, its result shown as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from retrieve_spec.cli_common import (
    PLACE,
    TEXT,
    WholeRange,
    as_record,
    compiling_shown,
    counted,
    layer_of,
    loading_bars,
    with_options,
)
from retrieve_spec.config import DenseConfig
from retrieve_spec.errors import BuildError

if TYPE_CHECKING:
    from retrieve_spec.datastore.change import ChangeReport
    from retrieve_spec.datastore.manifest import Manifest
    from retrieve_spec.datastore.sources import Source

_NAMED = 3
"""Number of paths listed per reason for skipping; `--json` and `--left-out` list all."""
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress bars.")


@dataclass(frozen=True, slots=True)
class Output:
    """What a command prints."""

    quiet: bool = False
    as_json: bool = False
    left_out: bool = False


_OUTPUT = as_record("output", Output(), QUIET, JSON)
STORE = click.argument("store", type=PLACE)
LICENCES = click.option(
    "--licence",
    "--license",
    "licences",
    multiple=True,
    metavar="SPDX[,…]",
    help="Include only text under these licences, by its own SPDX lines or the nearest licence file.",
)
STATED = click.option(
    "--stated-licence",
    "--stated-license",
    "licence",
    default="",
    metavar="NAME",
    help="Licence of documents that state none; without --licence, of all documents.",
)
ADMIT = click.option(
    "--admit",
    multiple=True,
    metavar="ignored|generated|secrets[,…]",
    help="Include files that git ignores, generated files, or files with secrets, which are left out otherwise.",
)
LEFT_OUT = click.option(
    "--left-out", is_flag=True, help="List everything that was left out, not only the first files of each kind."
)
TOKENIZER = click.option(
    "--tokenizer",
    required=True,
    metavar="MODEL|FILE",
    help="Model folder, tokenizer.json, hub id, 'smollm2' or 'reference'.",
)
_WORKERS = click.option(
    "--workers",
    type=WholeRange(min=1),
    metavar="N",
    help="Number of processes; by default as many as processors and memory allow.",
)


_SOURCE_OPTIONS = with_options(
    click.argument("sources", nargs=-1, metavar="[SOURCE]..."),
    click.option("--include", multiple=True, metavar="GLOB", help="Include only these files; can be repeated."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these files out; can be repeated."),
    LICENCES,
    STATED,
    ADMIT,
    LEFT_OUT,
    click.option(
        "--field", default="text", show_default=True, metavar="NAME", help="Text field of JSON Lines, Parquet."
    ),
    click.option("--max-tokens", type=WholeRange(min=1), metavar="N", help="Stop before exceeding N."),
)
"""Options that select what is read."""
_DENSE = as_record(
    "dense",
    DenseConfig(""),
    click.option(
        "--dense",
        "model",
        metavar="MODEL",
        help="Also index the model's hidden states; folder, hub id, 'smollm2' or 'reference'.",
    ),
    click.option(
        "--layer", type=layer_of, default="last", show_default=True, metavar="last|N", help="Layer of the dense keys."
    ),
    click.option(
        "--dims", type=WholeRange(min=1), default=64, show_default=True, metavar="N", help="Dimensions of a dense key."
    ),
    click.option("--max-vectors", type=WholeRange(min=1), metavar="N", help="The most dense keys; all by default."),
)


@contextmanager
def _bars(quiet: bool, loads_model: bool = False) -> Iterator[None]:
    """Show which kernels are compiled, and the progress of loading a model."""
    with (
        nullcontext() if quiet else compiling_shown(),
        loading_bars(not quiet) if loads_model else nullcontext(),  # imports Transformers
    ):
        yield


def _has_dense(*stores: Path | str) -> bool:
    """Whether a change of these stores runs the model of a dense index."""
    from retrieve_spec.datastore.remote import manifest_at

    return any(manifest_at(store).dense is not None for store in stores)


def _was_given(option: str) -> bool:
    """Whether an option of the running command was given on its command line."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _sources(paths: tuple[str, ...], options: dict[str, Any]) -> list[Source]:
    from retrieve_spec.datastore.sources import Source

    return [Source(path, **options) for path in paths]


@click.command(short_help="Build a datastore from files, folders or a recipe.")
@click.argument("store", type=PLACE)
@_SOURCE_OPTIONS
@TOKENIZER
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    metavar="FILE|NAME",
    help="A TOML file that lists the sources, or the name of one that comes with the library.",
)
@click.option(
    "--index",
    type=click.Choice(["both", "exact", "ngram"]),
    help="Indexes to make: both, the exact one, or n-grams alone, which are small enough to ship.",
)
@_DENSE
@click.option(
    "--part",
    type=(WholeRange(min=0), WholeRange(min=1)),
    metavar="RANK COUNT",
    help="Read only part RANK, from 0, of COUNT; `merge` joins the stores of all parts.",
)
@_WORKERS
@_OUTPUT
def build(
    store: Path | str,
    sources: tuple[str, ...],
    tokenizer: str,
    recipe: Path | None,
    index: Any,
    dense: DenseConfig,
    part: tuple[int, int] | None,
    max_tokens: int | None,
    workers: int | None,
    output: Output,
    **options: Any,
) -> None:
    """Build a datastore in the folder STORE.

    A SOURCE is a file, a folder, JSON Lines, Parquet, or text compressed with gzip or zstd. Of folders, files that git
    ignores and generated files are left out; secrets always are (--admit).
    """
    from dataclasses import replace

    from retrieve_spec.config import StoreConfig
    from retrieve_spec.datastore.build import build_datastore
    from retrieve_spec.datastore.sources import load_recipe

    config, given, name = StoreConfig(), _sources(sources, options), ""
    if recipe is not None:
        if sources:
            raise click.UsageError("Give SOURCEs or --recipe, not both: the recipe names its own.")
        loaded = load_recipe(recipe, include=options["include"], exclude=options["exclude"])
        licences, admit = options["licences"], options["admit"]
        given = [replace(source, licences=licences, admit=admit or source.admit) for source in loaded.sources]
        config, name = loaded.config, loaded.name
    config = replace(config, index=index) if index else config
    if dense.model:
        config = replace(config, dense=dense)
    elif any(map(_was_given, ("layer", "dims", "max_vectors"))):
        raise click.UsageError("Give --dense MODEL with --layer, --dims and --max-vectors.")
    if not given:
        raise click.UsageError("Give at least one SOURCE, or --recipe FILE|NAME.")
    with _bars(output.quiet, bool(dense.model)):
        report = build_datastore(
            store,
            given,
            tokenizer,
            config=config,
            max_tokens=max_tokens,
            workers=workers,
            part=part,
            progress=not output.quiet,
            recipe=name,
        )
    print_report(report, store, output)


@click.command(short_help="Add documents to a datastore.")
@STORE
@_SOURCE_OPTIONS
@_WORKERS
@_OUTPUT
def add(
    store: Path | str,
    sources: tuple[str, ...],
    max_tokens: int | None,
    workers: int | None,
    output: Output,
    **options: Any,
) -> None:
    """Add documents to the datastore STORE; texts that it already has are skipped."""
    from retrieve_spec.datastore.build import add_documents

    if not sources:
        raise click.UsageError("Give at least one SOURCE.")
    with _bars(output.quiet, _has_dense(store)):
        given = _sources(sources, options)
        report = add_documents(store, given, max_tokens=max_tokens, workers=workers, progress=not output.quiet)
    print_report(report, store, output)


@click.command(short_help="Remove documents from a datastore.")
@STORE
@click.argument("documents", nargs=-1, metavar="[DOCUMENT]...")
@click.option("--where", default="", metavar="SQL", help="Condition over the catalogue's documents table.")
@_OUTPUT
def remove(store: Path | str, documents: tuple[str, ...], where: str, output: Output) -> None:
    """Remove documents by path, glob or SQL condition; nothing is drafted from them any more."""
    from retrieve_spec.datastore.edit import remove_documents

    if not documents and not where:
        raise click.UsageError("Give DOCUMENT paths or globs, or --where SQL.")
    print_report(remove_documents(store, documents, where=where, progress=not output.quiet), store, output)


@click.command(short_help="Merge several datastores into a new one.")
@click.argument("out", type=PLACE)
@click.argument("stores", nargs=-1, required=True, type=PLACE, metavar="STORE...")
@_OUTPUT
def merge(out: Path | str, stores: tuple[Path | str, ...], output: Output) -> None:
    """Merge STOREs with one tokenizer into the new datastore OUT."""
    from retrieve_spec.datastore.edit import merge_datastores

    with _bars(output.quiet, _has_dense(*stores)):
        report = merge_datastores(out, stores, progress=not output.quiet)
    print_report(report, out, output)


@click.command(short_help="Rewrite a datastore without removed documents.")
@STORE
@_WORKERS
@_OUTPUT
def compact(store: Path | str, workers: int | None, output: Output) -> None:
    """Rewrite the segments of a datastore as a build would make them, without the text of removed documents."""
    from retrieve_spec.datastore.edit import compact_datastore

    with _bars(output.quiet, _has_dense(store)):
        report = compact_datastore(store, workers=workers, progress=not output.quiet)
    print_report(report, store, output)


@click.command(short_help="Rewrite a datastore for another tokenizer.")
@STORE
@TOKENIZER
@_WORKERS
@_OUTPUT
def retokenize(store: Path | str, tokenizer: str, workers: int | None, output: Output) -> None:
    """Rewrite a datastore for another tokenizer, from its own text."""
    from retrieve_spec.datastore.edit import retokenize_datastore

    with _bars(output.quiet):
        report = retokenize_datastore(store, tokenizer, workers=workers, progress=not output.quiet)
    print_report(report, store, output)


@click.command(short_help="Bring a datastore up to date with folders.")
@STORE
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "--tokenizer", metavar="MODEL|FILE", help="Model folder, tokenizer.json, hub id, 'smollm2' or 'reference'; once."
)
@LICENCES
@STATED
@ADMIT
@LEFT_OUT
@click.option("--watch", is_flag=True, help="Keep running and follow changes, until interrupted.")
@_OUTPUT
def sync(
    store: Path | str,
    folders: tuple[str, ...],
    watch: bool,
    output: Output,
    **options: Any,
) -> None:
    """Bring STORE up to date with FOLDERs: new, changed, moved and deleted files.

    Files that git ignores, secrets and generated files are left out (--admit).
    """
    from retrieve_spec.datastore.sync import sync_datastore, watch_folders

    def tell(report: ChangeReport) -> None:
        print_report(report, store, output)

    if watch:
        watch_folders(store, folders, tell=tell, **options)
    else:
        with _bars(output.quiet):
            report = sync_datastore(store, folders, progress=not output.quiet, **options)
        tell(report)


@click.command(short_help="Push a datastore to a remote.")
@STORE
@click.argument("url")
@_OUTPUT
def push(store: Path | str, url: str, output: Output) -> None:
    """Push STORE to URL (s3://…, gs://…, hf://…, file://…); only files that are missing there are transferred."""
    from retrieve_spec.datastore.share import push_datastore

    report = push_datastore(store, url, progress=not output.quiet)
    if output.as_json:
        click.echo(json.dumps(asdict(report)))
        return
    click.echo(
        f"push: {counted(report.files, 'file')}, {report.bytes / 1e6:,.1f} MB; {report.kept:,} were there; "
        f"{url} is at version {report.version}."
    )


@click.command(short_help="Pull a datastore from a remote.")
@click.argument("url")
@STORE
@_OUTPUT
def pull(url: str, store: Path | str, output: Output) -> None:
    """Pull URL into STORE, which is created if needed; only files that are missing here are transferred."""
    from retrieve_spec.datastore.share import pull_datastore

    print_report(pull_datastore(url, store, progress=not output.quiet), store, output)


@click.command(short_help="Describe a datastore.")
@STORE
@JSON
def info(store: Path | str, as_json: bool) -> None:
    """Describe a datastore; reads its manifest only."""
    from retrieve_spec.datastore.remote import manifest_at

    manifest = manifest_at(store)
    if as_json:
        click.echo(json.dumps(manifest.to_json()))
        return
    per_token = manifest.bytes / max(manifest.tokens, 1)
    rows = [
        ("documents", f"{manifest.documents:,}"),
        ("tokens", f"{manifest.tokens:,}"),
        ("size", f"{manifest.bytes / 1e6:,.1f} MB ({per_token:.2f} bytes per token)"),
        ("segments", f"{len(manifest.segments)}"),
        ("tokenizer", manifest.fingerprint[7:19]),
        ("content", manifest.content[:12]),
        *_dense_rows(manifest),
        *_distilled_rows(manifest),
        *((event["verb"], f"{event['at']}  {counted(event['documents'], 'document')}") for event in manifest.history),
    ]
    click.echo(f"{store}")
    for name, value in rows:
        click.echo(f"  {name:<10} {value}")


@click.command(short_help="Write a database of a datastore's documents.")
@STORE
@JSON
def catalog(store: Path | str, as_json: bool) -> None:
    """Write an SQLite database of STORE's documents, or update it, and print its path."""
    from retrieve_spec.datastore.inspection import write_catalog

    place = write_catalog(store)
    click.echo(json.dumps({"store": str(store), "catalog": str(place)}) if as_json else f"{place}")


@click.command(short_help="Check a datastore.")
@STORE
@_OUTPUT
def verify(store: Path | str, output: Output) -> None:
    """Check every checksum, and whether indexes, text and document tables agree."""
    from retrieve_spec.datastore.inspection import verify_datastore

    checked = verify_datastore(store, progress=not output.quiet)
    if output.as_json:
        click.echo(json.dumps({"store": str(store), "sound": True, **checked}))
    else:
        click.echo(f"{store} is sound: {checked['files']} files, {checked['tokens']:,} tokens.")


@click.command(short_help="Search a datastore for a text.")
@STORE
@click.argument("text", type=TEXT)
@click.option(
    "--limit",
    type=WholeRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Continuations and places to list.",
)
@JSON
def search(store: Path | str, text: str, limit: int, as_json: bool) -> None:
    """Find the longest suffix of TEXT in the store, what followed it, and in which documents."""
    if not text:
        raise click.UsageError("Give some TEXT to search for.")
    from retrieve_spec.datastore.inspection import search_datastore
    from retrieve_spec.datastore.store import open_datastore

    opened = open_datastore(store)
    if opened.segments and not any(len(segment.tokens) for segment in opened.segments):
        raise BuildError("a store that keeps its text", f"{store}, which keeps n-grams only", "Search another store.")
    result = search_datastore(opened, text, limit=limit)
    if as_json:
        click.echo(json.dumps(asdict(result)))
        return
    if not result.matched:
        click.echo(f"Nothing matches, not even the last of {counted(result.tokens, 'token')}.")
        return
    click.echo(
        f"The last {result.matched} of {counted(result.tokens, 'token')} match, "
        f"{counted(result.count, 'time')}: {result.text!r}"
    )
    for token, count in result.continuations:
        click.echo(f"  {count:>12,.0f}  {token!r}")
    for place in result.occurrences:
        document = place.document
        licence = f" ({document.licence})" if document.licence else ""
        click.echo(f"  {document.path}{licence} @ {place.position - document.start}: {place.continuation!r}")


def _dense_rows(manifest: Manifest) -> list[tuple[str, str]]:
    if manifest.dense is None:
        return []
    record = manifest.dense
    files = [file for entry in manifest.segments for name, file in entry.files.items() if name.startswith("dense_")]
    size = sum(file.bytes for file in files)
    model = f"{record.model} ({record.fingerprint[7:19]})"
    return [("dense", f"{model}, layer {record.layer}, {record.dims} dims, {size / 1e6:,.1f} MB")]


def _distilled_rows(manifest: Manifest) -> list[tuple[str, str]]:
    from retrieve_spec.datastore.distilled import rows_of

    rows = []
    for entry in manifest.distilled:
        counts = {"token": entry.tokens, "context": entry.contexts, "hidden state": rows_of(entry)}
        size = sum(file.bytes for file in entry.files.values())
        parts = [counted(count, noun) for noun, count in counts.items() if count]
        model = f"{entry.title or 'model'} ({entry.model[7:19]})"
        rows.append(("distilled", ", ".join([model, *parts, f"{size / 1e6:,.1f} MB"])))
    return rows


def print_report(report: ChangeReport, store: Path | str, output: Output) -> None:
    """Print the result of a change."""
    if output.as_json:
        rate = report.tokens / max(sum(report.seconds.values()), 1e-9)
        extra = {"store": str(store), "skipped_by_reason": report.skipped_by_reason, "tokens_per_second": rate}
        click.echo(json.dumps(asdict(report) | extra))
        return
    seconds = sum(report.seconds.values())
    click.echo(
        f"{report.verb}: {counted(report.documents, 'document')}, {counted(report.tokens, 'token')} "
        f"in {seconds:.1f} s; {store} has {counted(report.segments, 'segment')}."
    )
    if report.verb == "add" and not report.documents and not report.skipped:
        click.echo("  The sources and filters name no text that fits.")
    if report.dense:
        click.echo(f"  dense: {report.dense['vectors']:,} of {report.dense['positions']:,} positions")
    from retrieve_spec.datastore.change import by_reason
    from retrieve_spec.datastore.git_rules import PART_OF

    admitting: dict[str, str] = {str(reason): part for reason, part in PART_OF.items()}
    for reason, paths in by_reason(report.skipped).items():
        why = f"{reason}; --admit {admitting[reason]}" if reason in admitting else reason
        if output.left_out:
            click.echo("\n    ".join([f"  skipped {len(paths):,} ({why}):", *paths]))
        else:
            named = ", ".join(paths[:_NAMED]) + ", …" * (len(paths) > _NAMED)
            click.echo(f"  skipped {len(paths):,} ({why}): {named}")
