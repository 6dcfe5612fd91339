"""What a starting server says: mistakes before the model loads, progress while it does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from live import free_port
from waiting import wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import StoreCorruptError, StoreNotFoundError
from retrieve_spec.server import run


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"stores": ["."]}, StoreNotFoundError, r"no manifest\.json"),
        ({"session": Path("notes.txt")}, StoreCorruptError, r"a file of answers in .*notes\.txt"),
    ],
)
def test_what_is_no_store_or_session_is_refused_at_once(tmp_path, monkeypatch, given, error, told):
    monkeypatch.setattr(run, "build_service", lambda *_, **__: pytest.fail("loaded a model"))
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("not answers")
    with pytest.raises(error, match=told):
        run.serve("reference", **{"config": ServeConfig(port=0), **given})
    assert Path("notes.txt").read_text() == "not answers"


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    with pytest.raises(Exception, match="nowhere"):
        run.serve(str(tmp_path / "nowhere"), ServeConfig(port=0))


def test_the_address_that_is_said_is_the_one_that_answers(tmp_path):
    heard = []
    for host, said in (("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")):
        with pytest.raises(Exception, match="nowhere"):
            run.serve(str(tmp_path / "nowhere"), ServeConfig(host=host, port=0), on_listening=heard.append)
        assert heard[-1].startswith(said) and int(heard[-1].rpartition(":")[2]) > 0


def test_requests_before_the_model_is_there_are_told_so_at_once():
    port = free_port()
    command = [sys.executable, "-m", "retrieve_spec.cli", "serve", "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        url = f"http://127.0.0.1:{port}"
        seen = []

        def answered():
            try:
                seen.append(httpx.get(url + "/health", timeout=60, trust_env=False))
            except httpx.ConnectError:
                assert server.poll() is None, server.stderr.read()
                return False
            return True

        wait_for(answered)
        first = seen[-1]
        assert first.status_code == 503
        assert first.json()["status"] == "loading"
        assert first.json()["error"]["type"] == "unavailable_error"
        assert first.json()["loading"]["stage"]
        assert first.headers["retry-after"] == "1"
        infill = httpx.post(url + "/infill", json={"input_prefix": "", "input_suffix": ""}, trust_env=False)
        assert infill.status_code == 503
        wait_for(lambda: answered() and seen[-1].status_code == 200, timeout=300)
        stages = {answer.json()["loading"]["stage"] for answer in seen if answer.status_code == 503}
        assert any("compiles" in stage for stage in stages)
    finally:
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=60)
    assert "bundled model" in said and "--model Qwen/Qwen2.5-Coder-1.5B" in said
    assert "Traceback" not in said
