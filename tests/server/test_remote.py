"""Editors that share a server: they ask it over HTTP."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from lsprotocol import types as lsp
from processes import running
from waiting import HANG_S, wait_for

from retrieve_spec.errors import ServeError
from retrieve_spec.server.editors import Remote
from retrieve_spec.server.lsp import connected

EXTRA = [{"text": "other = 1\n", "filename": "b.py"}]
KIND = lsp.InlineCompletionTriggerKind.Automatic
CURSOR = ("file:///a.py", "def add(a, b):\n    ret", "\n", EXTRA, KIND)


def with_editor(server, ask, key=""):
    """What `ask` brings of an editor that asks a server."""

    async def run():
        return await ask(await connected(Remote(server.url, key)))

    return asyncio.run(run())


def test_two_editors_share_a_server(live, say, codec):
    server = live(say("urn a + b"))
    for _ in range(2):
        assert with_editor(server, lambda one: one.complete(*CURSOR)) == "urn a + b"
    assert "other = 1" in codec.decode(server.backend.prompts[0])


def test_a_request_that_an_editor_gives_up_is_given_up(live, say):
    server = live(say("word " * 100))
    server.backend.gate = threading.Semaphore(0)

    async def give_up(one):
        asked = asyncio.ensure_future(one.complete(*CURSOR))
        await asyncio.to_thread(wait_for, lambda: server.service.queue.begun)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    with_editor(server, give_up)
    wait_for(lambda: all(job.turn.cancelled for job in server.service.queue._jobs))
    server.backend.gate.release(1000)
    wait_for(lambda: bool(server.done))
    assert server.done[-1][1].outcome == "cancelled"


def test_of_a_large_document_what_a_prompt_needs_is_sent(live, say, codec):
    server = live(say("urn 1"))
    large = (CURSOR[0], "a = 'é'\n" * 700_000 + CURSOR[1], "b = 2\n" * 700_000, EXTRA, KIND)
    assert with_editor(server, lambda one: one.complete(*large)) == "urn 1"
    assert codec.decode(server.backend.prompts[-1]).count("a = 'é'") > 100


def test_a_wrong_key_is_said(live, say):
    server = live(say("urn 1"), keys=("schlüssel-ключ".encode(),))
    with pytest.raises(ServeError, match=r"401.*API key"):
        with_editor(server, None, "wrong")
    assert with_editor(server, lambda one: one.complete(*CURSOR), "schlüssel-ключ") == "urn 1"
    assert server.service.kept("schlüssel-ключ")["session_tokens"] > 0
    with_editor(server, lambda one: one.forget(), "schlüssel-ключ")
    assert server.service.kept("schlüssel-ключ")["session_tokens"] == 0


@pytest.fixture
def loading():
    """A server that never ends loading its model."""
    asked = threading.Event()

    class Loading(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.set()
            self.send_error(503)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Loading) as server:
        server.asked = asked
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("told", [True, False])
def test_a_language_server_ends_while_it_waits_for_the_model(loading, told, tmp_path):
    command = [sys.executable, "-m", "retrieve_spec.cli", "lsp", "--connect", f"http://127.0.0.1:{loading.server_port}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "bufsize": 0}
    with running(command, **pipes, env={**os.environ, "RETRIEVE_SPEC_CACHE": str(tmp_path)}) as process:

        def send(method, **rest):
            body = json.dumps({"jsonrpc": "2.0", "method": method, **rest}).encode()
            process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

        send("initialize", id=1, params={"processId": None, "rootUri": None, "capabilities": {}})
        send("initialized", params={})
        assert loading.asked.wait(HANG_S)
        if told:
            send("shutdown", id=2)
            send("exit")
        else:
            process.stdin.close()
        process.wait()


def test_a_language_server_without_a_model_imports_no_model_library():
    program = "import sys, retrieve_spec.server.lsp; print({'torch', 'transformers', 'numba'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("wrong", ["localhost:8012", "ftp://x", "http://", "http://x:port"])
def test_an_address_is_one(wrong):
    with pytest.raises(ServeError, match="address"):
        Remote(wrong)
