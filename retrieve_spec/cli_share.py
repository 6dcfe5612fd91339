"""Commands that share a datastore: each is one library call, reported as text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from retrieve_spec.cli_common import counted
from retrieve_spec.cli_store_read import JSON, QUIET, STORE, print_report


@click.command(short_help="Bring a datastore to a remote.")
@STORE
@click.argument("url")
@click.option("--keep-paths", is_flag=True, help="Let places of this machine go with it.")
@QUIET
@JSON
def push(store: Path | str, url: str, keep_paths: bool, quiet: bool, as_json: bool) -> None:
    """Make URL (s3://…, gs://…, hf://…, file://…) hold what STORE holds; only what is missing there travels."""
    from retrieve_spec.datastore.share import push_datastore

    report = push_datastore(store, url, keep_paths=keep_paths, progress=not quiet)
    if as_json:
        click.echo(json.dumps(asdict(report)))
        return
    click.echo(
        f"push: {counted(report.files, 'file')}, {report.bytes / 1e6:,.1f} MB; {report.kept:,} were there; "
        f"{url} is at version {report.version}."
    )


@click.command(short_help="Bring a datastore from a remote.")
@click.argument("url")
@STORE
@QUIET
@JSON
def pull(url: str, store: Path | str, quiet: bool, as_json: bool) -> None:
    """Bring what URL holds into STORE, which is made when there is none; only what is missing here travels."""
    from retrieve_spec.datastore.share import pull_datastore

    print_report(pull_datastore(url, store, progress=not quiet), store, as_json)
