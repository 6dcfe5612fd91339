"""The editor settings name addresses that exist and the model that is served."""

import json
import re
import socket
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
from click.testing import CliRunner

from retrieve_spec.cli import cli
from retrieve_spec.cli_serve import editor as COMMAND
from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.server.editors import EDITORS, Remote, display_name, settings_file

FOLDER = Path(__file__).parents[2] / "retrieve_spec" / "server" / "editor_settings"
FILES = sorted(FOLDER.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_addresses_exist(live, say, path):
    text = path.read_text("utf-8")
    urls = re.findall(r"http://[^'\"\s]+", text)
    assert urls
    config = ServeConfig()
    served = live(say("")).app.openapi()["paths"]
    for url in map(urlparse, urls):
        assert (url.hostname, url.port) == (config.host, config.port)
        assert url.path in {"", "/v1", *served}


def test_every_file_belongs_to_an_editor_that_the_command_and_the_docs_name():
    assert sorted(editor.settings for editor in EDITORS.values()) == [path.name for path in FILES]
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    command = COMMAND.params[0].type.choices
    assert list(command) == list(EDITORS)
    assert all(f"| `{name}` |" in text for name in EDITORS)


@pytest.fixture
def server(live, say):
    return live(say("return n\n"))


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def run(*arguments, **how):
    return CliRunner().invoke(cli, ["editor", *map(str, arguments)], **how)


@pytest.mark.parametrize("name", EDITORS)
def test_settings_name_the_server_and_its_model_and_a_completion_is_shown(name, server, at_home):
    shown = run(name, "--url", server.url)
    assert shown.exit_code == 0, shown.output
    assert server.url in shown.stdout and "8012" not in shown.stdout
    assert display_name("reference") not in shown.stdout
    assert "return n" in shown.stderr and "fill-in-the-middle: qwen" in shown.stderr
    assert not list(at_home.iterdir())
    done = run(name, "--url", server.url, "--write", input="n\n")
    assert done.exit_code == 0 and not list(at_home.iterdir())
    done = run(name, "--url", server.url, "--write", input="y\n")
    assert done.exit_code == 0, done.output
    assert settings_file(name).is_relative_to(at_home)
    assert server.url in settings_file(name).read_text("utf-8")


def test_what_stood_in_the_settings_stays(server, at_home):
    path = settings_file("zed")
    path.parent.mkdir(parents=True)
    path.write_text('{"theme": "Über", "edit_predictions": {"mode": "subtle", "provider": "none"}}', "utf-8")
    path.chmod(0o600)
    before = path.read_text("utf-8")
    for _ in range(2):  # the second time what the first one wrote does not take the place of what is kept
        assert run("zed", "--url", server.url, "--write", "--yes").exit_code == 0
    now = json.loads(path.read_text("utf-8"))
    assert now["theme"] == "Über" and now["edit_predictions"]["mode"] == "subtle"
    assert now["edit_predictions"]["provider"] == "open_ai_compatible_api"
    assert path.stat().st_mode & 0o777 == 0o600
    (kept,) = path.parent.glob("settings.json.*")
    assert kept.read_text("utf-8") == before
    path.write_text("{ // mine\n}")
    refused = run("zed", "--url", server.url, "--write", "--yes")
    assert isinstance(refused.exception, ServeError) and "comments" in str(refused.exception)
    assert path.read_text() == "{ // mine\n}"
    other = settings_file("continue")
    other.parent.mkdir()
    other.write_text("models: []\n")
    assert isinstance(run("continue", "--url", server.url, "--write", "--yes").exception, ServeError)
    assert other.read_text() == "models: []\n"


@pytest.mark.parametrize("name", ["minuet", "zed", "continue"])
@pytest.mark.parametrize("model", ["x' .. os.execute('id') .. '", 'x"\nq: 1', "x\\", "x\n", "", None, "x" * 201, 7])
def test_a_server_writes_no_program_into_the_settings(name, model):
    with pytest.raises(ServeError, match="name of letters"):
        EDITORS[name].text(Remote("http://127.0.0.1:8099"), {"model": model, "fim": "qwen"})
    assert "Ü 1.5B+x@q4" in EDITORS[name].text(Remote("http://127.0.0.1:8099"), {"model": "Ü 1.5B+x@q4"})
    assert "127.0.0.1:8099" in EDITORS["vim"].text(Remote("http://127.0.0.1:8099"), {"status": "ok"})


@pytest.mark.parametrize("end", ["/'..os.exit()..'", '/"x', "/\\x", "/\nx", "/ #x", "/|x"])
def test_an_address_ends_no_string_in_the_settings(end):
    for one in EDITORS.values():
        with pytest.raises(ServeError, match="address"):
            one.text(Remote("http://127.0.0.1:8012" + end), None)
        assert "http://[::1]:8099" in one.text(Remote("http://[::1]:8099"), None)


def test_a_server_that_does_not_answer_is_said(at_home):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    shown = run("vim", "--url", f"http://127.0.0.1:{port}")
    assert shown.exit_code == 0
    assert f"http://127.0.0.1:{port}/infill" in shown.stdout
    assert "does not answer" in shown.stderr and "retrieve-spec serve" in shown.stderr
