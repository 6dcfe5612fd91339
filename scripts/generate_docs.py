"""Generated parts of the docs: help texts, config docstrings, tables and charts from docs/data.

::

    python scripts/generate_docs.py            # write
    python scripts/generate_docs.py --check    # exit 1 and name the files that are out of date

A generated part stands between ``<!-- generated:NAME -->`` and ``<!-- /generated -->``; the rest of a page is written
by hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import charts
import click
from blocks import BLOCKS
from harness import ROOT, arguments

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PART = re.compile(r"<!-- generated:(?P<name>[\w.-]+) -->\n.*?<!-- /generated -->", re.DOTALL)
ENVIRONMENT = {
    "RETRIEVE_SPEC_CACHE": "Folder for what can be made again; by default `$XDG_CACHE_HOME/retrieve-spec` or "
    "`~/.cache/retrieve-spec`.",
    "RETRIEVE_SPEC_SGLANG": "Options of drafts inside SGLang, an object in JSON ([docs](sglang.md)).",
    "NUMBA_DISABLE_JIT": "`1` runs the kernels as plain Python (very slow; for finding errors).",
    "HF_HUB_OFFLINE": "`1` keeps Hugging Face libraries from asking the hub.",
}


def commands(
    command: click.Command, parent: click.Context | None = None, name: str = "retrieve-spec"
) -> Iterator[tuple[str, str]]:
    """Every command with its help text, parents first."""
    settings: dict[str, Any] = {**command.context_settings, "terminal_width": 100}
    command._help_option = None  # kept by click from an earlier context, whose names of --help may differ
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from commands(found, context, child)


def cli() -> str:
    """The help text of every command."""
    from retrieve_spec.cli import cli as root

    return "\n".join(f"## {name}\n\n```text\n{text}\n```\n" for name, text in commands(root))


def config_classes() -> list[type]:
    """The dataclasses of `config.py`, in the order of the file."""
    from retrieve_spec import config

    own = [c for c in vars(config).values() if dataclasses.is_dataclass(c) and c.__module__ == config.__name__]
    return [c for c in own if isinstance(c, type)]


def attributes(cls: type) -> dict[str, str]:
    """Descriptions from the Attributes section of a NumPy docstring, by field name."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes\n----------\n")[2]
    for line in section.splitlines():
        if re.fullmatch(r"-{3,}", line):
            break
        if line and not line.startswith(" "):
            names = [name.strip() for name in line.split(":")[0].split(",")]
            found |= {name: [] for name in names}
        elif line.strip():
            for name in names:
                found[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}


def config() -> str:
    """One table for each config class."""
    parts = []
    for cls in config_classes():
        described = attributes(cls)
        rows = [
            f"| `{field.name}` | {_default(field)} | {described[field.name]} |" for field in dataclasses.fields(cls)
        ]
        head = inspect.cleandoc(cls.__doc__ or "").splitlines()[0]
        parts.append(
            "\n".join(
                [f"## {cls.__name__}", "", head, "", "| option | default | meaning |", "|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return f"`{field.default_factory()!r}`" if field.default_factory is not dataclasses.MISSING else "required"


def environment() -> str:
    """The environment variables."""
    return "\n".join(["| variable | meaning |", "|---|---|", *(f"| `{n}` | {t} |" for n, t in ENVIRONMENT.items()), ""])


PARTS: dict[str, Callable[[], str]] = {"cli": cli, "config": config, "environment": environment} | BLOCKS


def render(text: str) -> str:
    """A page with its generated parts made anew."""

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- generated:{name} -->\n{PARTS[name]().rstrip()}\n<!-- /generated -->"

    return PART.sub(part, text)


def stale() -> dict[Path, str]:
    """Pages that differ from what they should be, with the text they should have."""
    pages = {ROOT / page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    return {path: fresh for path, text in pages.items() if (fresh := render(text)) != text}


def main() -> None:
    """Write the pages and draw the charts, or only name the pages that are out of date."""
    check = arguments(__doc__, check=False).check
    found = stale()
    for path, text in found.items():
        name = path.relative_to(ROOT)
        print(f"{name} is out of date: run `make docs`" if check else f"wrote {name}")
        if not check:
            path.write_text(text, encoding="utf-8")
    if not check:
        charts.draw()
    sys.exit(1 if check and found else 0)


if __name__ == "__main__":
    main()
