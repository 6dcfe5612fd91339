"""Server processes as users start them, on the bundled model."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live import free_port

pytestmark = pytest.mark.slow

BODY = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    return helper_na", "n_predict": 16}


class Process:
    def __init__(self, cache, *arguments):
        self.port = free_port()
        environment = {**os.environ, "RETRIEVE_SPEC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "retrieve_spec.cli", "serve", "--port", str(self.port), *map(str, arguments)]
        self.child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def ready(self, timeout=180.0, indexed=False):
        limit = time.monotonic() + timeout
        while True:
            assert self.child.poll() is None, self.child.stderr.read()
            assert time.monotonic() < limit, "the server did not start"
            try:
                answer = self.client.get("/health")
                if answer.status_code == 200 and (not indexed or answer.json()["workspace"]["indexed"]):
                    return answer.json()
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def stop(self, signum=signal.SIGTERM):
        self.child.send_signal(signum)
        self.child.wait(timeout=60)
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


def test_a_server_that_is_ended_says_so_to_who_waits(processes):
    server = processes()
    server.ready()
    body = {"n_predict": 1900, "speculative": False}
    with ThreadPoolExecutor(8) as pool:
        for name in "fghijk":  # four are decoded in turns, the others wait: then all are known to have arrived
            client = httpx.Client(base_url=server.client.base_url, timeout=60, trust_env=False)
            other = {**body, "prompt": f"def {name}(x):"}
            answer = pool.submit(client.post, "/completion", json=other, headers={"X-Client-Id": name})
        limit = time.monotonic() + 60
        while "retrieve_spec_queue_length 2.0" not in server.client.get("/metrics").text:
            assert time.monotonic() < limit
            assert not answer.done()
        server.child.send_signal(signal.SIGTERM)
        shown = answer.result(60)
    _, errors = server.child.communicate(timeout=60)
    assert shown.status_code == 503, shown.text
    assert "the server is stopping" in shown.text
    assert "Traceback" not in errors
