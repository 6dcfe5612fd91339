"""Servers that listen on free ports: in a thread of the test process, or as users start them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import uvicorn
from processes import running
from waiting import HANG_S, wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.app import create_app
from retrieve_spec.server.early import listen
from retrieve_spec.server.guard import Metrics
from retrieve_spec.server.models import Models
from retrieve_spec.server.run import server_settings
from retrieve_spec.server.service import Service


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Noted(Metrics):
    """Counters that keep what they count."""

    def __init__(self):
        super().__init__()
        self.done = []

    def completion(self, task, done):
        super().completion(task, done)
        self.done.append((task, done))


class Live:
    def __init__(self, backend, tokenizer, *, config=None, keys=(), workspace=None, service=None, app=None, **options):
        noted = Noted()
        self.done, self.backend = noted.done, backend
        self.service = service or Service(
            backend, tokenizer, "tiny", config or ServeConfig(), workspace, shared=bool(keys), metrics=noted, **options
        )
        self.app = app = app or create_app(Models.of(self.service), keys=keys)
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(server_settings(app))
        self._server.install_signal_handlers = lambda: None
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=HANG_S, trust_env=False)
        wait_for(lambda: self._server.started and self.client.get("/health").status_code != 503)

    def post(self, path, body, **kwargs):
        return self.client.post(path, json=body, **kwargs)

    def ask(self, key, method, path, body=None):
        """What somebody's key is answered with."""
        return self.client.request(method, path, json=body, headers={b"authorization": b"Bearer " + key})

    def events(self, path, body):
        """The events of a stream, as they stand behind `data: `."""
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            text = "".join(response.iter_text())
        blocks = text.split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
        return [block.removeprefix("data: ") for block in blocks]

    def stop(self):
        if hasattr(self.backend, "gate"):
            self.backend.gate.release(100_000)
        self.client.close()
        self._server.should_exit = True
        self._thread.join(HANG_S)


class Process:
    """`retrieve-spec serve` with the bundled model, in a process of its own."""

    def __init__(self, cache, *arguments):
        port = free_port()
        environment = {**os.environ, "RETRIEVE_SPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "retrieve_spec.cli", "serve", "--port", str(port), *map(str, arguments)]
        self._running = contextlib.ExitStack()
        self.child = self._running.enter_context(running(command, env=environment, stderr=subprocess.PIPE, text=True))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S, trust_env=False)

    def health(self):
        """What it says of itself, None before it listens."""
        assert self.child.poll() is None, self.child.stderr.read()
        try:
            return self.client.get("/health")
        except httpx.TransportError:
            return None

    def ready(self, indexed=False):
        def is_ready():
            said = self.health()
            return said and said.status_code == 200 and (not indexed or said.json()["workspace"]["indexed"])

        wait_for(is_ready)

    def stop(self, signum=signal.SIGTERM):
        """End it; what it has written to standard error."""
        with self._running:
            self.child.send_signal(signum)
            _, said = self.child.communicate()
        self.client.close()
        return said
