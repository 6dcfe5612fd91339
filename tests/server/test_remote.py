"""Editors that share a server: they ask it over HTTP, have it started where there is none; it ends after the last."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from lsprotocol import types as lsp
from pygls.workspace import Workspace
from scripted import ScriptedBackend
from waiting import wait_for

from retrieve_spec.errors import ServeError
from retrieve_spec.server.attached import Attached
from retrieve_spec.server.completer import Cursor
from retrieve_spec.server.connecting import Connecting
from retrieve_spec.server.fim import Chunk
from retrieve_spec.server.lsp import CompletionServer
from retrieve_spec.server.remote import Remote, RemoteCompleter, starter

CURSOR = Cursor("file:///a.py", "def add(a, b):\n    ret", "\n", (Chunk("other = 1\n", "b.py"),), 16, 250.0)


@pytest.fixture
def editors():
    """Editors at an address; all are gone in the end."""
    there = []

    def open_one(url, key="", start=None):
        there.append(RemoteCompleter(Remote(url, key), start))
        return there[-1]

    yield open_one
    for editor in there:
        editor.close()


def saying(codec, text):
    said = codec.encode(text)
    return ScriptedBackend(lambda prompt: [*said, 0])


def test_two_editors_share_a_server_that_ends_after_the_last(live, codec, editors):
    ended = threading.Event()
    attached = Attached(0.01, ended.set)
    server = live(saying(codec, "urn a + b"), attached=attached)
    first, second = editors(server.url), editors(server.url)
    for editor in (first, second):
        assert editor.wait(60)
        assert asyncio.run(editor.complete(CURSOR)) == ["urn a + b"]
    wait_for(lambda: attached.count == 2)
    assert "other = 1" in codec.decode(server.backend.prompts[0])
    ended.clear()  # nobody was there when it started
    first.close()
    wait_for(lambda: attached.count == 1)
    assert not ended.is_set()
    second.close()
    assert ended.wait(60)


def test_a_server_is_started_where_none_answers_and_found_again(live, codec, editors):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    started = []
    editor = editors(f"http://127.0.0.1:{port}", start=lambda: started.append(live(saying(codec, "urn 1"), port=port)))
    assert editor.wait(60)
    assert asyncio.run(editor.complete(CURSOR)) == ["urn 1"]
    started[0].stop()
    wait_for(lambda: len(started) == 2)
    wait_for(lambda: asyncio.run(editor.complete(CURSOR)) == ["urn 1"])


def test_a_request_that_an_editor_gives_up_is_given_up(live, codec, editors):
    backend = saying(codec, "word " * 100)
    backend.gate = threading.Semaphore(0)
    server = live(backend)
    editor = editors(server.url)

    async def give_up():
        asked = asyncio.ensure_future(editor.complete(CURSOR))
        while not server.service.engine.busy:
            await asyncio.sleep(0.002)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(give_up())
    wait_for(lambda: all(job.cancel.is_set() for job in server.service.engine._jobs))
    backend.gate.release(1000)
    wait_for(lambda: bool(server.done))
    assert server.done[-1][1].outcome == "cancelled"


def test_of_a_large_document_what_a_prompt_needs_is_sent(live, codec, editors):
    server = live(saying(codec, "urn 1"))
    editor = editors(server.url)
    assert editor.wait(60)
    large = replace(CURSOR, left="a = 'é'\n" * 700_000 + CURSOR.left, right="b = 2\n" * 700_000)
    assert asyncio.run(editor.complete(large)) == ["urn 1"]


def test_a_wrong_key_is_said(live, codec, editors):
    server = live(saying(codec, "urn 1"), keys=("schlüssel-ключ".encode(),))
    wrong, right = editors(server.url, "wrong"), editors(server.url, "schlüssel-ключ")
    assert not wrong.wait(60)
    assert "401" in wrong.trouble and "API key" in wrong.trouble
    assert right.wait(60)
    assert asyncio.run(right.complete(CURSOR)) == ["urn 1"]
    assert server.service.kept("schlüssel-ключ")["chunks"] == 1
    right.forget()
    assert server.service.kept("schlüssel-ключ")["chunks"] == 0


def nobody():
    """An address where none listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_started_server_that_ends_at_once_is_said(editors):
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(1)"]))
        return started[-1]

    editor = editors(nobody(), start=start)
    assert not editor.wait(60)
    assert "ended" in editor.trouble and ".log" in editor.trouble
    assert len(started) == 1


def test_an_error_of_any_kind_ends_the_waiting(editors):
    def start():
        raise RuntimeError("no more processes")

    editor = editors(nobody(), start=start)
    assert not editor.wait(60)
    assert "no more processes" in editor.trouble


def test_a_completer_that_is_closed_is_waited_for_no_longer(editors):
    editor = editors(nobody())
    waiting = threading.Thread(target=editor.wait, daemon=True)
    waiting.start()
    editor.close()
    waiting.join(60)
    assert not waiting.is_alive() and editor.trouble == "closed"
    connecting = Connecting(Remote(nobody()), [])
    connecting.close()
    with pytest.raises(ServeError, match="closed"):
        connecting.make([])


@pytest.fixture
def loading():
    """The address of a server that never ends loading its model, and an event for its being asked."""
    asked = threading.Event()

    class Loading(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.set()
            self.send_error(503)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Loading) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize("told", [True, False])
def test_a_language_server_ends_while_it_waits_for_the_model(loading, told, tmp_path):
    url, asked = loading
    process = subprocess.Popen(
        [sys.executable, "-m", "retrieve_spec.cli", "lsp", "--connect", url],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "RETRIEVE_SPEC_CACHE": str(tmp_path)},
    )  # fmt: skip

    def send(method, **rest):
        body = json.dumps({"jsonrpc": "2.0", "method": method, **rest}).encode()
        process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        process.stdin.flush()

    try:
        send("initialize", id=1, params={"processId": None, "rootUri": None, "capabilities": {}})
        send("initialized", params={})
        assert asked.wait(60)
        if told:
            send("shutdown", id=2)
            send("exit")
        else:
            process.stdin.close()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def test_servers_are_started_on_this_machine_only(monkeypatch, tmp_path):
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path))
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: commands.append((command, how)))
    assert starter(Remote("http://models.example:8012"), []) is None
    assert starter(Remote("https://127.0.0.1:8012"), []) is None
    start = starter(Remote("http://127.0.0.1:8099"), ["--model", "reference"])
    assert start is not None and not commands
    start()
    ((command, how),) = commands
    assert command[1:] == [
        "-m", "retrieve_spec.cli", "serve", "--host", "127.0.0.1", "--port", "8099", "--linger", "30", "--model",
        "reference",
    ]  # fmt: skip
    assert how["start_new_session"] and how["stdin"] is subprocess.DEVNULL
    assert (tmp_path / "servers" / "8099.log").stat().st_mode & 0o077 == 0
    for wrong in ("localhost:8012", "ftp://x", "http://", "http://x:port"):
        with pytest.raises(ServeError, match="address"):
            Remote(wrong)


def test_pieces_of_other_documents_stand_around_the_places_looked_at_last():
    server = CompletionServer(lambda roots: None)
    server.protocol._workspace = Workspace(None)
    for name in "abcdefg":
        text = "".join(f"{name}_{number} = {number}\n" for number in range(300))
        server.workspace.put_text_document(lsp.TextDocumentItem(f"file:///{name}.py", "python", 1, text))
        server.look(f"file:///{name}.py", 0)
    server.look("file:///b.py", 200)
    pieces = server.pieces("file:///g.py")
    assert [piece.filename for piece in pieces] == ["d.py", "e.py", "f.py", "b.py"]
    assert pieces[0].text.startswith("d_0 = 0\n") and pieces[0].text.count("\n") == 64
    assert "b_200 = 200\n" in pieces[-1].text and pieces[-1].text.count("\n") == 64
    for line in (192, 210, 223):  # keystrokes nearby leave the piece, and what the model has read of it
        server.look("file:///b.py", line)
        assert server.pieces("file:///g.py") == pieces
    server.workspace.remove_text_document("file:///b.py")
    assert "b.py" not in [piece.filename for piece in server.pieces("file:///g.py")]
