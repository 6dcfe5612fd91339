"""The editor settings name addresses that exist and the model that is served."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlparse

import pytest
from scripted import ScriptedBackend

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.openapi import describe
from retrieve_spec.server.run import display_name

FOLDER = Path(__file__).parents[2] / "tools" / "editors"
FILES = sorted(path for path in FOLDER.iterdir() if path.name != "README.md")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_addresses_exist(path):
    text = path.read_text("utf-8")
    urls = re.findall(r"http://[^'\"\s]+", text)
    assert urls or "retrieve-spec', 'lsp'" in text
    config = ServeConfig()
    for url in map(urlparse, urls):
        assert (url.hostname, url.port) == (config.host, config.port)
        assert url.path in {"", "/v1", *describe()["paths"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_parse_and_name_the_model(path):
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        json.loads(text)
    for name in re.findall(r"model['\"]?\s*[:=]\s*['\"]?([\w.-]+)", text):
        assert name.removesuffix("-Fast-Apply") == display_name("reference")


def test_llama_vscode_does_not_ask_to_install_another_server():
    assert json.loads((FOLDER / "llama-vscode.json").read_text("utf-8"))["llama-vscode.ask_install_llamacpp"] is False


def test_readme_lists_every_file():
    text = (FOLDER / "README.md").read_text("utf-8")
    for path in FILES:
        assert f"]({path.name})" in text


def test_prompt_format_of_zed_is_that_of_the_bundled_model(live):
    wanted = json.loads((FOLDER / "zed.json").read_text("utf-8"))
    server = live(ScriptedBackend(lambda prompt: [0]))
    assert (
        server.client.get("/health").json()["fim"]
        == wanted["edit_predictions"]["open_ai_compatible_api"]["prompt_format"]
    )
