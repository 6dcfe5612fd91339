"""Assembly of a server: model, stores, workspace, queue, HTTP."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError, in_a_line
from retrieve_spec.server.app import create_app
from retrieve_spec.server.connections import BoundedConnection
from retrieve_spec.server.guard import check_binding, normal_origins, read_keys
from retrieve_spec.server.jobs import Completion, Task
from retrieve_spec.server.metrics import Metrics
from retrieve_spec.server.provenance import Provenance
from retrieve_spec.server.samplers import make_infill_processor
from retrieve_spec.server.service import Service
from retrieve_spec.server.starting import Progress, Starting
from retrieve_spec.server.workspace import Workspace
from retrieve_spec.server.workspace_store import WorkspaceStore, prepare_store

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore
    from retrieve_spec.server.hf_backend import HuggingFaceBackend

log = logging.getLogger("retrieve_spec.server")

_BACKLOG = 128
_FIRST_TOKEN_S = 0.15
_WINDOW = 2048
"""Tokens around a cursor at least, where the model has room for them."""
_KEEP_ALIVE_S = 75
"""Longer than editors idle between keystrokes, so that a request never meets a connection that is being closed."""


@dataclass(slots=True)
class Served:
    """A service ready to start, and what belongs to it."""

    service: Service
    metrics: Metrics
    provenance: Provenance


def build_service(
    model_name: str,
    config: ServeConfig,
    *,
    shared: bool = False,
    workspaces: Sequence[Path] = (),
    stores: Sequence[Path | str] = (),
    session: Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> Served:
    """Load a model (as `retrieve_spec.reference_model.load_model` does), and put everything around it.

    Parameters
    ----------
    workspaces, stores
        Folders and datastores to draft from.
    session
        File in which the model's answers are kept, each for whoever asked; None keeps none.
    shared
        Whether users with keys of their own share the server.
    """
    from retrieve_spec.reference_model import load_model

    tell = progress or (lambda stage: None)
    tell("loading the weights")
    model, tokenizer = load_model(model_name, dtype=dtype, device=device)
    name = display_name(model_name)
    tell("making the model's passes ready; the first start on a machine compiles the kernels")
    served = assemble(
        model, tokenizer, name, config, shared=shared, workspaces=workspaces, stores=stores, session=session
    )
    model.speculation.assume_frozen()  # nobody else has it
    return served


def assemble(
    model: Any,
    tokenizer: Any,
    name: str,
    config: ServeConfig,
    *,
    shared: bool = False,
    workspaces: Sequence[Path] = (),
    stores: Sequence[Path | str] = (),
    session: Path | None = None,
    clock: Callable[[], float] = monotonic,
) -> Served:
    """Put everything around a loaded model; parameters as in `build_service` and of `Service`."""
    from retrieve_spec.acceleration import accelerate
    from retrieve_spec.datastore.store import open_datastore
    from retrieve_spec.drafting.drafter import Preparable
    from retrieve_spec.drafting.presets import build_drafter
    from retrieve_spec.sampling.acceptance import prepare_sampling
    from retrieve_spec.server.hf_backend import HuggingFaceBackend

    given = [open_datastore(store, tokenizer=tokenizer) for store in stores]
    accelerate(model, tokenizer, datastores=given, session=session or False)
    drafters = model.speculation.drafters
    backend = HuggingFaceBackend(model, tokenizer, config.ctx_size)
    config = _fit(backend, config)
    workspace = Workspace(workspaces, config) if workspaces else None
    provenance = Provenance(given, workspace)
    metrics: Metrics | None = None

    def on_done(task: Task, done: Completion) -> None:
        if metrics is not None:
            metrics.completion(task, done)

    kept = drafters if session else None
    service = Service(backend, tokenizer, name, config, workspace, on_done, shared=shared, drafters=kept, clock=clock)
    end_of_text = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(service.end_ids, default=0)
    infill = make_infill_processor(service.codec, service.end_ids, end_of_text)
    backend.guide(infill, service.grammars, service.beginnings)
    prepare_sampling()
    try:
        backend.warm_up(service.end_ids)  # else the first requests wait for kernels
    except Exception:
        log.exception("requests of some kind will fail")
    metrics = Metrics(lambda: service.queue.queue_length, lambda: service.queue.begun)
    if workspace is not None:

        def prepared(store: Datastore | None) -> list[Datastore]:
            """Stores with which a drafter is ready, whatever it had to compile or load."""
            stores_now = [*given, *([store] if store is not None else [])]
            trial = build_drafter(model.speculation.config, datastores=stores_now)
            if isinstance(trial, Preparable):
                trial.prepare()
            return stores_now

        def attach(store: Datastore | None) -> None:
            stores_now = prepared(store)
            service.queue.run_when_idle(lambda: model.speculation.use_datastores(stores_now))

        try:
            prepare_store(tokenizer, prepared)
        except Exception as error:  # tokenizers raise what they like; without a store there is enough to draft from
            log.warning("a store of the workspace may not be written either: %s", in_a_line(error))
        workspace.follower = WorkspaceStore(workspace, tokenizer, attach)
    return Served(service, metrics, provenance)


def _fit(backend: HuggingFaceBackend, config: ServeConfig) -> ServeConfig:
    """How much is shown to the model: what this machine reads in time, and what its caches may hold.

    While somebody types, the suffix is read anew with every key at worst; the prefix is in a cache.
    """
    most = config.cache_bytes // backend.token_bytes if backend.token_bytes else backend.n_ctx
    if most < 64:
        raise ServeError(
            f"room for a prompt ({64 * backend.token_bytes / 2**20:.0f} MiB) in the caches",
            f"{config.cache_bytes / 2**20:.0f} MiB",
            "Give more with --cache-mib.",
        )
    if most < backend.n_ctx:
        log.info("prompts of at most %d tokens, so that one cache stays below %d bytes", most, config.cache_bytes)
        backend.n_ctx = most
    if not config.fim_window:
        in_time = int(_FIRST_TOKEN_S / backend.measure() / (1.0 - config.prefix_share))
        config = replace(config, fim_window=min(max(in_time, _WINDOW), backend.n_ctx // 2))
    log.info("around a cursor the model is shown %d tokens", config.fim_window)
    return config


def display_name(model_name: str) -> str:
    """How a model is called in answers: the last part of its path, which some editors choose a prompt format by."""
    return "retrieve-spec-qwen2.5-coder-reference" if model_name == "reference" else Path(model_name).name


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; what is sent to it waits until it is served.

    The protocol is named because asyncio sends small answers at once only on such sockets.

    Raises
    ------
    ServeError
        The address is taken, or is not one of this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ServeError(
            f"to listen on {host}, port {port}",
            error.strerror or str(error),
            "End what listens there, or choose another with --port.",
        ) from error
    return listener


def serve(
    model_name: str,
    config: ServeConfig,
    *,
    workspaces: Sequence[Path] = (),
    stores: Sequence[Path | str] = (),
    session: Path | None = None,
    key_file: Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    on_listening: Callable[[str], None] = lambda url: None,
    on_loaded: Callable[[], None] = lambda: None,
) -> None:
    """Serve until interrupted.

    `on_listening` is called with the address when nothing is left to be refused and the model is about to be loaded,
    `on_loaded` when it has been, in the thread that did it.

    Raises
    ------
    ServeError
        The binding is refused, the address is taken, or keys or workspaces are not as they should be.
    StoreError
        A datastore is not there or damaged, or the session's file is something else.
    """
    import uvicorn

    from retrieve_spec.datastore.store import open_datastore
    from retrieve_spec.sources.answers import unpacked

    for store in stores:
        open_datastore(store)  # a wrong folder is said now, not after the model has loaded
    if session is not None:
        unpacked(session)
    keys = read_keys(key_file) if key_file is not None else ()
    check_binding(config.host, keys)
    config = replace(config, origins=normal_origins(config.origins))
    listener = listen(config.host, config.port)  # a taken address is said now

    def make(progress: Progress) -> FastAPI:
        served = build_service(
            model_name,
            config,
            shared=bool(keys),
            workspaces=workspaces,
            stores=stores,
            session=session,
            dtype=dtype,
            device=device,
            progress=progress,
        )
        fim = served.service.fim
        log.info("%s, fill-in-the-middle: %s", served.service.name, fim.fmt.family if fim else served.service.no_fim())
        on_loaded()
        return create_app(
            served.service,
            served.metrics,
            keys=keys,
            provenance=served.provenance,
        )

    starting = Starting(make, lambda: setattr(server, "should_exit", True))
    server = uvicorn.Server(server_settings(starting))
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("listening on %s", url)
    on_listening(url)
    server.run(sockets=[listener])
    if starting.error is not None:
        raise starting.error


def server_settings(app: Any) -> Any:
    """How uvicorn serves: nothing in its log but errors, connections that idle a while, heads that come in time."""
    import uvicorn

    return uvicorn.Config(
        app,
        http=BoundedConnection,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )
