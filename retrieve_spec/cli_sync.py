"""Turns the command that follows folders into library calls, and the reports into text or JSON."""

from __future__ import annotations

from pathlib import Path

import click

from retrieve_spec.cli_store_read import JSON, LICENCES, QUIET, STATED, STORE, print_report


@click.command(short_help="Make a datastore say what folders say.")
@STORE
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option("--tokenizer", metavar="MODEL|FILE", help="Model folder, tokenizer.json, hub id or 'reference'; once.")
@LICENCES
@STATED
@click.option("--watch", is_flag=True, help="Go on whenever something changes, until interrupted.")
@QUIET
@JSON
def sync(
    store: Path,
    folders: tuple[str, ...],
    tokenizer: str | None,
    licence: str,
    licences: tuple[str, ...],
    watch: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Make STORE say what FOLDERs say: new, changed, moved and deleted files. What git ignores, secrets and generated
    files stay out."""
    from retrieve_spec.datastore.sync import sync_datastore, watch_folders

    if watch:
        watch_folders(
            store,
            folders,
            tell=lambda report: print_report(report, store, as_json),
            tokenizer=tokenizer,
            licence=licence,
            licences=licences,
        )
        return
    report = sync_datastore(store, folders, tokenizer, licence=licence, licences=licences, progress=not quiet)
    print_report(report, store, as_json)
