"""Commands that look into a datastore: each is one library call, its result shown as text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrieve_spec.cli_common import PLACE, TEXT, WholeRange, counted, loading_bars
from retrieve_spec.errors import BuildError

if TYPE_CHECKING:
    from retrieve_spec.datastore.change import ChangeReport
    from retrieve_spec.datastore.manifest import Manifest

_NAMED = 3
"""Paths listed of what was skipped for one reason; `--json` and the catalogue have all."""
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress bars.")
STORE = click.argument("store", type=PLACE)
LICENCES = click.option(
    "--licence",
    "--license",
    "licences",
    multiple=True,
    metavar="SPDX[,…]",
    help="Only text under these licences enters, by its own SPDX lines or the nearest licence file.",
)
STATED = click.option(
    "--stated-licence",
    "--stated-license",
    "licence",
    default="",
    metavar="NAME",
    help="Licence to record with documents; with --licence, with those that state none.",
)
ADMIT = click.option(
    "--admit",
    multiple=True,
    metavar="ignored|generated|secrets[,…]",
    help="Let in what git ignores, generated files, or files with secrets, which otherwise stay out.",
)
LEFT_OUT = click.option("--left-out", is_flag=True, help="List everything that was left out, not the first of a kind.")


@click.command(short_help="Show what a datastore holds.")
@STORE
@JSON
def info(store: Path | str, as_json: bool) -> None:
    """Show what a datastore holds; reads its manifest only."""
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
        *((event["verb"], f"{event['at']}  {counted(event['documents'], 'document')}") for event in manifest.history),
    ]
    click.echo(f"{store}")
    for name, value in rows:
        click.echo(f"  {name:<10} {value}")


@click.command(short_help="Make the database of a datastore's documents.")
@STORE
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Where, instead of catalog.sqlite in STORE."
)
@JSON
def catalog(store: Path | str, out: Path | None, as_json: bool) -> None:
    """Make an SQLite database of the documents of STORE, or bring it up to date, and print where it is."""
    from retrieve_spec.datastore.catalog import write_catalog

    place = write_catalog(store, out)
    click.echo(json.dumps({"store": str(store), "catalog": str(place)}) if as_json else f"{place}")


@click.command(short_help="Check every byte of a datastore.")
@STORE
@QUIET
@JSON
def verify(store: Path | str, quiet: bool, as_json: bool) -> None:
    """Check every checksum, and whether indexes, text and document tables belong together."""
    from retrieve_spec.datastore.verify import verify_datastore

    checked = verify_datastore(store, progress=not quiet)
    if as_json:
        click.echo(json.dumps({"store": str(store), "sound": True, **checked}))
    else:
        click.echo(f"{store} is sound: {checked['files']} files, {checked['tokens']:,} tokens.")


@click.command(short_help="Find where a text stands in a datastore.")
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
@click.option("--dense", is_flag=True, help="Find the places most like the end of TEXT to the model instead.")
@click.option("--model", metavar="MODEL", help="With --dense: where the model is; by default where the build had it.")
@JSON
def search(store: Path | str, text: str, limit: int, dense: bool, model: str | None, as_json: bool) -> None:
    """Find the longest end of TEXT that occurs, what followed it, and in which documents."""
    if not text:
        raise click.UsageError("Give some TEXT to search for.")
    if model is not None and not dense:
        raise click.UsageError("Give --model with --dense only: the longest match needs no model.")
    if dense:
        _search_dense(store, text, limit, model, as_json)
        return
    from retrieve_spec.datastore.search import search_datastore
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


def _search_dense(store: Path | str, text: str, limit: int, model: str | None, as_json: bool) -> None:
    from retrieve_spec.datastore.search import search_dense
    from retrieve_spec.datastore.store import open_datastore

    opened = open_datastore(store)
    with loading_bars():
        found = search_dense(opened, text, model=model, limit=limit)
    if as_json:
        click.echo(json.dumps({"neighbours": [asdict(neighbour) for neighbour in found]}))
        return
    for place in found:
        licence = f" ({place.document.licence})" if place.document.licence else ""
        at = place.position - place.document.start
        click.echo(f"  {place.similarity:.3f}  {place.continuation!r}  {place.document.path}{licence} @ {at}")


def _dense_rows(manifest: Manifest) -> list[tuple[str, str]]:
    if manifest.dense is None:
        return []
    record = manifest.dense
    files = [file for entry in manifest.segments for name, file in entry.files.items() if name.startswith("dense_")]
    size = sum(file.bytes for file in files)
    model = f"{record.model} ({record.fingerprint[7:19]})"
    return [("dense", f"{model}, layer {record.layer}, {record.dims} dims, {size / 1e6:,.1f} MB")]


def print_report(report: ChangeReport, store: Path | str, as_json: bool, left_out: bool = False) -> None:
    """Print what a change did; `left_out`: with the name of everything that did not enter."""
    if as_json:
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
        d = report.dense
        click.echo(
            f"  dense: {d['vectors']:,} of {d['positions']:,} positions ({', '.join(d['kinds'])}), "
            f"recall@10 {d['recall_at_10']:.3f}, {d['bytes_per_vector']:.1f} bytes per vector"
        )
    from retrieve_spec.datastore.change import by_reason
    from retrieve_spec.datastore.entry_filter import Reason

    known = set(Reason)
    for reason, paths in by_reason(report.skipped).items():
        part = Reason(reason).part if reason in known else ""
        why = f"{reason}; --admit {part}" if part else reason
        if left_out:
            click.echo("\n    ".join([f"  skipped {len(paths):,} ({why}):", *paths]))
        else:
            named = ", ".join(paths[:_NAMED]) + ", …" * (len(paths) > _NAMED)
            click.echo(f"  skipped {len(paths):,} ({why}): {named}")
