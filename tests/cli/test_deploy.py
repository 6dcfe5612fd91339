"""What `tools/deploy/` says of this package is true: paths, extras, commands, addresses."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import click

from retrieve_spec import cli, cli_common
from retrieve_spec.config import ServeConfig

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def container() -> list[tuple[str, str]]:
    """Instructions of the container file: name and words, lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "tools" / "deploy" / "Containerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines if line.strip()]


def words(instruction: str) -> list[str]:
    """Words of the last instruction of that name, which is written as a list."""
    return json.loads([given for name, given in container() if name == instruction][-1].removeprefix("CMD "))


def parsed(arguments: list[str], **files: Path) -> click.Context:
    """A command line as `serve` reads it, with files that stand for the container's."""
    command = cli.cli.get_command(click.Context(cli.cli), "serve")
    assert command is not None
    return command.make_context("serve", [str(files.get(word.lstrip("/"), word)) for word in arguments])


def test_the_container_serves_where_it_listens_and_says_how_it_is(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    program, verb, *arguments = words("ENTRYPOINT") + words("CMD")
    assert program in PROJECT["scripts"] and verb == "serve"
    given = parsed(arguments, keys=keys).params
    assert given["host"] == "0.0.0.0" and given["key_file"] == keys
    port = str(ServeConfig().port)
    assert dict(container())["EXPOSE"] == port
    from retrieve_spec.server.guard import OPEN_PATHS, check_binding, read_keys

    check_binding(given["host"], read_keys(keys))
    (url,) = re.findall(r"'http://127.0.0.1:(\d+)(/[a-z]+)'", dict(container())["HEALTHCHECK"])
    assert url[0] == port and url[1] in OPEN_PATHS


def test_a_missing_package_of_an_extra_is_noticed():
    """What commands look for before they say which extra to install is what the extra brings, by its import name."""
    named = {"prometheus-client": "prometheus_client"}
    for extra, modules in cli_common.EXTRAS.items():
        wanted = {
            re.match(r"[a-z0-9-]+", word)[0] for word in PROJECT["optional-dependencies"][extra] if ";" not in word
        }
        assert {named.get(word, word) for word in wanted} == set(modules), extra
