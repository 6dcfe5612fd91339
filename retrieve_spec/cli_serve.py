"""Commands `retrieve-spec serve`, `lsp`, `editor` and `forget`."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click

from retrieve_spec.cli_common import (
    EXTRAS,
    FILE,
    LOADING,
    MODEL,
    FiniteRange,
    Mebibytes,
    Place,
    WholeRange,
    as_record,
    loading_bars,
)
from retrieve_spec.config import EDITORS, TOOL_FORMATS, DraftSources, LoadOptions, ServeConfig
from retrieve_spec.errors import ServeError

_DEFAULTS = ServeConfig()
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_SOURCES = as_record(
    "sources",
    DraftSources(),
    click.option(
        "--workspace",
        "workspaces",
        multiple=True,
        type=_FOLDER,
        metavar="DIR",
        help="A folder to draft from, followed while it changes; can be repeated.",
    ),
    click.option(
        "--store",
        "stores",
        multiple=True,
        type=Place(exists=True, path_type=Path),
        metavar="S",
        help="A datastore to draft from; can be repeated.",
    ),
    click.option(
        "--session",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Keep the model's answers in this file, by API key, and draft from those in it.",
    ),
)
_LICENCES = click.option(
    "--licence",
    "--license",
    "workspace_licences",
    multiple=True,
    metavar="SPDX[,…]",
    help="Draft only from files of the workspace under these licences.",
)

_BUNDLED = """\
This is the bundled model of 12.6 million parameters, for trying things out: it goes on with Python from the end of a
line, and in the middle of one it mostly repeats what stands there. To write code with, give a model that was trained
on fill-in-the-middle:  retrieve-spec serve --model Qwen/Qwen2.5-Coder-1.5B"""


_GLIBC = {
    "MALLOC_TRIM_THRESHOLD_": (-1, 16 << 20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 1 << 20),
    "MALLOC_ARENA_MAX": (-8, 2),
}
"""Parameters of glibc's `mallopt`, by the environment variables that can set them."""


def begin_loading() -> None:
    """Turn garbage collection off, and let glibc return memory; called before a model's libraries are imported.

    Imports create half a million objects, almost none of which are garbage. Key-value caches of a few MiB are allocated
    and freed all the time; by default glibc takes them from per-thread heaps, of which it returns only the top.
    """
    gc.disable()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for name, (parameter, value) in _GLIBC.items():
        if name not in os.environ:
            mallopt(parameter, value)


def end_loading() -> None:
    """Turn garbage collection on again, with all existing objects excluded.

    Otherwise a collection sometimes takes a third of a second, and all requests wait.
    """
    gc.freeze()
    gc.enable()


def need_extra() -> None:
    """Raise an error that names a missing extra."""
    for package in EXTRAS["serve"]:
        if find_spec(package) is None:
            raise ServeError(
                "to run this command", f"{package} is not installed", "Run: pip install 'retrieve-spec[serve]'"
            )


_SERVING = as_record(
    "config",
    _DEFAULTS,
    _LICENCES,
    click.option("--host", default=_DEFAULTS.host, show_default=True, help="Address to listen on."),
    click.option("--port", default=_DEFAULTS.port, show_default=True, type=WholeRange(0, 65535)),
    click.option(
        "--origin",
        "origins",
        multiple=True,
        metavar="URL",
        help="An allowed browser origin (none by default).",
    ),
    click.option(
        "--allow-host",
        "allowed_hosts",
        multiple=True,
        metavar="NAME",
        help="An allowed Host name of a server without keys, besides this machine's own; for a proxy in front.",
    ),
    click.option(
        "--path-prefix", default="", metavar="PATH", help="Path prefix of requests from a proxy, such as /llm."
    ),
    click.option(
        "--max-body-mib",
        "max_body_bytes",
        default=_DEFAULTS.max_body_bytes >> 20,
        show_default=True,
        type=Mebibytes(min=1),
        help="Largest request accepted.",
    ),
    click.option(
        "--ctx-size",
        default=0,
        type=WholeRange(min=0),
        metavar="N",
        help="Limit of the model's positions that are used (all).",
    ),
    click.option(
        "--fim-window",
        default=0,
        type=WholeRange(min=0),
        metavar="N",
        help="Prompt tokens around a cursor (as many as this machine reads in 150 ms, 2,048 at least).",
    ),
    click.option(
        "--prefix-share",
        default=_DEFAULTS.prefix_share,
        show_default=True,
        type=FiniteRange(0.1, 0.9),
        help="Share of them before the cursor.",
    ),
    click.option(
        "--cache-mib",
        "cache_bytes",
        default=_DEFAULTS.cache_bytes >> 20,
        show_default=True,
        type=Mebibytes(min=1),
        help="Memory of cached prompts.",
    ),
    click.option(
        "--slots", default=_DEFAULTS.slots, show_default=True, type=WholeRange(min=1), help="Number of cached prompts."
    ),
    click.option(
        "--deadline",
        "deadline_s",
        default=_DEFAULTS.deadline_s,
        type=FiniteRange(min=0),
        metavar="S",
        help="Seconds of work after which an answer ends, unless its request has deadline_ms; 0 is never,"
        f" but {_DEFAULTS.infill_deadline_s:g} for /infill.",
    ),
    click.option(
        "--sse-ping",
        "sse_ping_s",
        default=_DEFAULTS.sse_ping_s,
        show_default=True,
        type=FiniteRange(min=0),
        metavar="S",
        help="Seconds without text after which a stream sends a comment, so that clients keep waiting; 0 is never.",
    ),
    click.option(
        "--max-queue",
        default=_DEFAULTS.max_queue,
        show_default=True,
        type=WholeRange(min=1),
        help="Requests that may wait; further ones get 503.",
    ),
    click.option(
        "--tool-format",
        type=click.Choice(TOOL_FORMATS),
        help="How the model writes tool calls (recognised by its chat template).",
    ),
    click.option(
        "--learn-idle",
        is_flag=True,
        help="Between requests, ask the model what follows each token; drafts become better.",
    ),
)


@click.command(short_help="Serve completions to editors over HTTP.")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("reference",),
    show_default=True,
    metavar="[NAME=]reference|PATH|HUB_ID",
    help="A model to run; of several, requests select one, which is loaded at its first request.",
)
@_SOURCES
@_SERVING
@click.option("--api-key-file", "key_file", type=FILE, metavar="F", help="Accepted API keys, one per line.")
@LOADING
@click.option("--quiet", is_flag=True, help="Log errors only.")
def serve(
    models: tuple[str, ...],
    sources: DraftSources,
    config: ServeConfig,
    key_file: Path | None,
    loading: LoadOptions,
    quiet: bool,
) -> None:
    """Serve completions to editors over HTTP.

    Speaks llama.cpp's /infill and /completion, OpenAI's /v1/completions, /v1/chat/completions and /v1/responses,
    Anthropic's /v1/messages, so that llama.vim, llama.vscode, Continue, Zed and minuet work unchanged.
    """
    need_extra()
    from retrieve_spec.server.early import EarlyListener, listen

    early = EarlyListener(listen(config.host, config.port))  # libraries take seconds to import
    begin_loading()
    from retrieve_spec.server.run import serve as run

    logging.basicConfig(level=logging.ERROR if quiet else logging.INFO, format="%(levelname)s: %(message)s")
    config = replace(config, bodies_bytes=max(config.bodies_bytes, config.max_body_bytes))

    def say(url: str) -> None:
        if not quiet:
            click.echo(f"{url} answers 503 while {models[0]} is being loaded (Ctrl-C ends it).", err=True)
            if models[0] == "reference":
                click.echo(_BUNDLED, err=True)

    with closing(early), loading_bars(not quiet):
        still_loads = run(
            models,
            config,
            sources=sources,
            key_file=key_file,
            loading=loading,
            early=early,
            on_listening=say,
            on_loaded=end_loading,
        )
    if still_loads:
        os._exit(0)  # where Python ends a thread that compiles, C++ aborts the process


@click.command(short_help="Serve inline completions as a language server.")
@MODEL
@_SOURCES
@as_record("config", _DEFAULTS, _LICENCES)
@click.option(
    "--connect",
    metavar="URL",
    help="Use the server at this address (retrieve-spec serve) instead of loading a model.",
)
@click.option("--api-key-file", "key_file", type=FILE, metavar="F", help="Key for --connect, on its first line.")
@LOADING
def lsp(
    model: str,
    sources: DraftSources,
    config: ServeConfig,
    connect: str | None,
    key_file: Path | None,
    loading: LoadOptions,
) -> None:
    """Serve inline completions as a language server on standard input and output.

    Answers textDocument/inlineCompletion (LSP 3.18) and drafts from the client's workspace folders.
    """
    need_extra()
    if connect is None:
        begin_loading()
    from retrieve_spec.server.editors import Remote
    from retrieve_spec.server.guard import client_key
    from retrieve_spec.server.lsp import connect_stdio, serve_stdio

    logging.basicConfig(level=logging.WARNING)  # standard error; standard output belongs to the protocol
    if connect is not None:
        connect_stdio(Remote(connect, client_key(key_file)))
        return
    with loading_bars():
        serve_stdio(model, config, sources=sources, loading=loading, on_loaded=end_loading)


@click.command(short_help="Print or write an editor's settings, and try the server.")
@click.argument("name", type=click.Choice(EDITORS), metavar="|".join(EDITORS))
@click.option("--url", default=f"http://{_DEFAULTS.host}:{_DEFAULTS.port}", show_default=True, help="The server.")
@click.option("--api-key-file", "key_file", type=FILE, metavar="F",
              help="Key for the server, on its first line.")  # fmt: skip
@click.option("--write", is_flag=True, help="Write the settings where the editor looks for them, after asking.")
@click.option("--yes", is_flag=True, help="Write without asking.")
def editor(name: str, url: str, key_file: Path | None, write: bool, yes: bool) -> None:
    """Print the settings that connect an editor to a server, or write them; then show a first completion.

    Settings go to standard output, everything else to standard error. Other contents of a settings file are kept if
    possible, and a backup of the file is made.
    """
    need_extra()
    from retrieve_spec.server import editors
    from retrieve_spec.server.guard import client_key

    def say(text: str) -> None:
        click.echo(text, err=True)

    remote = editors.Remote(url, client_key(key_file))
    status, found = remote.ask("GET", "/health")
    health = found if status == 200 and isinstance(found, dict) else None
    text = editors.EDITORS[name].text(remote, health)
    path = editors.settings_file(name)
    say(f"For {name}: {editors.EDITORS[name].needs}.")
    if write:
        content = editors.merged(name, text, path)
        say(text)
        if yes or click.confirm(f"Write this into {path}?", err=True):
            kept = editors.write(path, content)
            say(f"Written to {path}." + (f" What stood there before the first time is in {kept}." if kept else ""))
    else:
        click.echo(text, nl=not text.endswith("\n"))
        say(f"The editor looks for this in {path} (--write puts it there).")
    if health is None:
        what = "is loading its model" if status == 503 else f"answers {status}" if status else "does not answer"
        say(f"{remote.url} {what}. Start one:  retrieve-spec serve --model Qwen/Qwen2.5-Coder-1.5B --workspace DIR")
        return
    say(f"\n{remote.url} serves {health.get('model')}; fill-in-the-middle: {health.get('fim') or 'no'}.")
    if not health.get("fim"):
        raise ServeError(
            "to fill in the middle", str(health.get("fim_missing", "the model cannot")), "Serve another model."
        )
    completion, model_ms = editors.first_completion(remote)
    above, line, below = editors.PROBE
    say(f"A first completion ({model_ms:.0f} ms):\n")
    say(above + line + click.style(completion, fg="green", bold=True) + below)
    if health.get("model") == editors.display_name("reference"):
        say("That is the bundled model, for trying things out. To write code, serve one trained on fill-in-the-middle.")


@click.command(short_help="Delete what is kept of workspaces.")
@click.argument("workspaces", nargs=-1, type=click.Path(path_type=Path))
def forget(workspaces: tuple[Path, ...]) -> None:
    """Delete what is kept on disk about these folders, even if others were opened with them. Without folders, list it.

    A running server keeps what it has in memory until it ends, or gets the request DELETE /v1/workspace.
    """
    need_extra()
    from retrieve_spec.server.workspace import forget_workspace, kept_workspaces

    if not workspaces:
        kept = kept_workspaces()
        for folders in kept.values():
            click.echo(_named(folders))
        if not kept:
            click.echo("Nothing is kept about any folder.")
        return
    gone = forget_workspace(workspaces)
    for folders in gone:
        click.echo(f"Forgotten: {_named(folders)}")
    if not gone:
        click.echo("Nothing was kept about it.")


def _named(folders: Sequence[Path]) -> str:
    """Return folders on one line."""
    return " ".join(map(click.format_filename, folders)) or "(an unfinished store)"
