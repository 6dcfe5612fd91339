"""Turns `retrieve-spec serve`, `lsp` and `forget` into calls of the server."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click

from retrieve_spec.cli_common import loading_bars
from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError

_DEFAULTS = ServeConfig()
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_model = click.option(
    "--model", default="reference", show_default=True, metavar="reference|PATH|HUB_ID", help="The model to run."
)
_dtype = click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto", show_default=True
)
_device = click.option("--device", default="auto", show_default=True, metavar="DEVICE", help="'cpu', 'cuda', …")
_workspace = click.option(
    "--workspace",
    "workspaces",
    multiple=True,
    type=_FOLDER,
    metavar="DIR",
    help="A folder to draft from, kept current while it changes; may be given more than once.",
)
_store = click.option(
    "--store",
    "stores",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="S",
    help="A datastore to draft from; may be given more than once.",
)


def _need_extra() -> None:
    for package in (
        "starlette",
        "uvicorn",
        "pydantic",
        "sse_starlette",
        "prometheus_client",
        "pygls",
        "watchfiles",
    ):
        if find_spec(package) is None:
            raise ServeError(
                "the packages of the server", f"no {package}", "Install them with: pip install 'retrieve-spec[serve]'"
            )


@click.command(short_help="Serve completions to editors over HTTP.")
@_model
@_workspace
@_store
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Where to listen.")
@click.option("--port", default=_DEFAULTS.port, show_default=True, type=click.IntRange(0, 65535))
@click.option("--api-key-file", "key_file", type=_FILE, metavar="F", help="Accepted API keys, one a line.")
@click.option(
    "--origin", "origins", multiple=True, metavar="URL", help="A browser origin that may call (none may by default)."
)
@click.option(
    "--slots", default=_DEFAULTS.slots, show_default=True, type=click.IntRange(min=1), help="Prompts kept warm."
)
@_dtype
@_device
@click.option("--quiet", is_flag=True, help="Only errors.")
def serve(
    model: str,
    workspaces: tuple[Path, ...],
    stores: tuple[Path, ...],
    host: str,
    port: int,
    key_file: Path | None,
    origins: tuple[str, ...],
    slots: int,
    dtype: str,
    device: str,
    quiet: bool,
) -> None:
    """Serve completions to editors over HTTP.

    Speaks llama.cpp's /infill and /completion, OpenAI's /v1/completions and /v1/chat/completions, and Tabby's
    completions, so that llama.vim, llama.vscode, Continue, Zed, minuet and Tabby clients work unchanged.
    """
    _need_extra()
    from retrieve_spec.server.run import serve as run

    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, format="%(levelname)s: %(message)s")
    config = replace(_DEFAULTS, host=host, port=port, origins=origins, slots=slots)
    if not quiet:
        click.echo(f"Loading {model}; then serving on http://{host}:{port} (Ctrl-C ends it).", err=True)
    with loading_bars(not quiet):
        run(model, config, workspaces=workspaces, stores=stores, key_file=key_file, dtype=dtype, device=device)


@click.command(short_help="Serve inline completions as a language server.")
@_model
@_workspace
@_store
@_dtype
@_device
def lsp(model: str, workspaces: tuple[Path, ...], stores: tuple[Path, ...], dtype: str, device: str) -> None:
    """Serve inline completions as a language server on standard input and output.

    Answers textDocument/inlineCompletion (LSP 3.18) and drafts from the client's workspace folders.
    """
    _need_extra()
    from retrieve_spec.server.lsp import serve_stdio

    logging.basicConfig(level=logging.WARNING)  # standard error; standard output belongs to the protocol
    with loading_bars():
        serve_stdio(model, _DEFAULTS, workspaces=workspaces, stores=stores, dtype=dtype, device=device)


@click.command(short_help="Delete what is kept about workspaces.")
@click.argument("workspaces", nargs=-1, required=True, type=click.Path(path_type=Path))
def forget(workspaces: tuple[Path, ...]) -> None:
    """Delete what is kept on disk about the workspace of these folders (as given to --workspace together)."""
    _need_extra()
    from retrieve_spec.server.workspace import forget_workspace

    click.echo("Forgotten." if forget_workspace(workspaces) else "Nothing was kept about it.")
