"""Assembly of a server: model, stores, workspace, queue, HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from retrieve_spec.acceleration import accelerate
from retrieve_spec.config import DraftSources, LoadOptions, ServeConfig
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.drafting.drafter import Preparable
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.errors import ServeError
from retrieve_spec.kernels.compiled_code import report_compiling
from retrieve_spec.reference_model import load_model
from retrieve_spec.sampling.acceptance import prepare_sampling
from retrieve_spec.server.app import create_app
from retrieve_spec.server.backend import Backend
from retrieve_spec.server.early import EarlyListener, listen
from retrieve_spec.server.editors import display_name
from retrieve_spec.server.guard import Metrics, check_binding, read_keys
from retrieve_spec.server.models import Model, Models, named
from retrieve_spec.server.sampling import InfillProcessor, of_one_text
from retrieve_spec.server.service import Service
from retrieve_spec.server.workspace import Workspace
from retrieve_spec.sources.answers import unpacked

log = logging.getLogger("retrieve_spec.server")

_FIRST_TOKEN_S = 0.15
_WINDOW = 2048
"""The least tokens around a cursor, if the model has positions for them."""
_KEEP_ALIVE_S = 75
"""Longer than the pauses of editors between keystrokes, so that no request meets a connection being closed."""


def build_service(
    model_name: str,
    config: ServeConfig,
    *,
    shared: bool = False,
    sources: DraftSources = DraftSources(),
    name: str | None = None,
    metrics: Metrics | None = None,
    loading: LoadOptions = LoadOptions(),
    progress: Callable[[str], None] = lambda stage: None,
) -> Service:
    """Load a model with `retrieve_spec.reference_model.load_model`, and build its service.

    Parameters
    ----------
    sources
        Sources of drafts.
    shared
        Whether users with API keys share the server.
    name
        Name of the model in answers; None: `display_name` of ``model_name``.
    progress
        Called with what is being done.
    """
    progress("loading the weights")
    model, tokenizer = load_model(model_name, **asdict(loading))
    service = assemble(
        model,
        tokenizer,
        name or display_name(model_name),
        config,
        shared=shared,
        sources=sources,
        metrics=metrics,
        progress=progress,
    )
    model.speculation.assume_frozen()  # no other code holds the model
    return service


def assemble(
    model: Any,
    tokenizer: Any,
    name: str,
    config: ServeConfig,
    *,
    shared: bool = False,
    sources: DraftSources = DraftSources(),
    metrics: Metrics | None = None,
    clock: Callable[[], float] = monotonic,
    progress: Callable[[str], None] = lambda stage: None,
) -> Service:
    """Build the service of a loaded model; parameters as for `build_service` and `Service`."""
    given = [open_datastore(store, tokenizer=tokenizer) for store in sources.stores]
    model.generation_config = of_one_text(model.generation_config)
    progress("making the model's passes ready; the first start on a machine compiles their kernels")
    accelerate(model, tokenizer, datastores=given, session=sources.session or False)
    drafters = model.speculation.drafters
    backend = Backend(model, tokenizer, config.ctx_size)
    config = _fit(backend, config)

    def attach(store: Datastore | None) -> None:
        stores_now = given if store is None else [*given, store]
        trial = build_drafter(model.speculation.config, datastores=stores_now)
        if isinstance(trial, Preparable):
            trial.prepare()  # compiles or loads everything
        service.queue.run_when_idle(lambda: model.speculation.use_datastores(stores_now))

    workspace = Workspace(sources.workspaces, config, tokenizer, attach) if sources.workspaces else None
    service = Service(
        backend,
        tokenizer,
        name,
        config,
        workspace,
        shared=shared,
        drafters=drafters if sources.session else None,
        metrics=metrics,
        generation_config=model.generation_config,
        clock=clock,
    )
    end_of_text = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(service.end_ids, default=0)
    infill = partial(InfillProcessor, service.codec, service.end_ids, end_of_text)
    backend.guide(infill, service.grammars, service.beginnings)
    progress("making samplers ready; the first start on a machine compiles them")
    prepare_sampling()
    progress("trying requests of every kind; the first start on a machine compiles the kernels of drafting")
    try:
        backend.warm_up(service.end_ids)  # else the first requests wait for kernels
    except Exception:
        log.exception("requests of some kind will fail")
    return service


def _fit(backend: Backend, config: ServeConfig) -> ServeConfig:
    """Return the tokens around the cursor that this machine reads in time and that fit the caches.

    At worst the suffix is read again with every key; the prefix is cached.
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


def serve(
    names: Sequence[str],
    config: ServeConfig,
    *,
    sources: DraftSources = DraftSources(),
    key_file: Path | None = None,
    loading: LoadOptions = LoadOptions(),
    early: EarlyListener | None = None,
    on_listening: Callable[[str], None] = lambda url: None,
    on_loaded: Callable[[], None] = lambda: None,
) -> bool:
    """Serve until interrupted; return whether a model was still being loaded, which only the process's end ends.

    `names` are models in the form of `named`. The first is loaded now, each other one at its first request; datastores
    and the session's file belong to the first, because they contain its tokens.

    `early` is a listener at the address; without it a new one begins. `on_listening` is called with the address after
    all checks, before the first model is loaded; `on_loaded` after that, in the loading thread.

    Raises
    ------
    ServeError
        The address needs a key or is in use, or keys or workspaces are invalid.
    StoreError
        A datastore is missing or damaged, or the session's file is another kind of file.
    """
    paths = named(names)
    for store in sources.stores:
        open_datastore(store)  # raises now for a wrong folder, not after loading the model
    if sources.session is not None:
        unpacked(sources.session)
    keys = read_keys(key_file) if key_file is not None else ()
    check_binding(config.host, keys)
    early = early or EarlyListener(listen(config.host, config.port))  # raises now for a taken address
    metrics = Metrics()

    build = partial(build_service, config=config, shared=bool(keys), metrics=metrics, loading=loading)

    def build_first() -> Service:
        first = models.first
        with report_compiling(models.count_kernel):
            service = build(paths[first], name=first, sources=sources, progress=models.set_stage)
        log.info("%s, fill-in-the-middle: %s", service.name, service.family or service.no_fim())
        on_loaded()
        return service

    folders = replace(sources, stores=(), session=None)
    known = {name: Model(partial(build, path, name=name, sources=folders)) for name, path in paths.items()}
    models = Models(known, config, metrics, on_failure=lambda: setattr(server, "should_exit", True))
    known[models.first].load = build_first
    server = uvicorn.Server(server_settings(create_app(models, keys=keys)))
    host, port = early.socket.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("listening on %s", url)
    on_listening(url)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has ended
        server.run(sockets=[early.release()])
    if models.error is not None:
        raise models.error
    return any(model.state == "loading" for model in known.values())


def server_settings(app: Any) -> Any:
    """Return uvicorn's settings: it logs errors only, keeps idle connections open, and bounds the time of headers."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
        ws="none",
    )


HEAD_S = 20.0
"""Seconds from the connection, or a request's first byte, to the end of the headers."""
HEAD_BYTES = 64 << 10
_OFFER = frozenset({b"upgrade", b"http2-settings", b"connection"})


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with limits of time and bytes for the headers.

    An offer to upgrade the protocol (`Upgrade: h2c` of every Java client) is ignored, which HTTP allows.
    """

    _timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start the timer for a request; the first one is timed since the connection."""
        self._head_bytes = 0
        if self._timer is None:
            self._wait()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count bytes of the path."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count bytes of a header."""
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer; the body has its own limit."""
        self._stop_waiting()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the request; after an offer to upgrade, the parser calls this without having read a body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Read bytes of requests."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            if self.parser.get_method() == b"CONNECT":
                self._refuse(b"405 Method Not Allowed")
                return
            head, self.parser = self._head_without_offer(), HttpRequestParser(self)
            self.data_received(head + data[offer.args[0] :])
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _head_without_offer(self) -> bytes:
        """Return the headers without the offer to upgrade."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name not in _OFFER]
        closes = any(name == b"connection" and b"close" in value.lower() for name, value in self.headers)
        return b"\r\n".join([*lines, *([b"connection: close"] if closes else []), b"", b""])

    def shutdown(self) -> None:
        """End the server's streams; an answer that is not streamed is still sent."""
        super().shutdown()
        cycle = self.cycle
        if cycle is not None and cycle.chunked_encoding and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.close()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._refuse, b"408 Request Timeout")

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, piece: bytes) -> None:
        self._head_bytes += len(piece)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def _refuse(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()
