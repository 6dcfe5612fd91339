"""Server processes as users start them, on the bundled model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

pytestmark = pytest.mark.slow

BODY = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    return helper_na", "n_predict": 16}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    def __init__(self, cache, *arguments):
        self.port = free_port()
        environment = {**os.environ, "RETRIEVE_SPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "retrieve_spec.cli", "serve", "--port", str(self.port), *map(str, arguments)]
        self.child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def ready(self, timeout=90.0, indexed=False):
        limit = time.monotonic() + timeout
        while True:
            assert self.child.poll() is None, self.child.stderr.read()
            assert time.monotonic() < limit, "the server did not start"
            try:
                health = self.client.get("/health").json()
                if not indexed or health["workspace"]["indexed"]:
                    return health
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def stop(self, signum=signal.SIGTERM):
        self.child.send_signal(signum)
        self.child.wait(timeout=20)
        self.child.stderr.close()
        self.client.close()


@pytest.fixture
def processes(tmp_path):
    started = []

    def start(*arguments):
        started.append(Process(tmp_path / "cache", *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.child.poll() is None:
            process.stop(signal.SIGKILL)


def test_one_server_answers_while_another_of_the_same_workspace_is_killed(processes, tmp_path):
    workspace = tmp_path / "w"
    workspace.mkdir()
    for i in range(40):
        (workspace / f"m{i}.py").write_text(f"def helper_name_{i}(x):\n    return helper_name_{i - 1}(x)\n" * 30)
    first, second = processes("--workspace", workspace), processes("--workspace", workspace)
    first.ready()
    first.stop(signal.SIGKILL)  # most likely while its store is being built
    second.ready(indexed=True)
    before = second.client.post("/infill", json=BODY)
    assert before.status_code == 200
    third = processes("--workspace", workspace)
    third.ready(indexed=True)
    assert third.client.post("/infill", json=BODY).json()["content"] == before.json()["content"]
    second.stop()
    assert second.child.returncode in (0, -signal.SIGTERM, 143)


def test_binding_to_other_hosts_without_a_key_is_refused(processes):
    process = processes("--host", "0.0.0.0")
    assert process.child.wait(timeout=60) == 1
    assert "--api-key-file" in process.child.stderr.read()
