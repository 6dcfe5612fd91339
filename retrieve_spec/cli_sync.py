"""Command `retrieve-spec sync`: a store that follows folders, reported as text or JSON."""

from __future__ import annotations

from pathlib import Path

import click

from retrieve_spec.cli_store_read import ADMIT, JSON, LEFT_OUT, LICENCES, QUIET, STATED, STORE, print_report


@click.command(short_help="Make a datastore say what folders say.")
@STORE
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option("--tokenizer", metavar="MODEL|FILE", help="Model folder, tokenizer.json, hub id or 'reference'; once.")
@LICENCES
@STATED
@ADMIT
@LEFT_OUT
@click.option("--watch", is_flag=True, help="Go on whenever something changes, until interrupted.")
@QUIET
@JSON
def sync(
    store: Path | str,
    folders: tuple[str, ...],
    tokenizer: str | None,
    licence: str,
    licences: tuple[str, ...],
    admit: tuple[str, ...],
    left_out: bool,
    watch: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Make STORE say what FOLDERs say: new, changed, moved and deleted files. What git ignores, secrets and generated
    files stay out (--admit)."""
    from retrieve_spec.datastore.sync import sync_datastore, watch_folders

    if watch:
        watch_folders(
            store,
            folders,
            tell=lambda report: print_report(report, store, as_json, left_out),
            tokenizer=tokenizer,
            licence=licence,
            licences=licences,
            admit=admit,
        )
        return
    report = sync_datastore(
        store, folders, tokenizer, licence=licence, licences=licences, admit=admit, progress=not quiet
    )
    print_report(report, store, as_json, left_out)
