"""What a starting server says: mistakes before the model loads, progress while it does."""

import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from live import Process
from waiting import HANG_S, wait_for

from retrieve_spec.config import DraftSources, ServeConfig
from retrieve_spec.errors import ServeError, StoreCorruptError, StoreNotFoundError
from retrieve_spec.server import run
from retrieve_spec.server.early import EarlyListener, listen


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"stores": (".",)}, StoreNotFoundError, r"no manifest\.json"),
        ({"session": Path("notes.txt")}, StoreCorruptError, r"a file of answers in .*notes\.txt"),
    ],
)
def test_what_is_no_store_or_session_is_refused_at_once(tmp_path, monkeypatch, given, error, told):
    monkeypatch.setattr(run, "build_service", lambda *_, **__: pytest.fail("loaded a model"))
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("not answers")
    with pytest.raises(error, match=told):
        run.serve(["reference"], ServeConfig(port=0), sources=DraftSources(**given))
    assert Path("notes.txt").read_text() == "not answers"


def test_the_address_that_is_said_is_the_one_that_answers(tmp_path):
    """And a model that cannot be loaded ends the server."""
    heard = []
    for host, said in (("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")):
        with pytest.raises(Exception, match="nowhere"):
            run.serve([str(tmp_path / "nowhere")], ServeConfig(host=host, port=0), on_listening=heard.append)
        assert heard[-1].startswith(said) and int(heard[-1].rpartition(":")[2]) > 0


@pytest.fixture(scope="module")
def server(server_cache):
    """A server that has just been started."""
    one = Process(server_cache)
    yield one
    if one.child.poll() is None:
        one.stop(signal.SIGKILL)


def test_requests_before_the_model_is_there_are_told_so_at_once(server):
    seen = []

    def answers(status):
        seen.append(server.health())
        return seen[-1] is not None and seen[-1].status_code == status

    wait_for(lambda: answers(503))
    first = seen[-1].json()
    assert (first["status"], first["error"]["type"]) == ("loading", "unavailable_error")
    assert first["loading"]["stage"] and seen[-1].headers["retry-after"] == "1"
    infill = server.client.post("/infill", json={"input_prefix": "", "input_suffix": ""})
    assert infill.status_code == 503
    wait_for(lambda: answers(200))
    assert any("compiles" in said.json()["loading"]["stage"] for said in seen if said and said.status_code == 503)


def test_a_server_that_is_ended_says_so_to_who_waits(server):
    server.ready()
    body = {"n_predict": 1900, "speculative": False}
    with ThreadPoolExecutor(8) as pool:
        for name in "fghijk":  # four are decoded in turns, the others wait: then all are known to have arrived
            client = httpx.Client(base_url=server.client.base_url, timeout=HANG_S, trust_env=False)
            other = {**body, "prompt": f"def {name}(x):"}
            answer = pool.submit(client.post, "/completion", json=other, headers={"X-Client-Id": name})
        wait_for(lambda: "retrieve_spec_queue_length 2.0" in server.client.get("/metrics").text)
        assert not answer.done()
        said = server.stop(signal.SIGINT)
        shown = answer.result(HANG_S)
    assert shown.status_code == 503, shown.text
    assert "the server is stopping" in shown.text
    assert "bundled model" in said and "--model Qwen/Qwen2.5-Coder-1.5B" in said
    assert "Traceback" not in said


def test_a_server_that_compiles_says_how_far_it_is_and_can_be_interrupted(processes, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    server = processes()
    wait_for(lambda: any(tmp_path.rglob("*.nbi")))
    wait_for(lambda: (said := server.health()) and " so far)" in said.json()["loading"]["stage"])
    said = server.stop(signal.SIGINT)
    assert server.child.returncode == 0 and "terminate called" not in said


def test_the_address_answers_before_libraries_are_imported():
    early = EarlyListener(listen("127.0.0.1", 0))
    url = f"http://127.0.0.1:{early.socket.getsockname()[1]}"
    try:
        with socket.create_connection(early.socket.getsockname()):  # says nothing, and holds nobody up for long
            for ask in (httpx.get, httpx.post):
                said = ask(f"{url}/health", timeout=60, trust_env=False)
                assert (said.status_code, said.json()["status"]) == (503, "loading")
                assert said.json()["loading"]["stage"] and said.headers["retry-after"] == "1"
        with pytest.raises(ServeError, match="listen on"):
            listen(*early.socket.getsockname())
    finally:
        early.close()


def test_a_server_answers_while_it_imports(processes):
    """What the importing thread leaves of the processor is enough for that."""
    server = processes()
    wait_for(lambda: server.health() is not None)
    assert server.health().json()["loading"]["stage"] == "importing libraries"
    server.stop(signal.SIGTERM)
    assert server.child.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
