"""Commands that change or share a datastore: each is one library call, reported as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from retrieve_spec.cli_common import PLACE, WholeRange, counted, loading_bars
from retrieve_spec.cli_store_read import ADMIT, JSON, LEFT_OUT, LICENCES, QUIET, STATED, STORE, print_report

if TYPE_CHECKING:
    from retrieve_spec.datastore.sources import Source

_F = TypeVar("_F", bound=Callable[..., Any])
_TEXT_INDEXES = ("both", "exact", "ngram")
_DENSE_INDEXES = ("auto", "flat", "ivf-pq", "hnsw")

_RESUME = click.option("--resume", is_flag=True, help="Continue an interrupted run with the options it began with.")
_RUN = ("max_tokens", "workers", "resume")
"""Options that `build` and `add` hand on as they are."""
_WORKERS = click.option("--workers", type=WholeRange(min=1), metavar="N", help="Processes; all CPUs by default.")


def _source_options(command: _F) -> _F:
    """Options that say what is read."""
    for option in reversed(
        [
            click.argument("sources", nargs=-1, metavar="[SOURCE]..."),
            click.option("--include", multiple=True, metavar="GLOB", help="Only these files; can be repeated."),
            click.option("--exclude", multiple=True, metavar="GLOB", help="Not these files; can be repeated."),
            LICENCES,
            STATED,
            ADMIT,
            LEFT_OUT,
            click.option(
                "--field", default="text", show_default=True, metavar="NAME", help="Text field of JSON Lines, Parquet."
            ),
            click.option("--max-tokens", type=WholeRange(min=1), metavar="N", help="Stop before exceeding N."),
        ]
    ):
        command = option(command)
    return command


def _bars(quiet: bool, loads_model: bool) -> AbstractContextManager[None]:
    """Where a model loads, its bars; elsewhere Transformers need not be imported for them."""
    return loading_bars(not quiet) if loads_model else nullcontext()


def _has_dense(*stores: Path | str) -> bool:
    """Whether a change of these stores runs the model of their dense indexes."""
    from retrieve_spec.datastore.remote import manifest_at

    return any(manifest_at(store).dense is not None for store in stores)


def _was_given(option: str) -> bool:
    """Whether an option of the running command stands on its command line."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _only(given: tuple[str, ...], group: tuple[str, ...]) -> str | None:
    """The one option of a group that was given, if any."""
    found = [name for name in given if name in group]
    if len(found) > 1:
        raise click.UsageError(f"Give one of --index {'|'.join(group)}.")
    return found[0] if found else None


def _sources(options: dict[str, Any]) -> list[Source | str]:
    from retrieve_spec.datastore.sources import Source

    names = ("licence", "include", "exclude", "field", "licences", "admit")
    return [Source(path, **{name: options[name] for name in names}) for path in options["sources"]]


@click.command(short_help="Build a datastore from files, folders or a recipe.")
@click.argument("store", type=PLACE)
@_source_options
@click.option("--tokenizer", metavar="MODEL|FILE", help="Model folder, tokenizer.json, hub id or 'reference'.")
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    metavar="FILE|NAME",
    help="A TOML file that names the sources, or the name of one that comes with the library.",
)
@click.option(
    "--index",
    "indexes",
    type=click.Choice([*_TEXT_INDEXES, *_DENSE_INDEXES]),
    multiple=True,
    help="What to keep of the text (both, exact, or ngram, small enough to ship), and the kind of the dense index "
    "(auto: by size); once for each.",
)
@click.option("--dense", metavar="MODEL", help="Also index the model's hidden states; folder, hub id or 'reference'.")
@click.option("--layer", default="last", show_default=True, metavar="last|N", help="Layer of the dense keys.")
@click.option(
    "--dims", type=WholeRange(min=1), default=64, show_default=True, metavar="N", help="Numbers of a dense key."
)
@click.option("--max-vectors", type=WholeRange(min=1), metavar="N", help="Dense keys at most; all by default.")
@click.option("--thin", is_flag=True, help="No dense keys where the longest match elsewhere predicts the next token.")
@click.option(
    "--part",
    type=(WholeRange(min=0), WholeRange(min=1)),
    metavar="RANK COUNT",
    help="Read only part RANK, from 0, of COUNT; `merge` joins the stores of all parts.",
)
@_WORKERS
@_RESUME
@QUIET
@JSON
def build(
    store: Path | str,
    tokenizer: str | None,
    recipe: Path | None,
    indexes: tuple[str, ...],
    dense: str | None,
    layer: str,
    dims: int,
    max_vectors: int | None,
    thin: bool,
    part: tuple[int, int] | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Build a datastore in the folder STORE.

    A SOURCE is a file, a folder, an address of one, JSON Lines, Parquet, text compressed with gzip or zstd, or - for
    standard input. Of a folder, what git ignores and generated files stay out, of every SOURCE secrets do (--admit).
    """
    from dataclasses import replace

    from retrieve_spec.config import DenseConfig, StoreConfig
    from retrieve_spec.datastore.build import build_datastore
    from retrieve_spec.datastore.recipes import load_recipe

    config, sources, name, resume = StoreConfig(), _sources(options), "", options["resume"]
    if recipe is not None and not resume:
        loaded = load_recipe(recipe, options["sources"], include=options["include"], exclude=options["exclude"])
        wished: dict[str, Any] = {"licences": options["licences"]}
        if options["admit"]:
            wished["admit"] = options["admit"]
        config, sources, name = loaded.config, [replace(s, **wished) for s in loaded.sources], loaded.name
    index: Any = _only(indexes, _TEXT_INDEXES)
    config = replace(config, index=index) if index else config
    kind: Any = _only(indexes, _DENSE_INDEXES)
    if dense is not None:
        where: int | str = int(layer) if layer.isdigit() else layer
        config = replace(config, dense=DenseConfig(dense, where, dims, kind or "auto", max_vectors or 0, thin=thin))
    elif kind or any(map(_was_given, ("layer", "dims", "max_vectors", "thin"))):
        names = f"--layer, --dims, --max-vectors, --thin and --index {'|'.join(_DENSE_INDEXES)}"
        raise click.UsageError(f"Give --dense MODEL with {names}.")
    if not resume and not sources:
        raise click.UsageError("Give at least one SOURCE, or --recipe FILE|NAME.")
    if not resume and tokenizer is None:
        raise click.UsageError("Give --tokenizer: the model, or tokenizer.json, that drafts are for.")
    with _bars(quiet, dense is not None or resume):
        run = {name: options[name] for name in _RUN}
        report = build_datastore(
            store, sources, tokenizer, config=config, part=part, progress=not quiet, recipe=name, **run
        )
    print_report(report, store, as_json, options["left_out"])


@click.command(short_help="Add documents to a datastore.")
@STORE
@_source_options
@_WORKERS
@_RESUME
@QUIET
@JSON
def add(store: Path | str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Add documents to the datastore STORE; texts it already holds are skipped."""
    from retrieve_spec.datastore.build import add_documents

    sources = _sources(options)
    if not options["resume"] and not sources:
        raise click.UsageError("Give at least one SOURCE.")
    with _bars(quiet, _has_dense(store)):
        report = add_documents(store, sources, progress=not quiet, **{name: options[name] for name in _RUN})
    print_report(report, store, as_json, options["left_out"])


@click.command(short_help="Remove documents from a datastore.")
@STORE
@click.argument("documents", nargs=-1, metavar="[DOCUMENT]...")
@click.option("--where", default="", metavar="SQL", help="Condition over the catalogue's documents table.")
@QUIET
@JSON
def remove(store: Path | str, documents: tuple[str, ...], where: str, quiet: bool, as_json: bool) -> None:
    """Remove documents, by path or glob, or those for which an SQL condition holds; nothing is drafted from them."""
    from retrieve_spec.datastore.edit import remove_documents

    if not documents and not where:
        raise click.UsageError("Give DOCUMENT paths or globs, or --where SQL.")
    print_report(remove_documents(store, documents, where=where, progress=not quiet), store, as_json)


@click.command(short_help="Join several datastores into a new one.")
@click.argument("out", type=PLACE)
@click.argument("stores", nargs=-1, type=PLACE, metavar="STORE...")
@_RESUME
@QUIET
@JSON
def merge(out: Path | str, stores: tuple[Path | str, ...], resume: bool, quiet: bool, as_json: bool) -> None:
    """Join STOREs that were built with one tokenizer into the new datastore OUT."""
    from retrieve_spec.datastore.edit import merge_datastores

    if not resume and not stores:
        raise click.UsageError("Give at least one STORE to merge.")
    with _bars(quiet, resume or _has_dense(*stores)):
        report = merge_datastores(out, stores, resume=resume, progress=not quiet)
    print_report(report, out, as_json)


@click.command(short_help="Rewrite a datastore without removed documents.")
@STORE
@_RESUME
@QUIET
@JSON
def compact(store: Path | str, resume: bool, quiet: bool, as_json: bool) -> None:
    """Rewrite a datastore into the segments that a build would make, without the text of removed documents."""
    from retrieve_spec.datastore.edit import compact_datastore

    with _bars(quiet, _has_dense(store)):
        report = compact_datastore(store, resume=resume, progress=not quiet)
    print_report(report, store, as_json)


@click.command(short_help="Rewrite a datastore for another tokenizer.")
@STORE
@click.option("--tokenizer", metavar="MODEL|FILE", help="Model folder, tokenizer.json, hub id or 'reference'.")
@_WORKERS
@_RESUME
@QUIET
@JSON
def retokenize(
    store: Path | str, tokenizer: str | None, workers: int | None, resume: bool, quiet: bool, as_json: bool
) -> None:
    """Rewrite a datastore for another tokenizer, from its own text."""
    from retrieve_spec.datastore.edit import retokenize_datastore

    if not resume and tokenizer is None:
        raise click.UsageError("Give --tokenizer: the model, or tokenizer.json, that drafts are for.")
    report = retokenize_datastore(store, tokenizer, workers=workers, resume=resume, progress=not quiet)
    print_report(report, store, as_json)


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
