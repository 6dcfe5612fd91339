"""Server processes as users start them, on the bundled model."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from waiting import HANG_S, wait_for

pytestmark = pytest.mark.slow

BODY = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    return helper_na", "n_predict": 16}


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


def test_a_server_that_is_ended_says_so_to_who_waits(processes):
    server = processes()
    server.ready()
    body = {"n_predict": 1900, "speculative": False}
    with ThreadPoolExecutor(8) as pool:
        for name in "fghijk":  # four are decoded in turns, the others wait: then all are known to have arrived
            client = httpx.Client(base_url=server.client.base_url, timeout=HANG_S, trust_env=False)
            other = {**body, "prompt": f"def {name}(x):"}
            answer = pool.submit(client.post, "/completion", json=other, headers={"X-Client-Id": name})
        wait_for(lambda: "retrieve_spec_queue_length 2.0" in server.client.get("/metrics").text)
        assert not answer.done()
        errors = server.stop()
        shown = answer.result(HANG_S)
    assert shown.status_code == 503, shown.text
    assert "the server is stopping" in shown.text
    assert "Traceback" not in errors
