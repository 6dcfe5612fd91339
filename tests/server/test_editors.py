"""The editor settings name addresses that exist and the model that is served."""

import json
import re
import sys
from pathlib import Path
from urllib.parse import urlparse

import pytest
from click.testing import CliRunner
from live import free_port

from retrieve_spec.cli import cli
from retrieve_spec.cli_serve import editor as COMMAND
from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.server.editors import EDITORS, Remote, display_name, settings_file

FOLDER = Path(__file__).parents[2] / "retrieve_spec" / "server" / "editor_settings"
FILES = sorted(FOLDER.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_addresses_exist(live, say, path):
    urls = re.findall(r"http://[^'\"\s]+", path.read_text("utf-8"))
    assert urls
    config, served = ServeConfig(), live(say("")).app.openapi()["paths"]
    for url in map(urlparse, urls):
        assert (url.hostname, url.port) == (config.host, config.port)
        assert url.path in {"", "/v1", *served}


def test_every_file_belongs_to_an_editor_that_the_command_and_the_docs_name():
    assert sorted(editor.settings for editor in EDITORS.values()) == [path.name for path in FILES]
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    assert list(COMMAND.params[0].type.choices) == list(EDITORS)
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


def run(name, url, *options, **how):
    return CliRunner().invoke(cli, ["editor", name, "--url", url, *options], **how)


@pytest.mark.parametrize("name", EDITORS)
def test_settings_name_the_server_and_its_model_and_a_completion_is_shown(name, server, at_home):
    shown = run(name, server.url)
    assert shown.exit_code == 0, shown.output
    assert server.url in shown.stdout and "8012" not in shown.stdout
    assert display_name("reference") not in shown.stdout
    assert "return n" in shown.stderr and "fill-in-the-middle: qwen" in shown.stderr
    assert not list(at_home.iterdir())
    for said in "ny":
        done = run(name, server.url, "--write", input=f"{said}\n")
        assert done.exit_code == 0, done.output
        assert bool(list(at_home.iterdir())) == (said == "y")
    assert settings_file(name).is_relative_to(at_home)
    assert server.url in settings_file(name).read_text("utf-8")


def test_what_stood_in_the_settings_stays(server, at_home):
    path = settings_file("zed")
    path.parent.mkdir(parents=True)
    before = '{"theme": "Über", "edit_predictions": {"mode": "subtle", "provider": "none"}}'
    path.write_text(before, "utf-8")
    path.chmod(0o600)
    for _ in range(2):  # the second time what the first one wrote does not take the place of what is kept
        assert run("zed", server.url, "--write", "--yes").exit_code == 0
    now = json.loads(path.read_text("utf-8"))
    assert now["theme"] == "Über" and now["edit_predictions"]["mode"] == "subtle"
    assert now["edit_predictions"]["provider"] == "open_ai_compatible_api"
    assert path.stat().st_mode & 0o777 == 0o600
    (kept,) = path.parent.glob("settings.json.*")
    assert kept.read_text("utf-8") == before


@pytest.mark.parametrize(
    ("name", "held", "told"), [("zed", "{ // mine\n}", "comments"), ("continue", "a: []\n", "other")]
)
def test_settings_that_cannot_stay_are_not_written(server, at_home, name, held, told):
    path = settings_file(name)
    path.parent.mkdir(parents=True)
    path.write_text(held)
    with pytest.raises(ServeError, match=told):
        run(name, server.url, "--write", "--yes", catch_exceptions=False)
    assert path.read_text() == held


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
    url = f"http://127.0.0.1:{free_port()}"
    shown = run("vim", url)
    assert shown.exit_code == 0 and f"{url}/infill" in shown.stdout
    assert "does not answer" in shown.stderr and "retrieve-spec serve" in shown.stderr
