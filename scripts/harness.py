"""Harness of the scripts: the checkout they stand in, their arguments, and the JSON object that benchmarks print last.

Scripts import this before the package, so that they measure this checkout and not another installed one. Where another
program imports a script (a test), the path is that program's.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRACES, MANY = "TRACES/*.jsonl", 4
"""What stands for more than so many recorded files in a published command."""

_started = getattr(sys.modules["__main__"], "__file__", None)
if _started is not None and any(Path(_started).resolve().is_relative_to(ROOT / name) for name in ("scripts", "tools")):
    sys.path.insert(1, str(ROOT))  # after the folder of the script
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

from retrieve_spec.bench.machine import OtherWork, machine_facts  # noqa: E402 (of this checkout)


def arguments(about: str | None, *positional: str, **named: Any) -> argparse.Namespace:
    """Parse the command line of a script.

    Parameters
    ----------
    about
        The script's docstring, which describes the options.
    positional
        Names of arguments; one with a plus sign at its end takes several words.
    named
        Options by name: a list is the default of one that takes several words, False a flag, a type one that must be
        given, anything else the default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in positional:
        parser.add_argument(name.rstrip("+"), nargs="+" if name.endswith("+") else None)
    for name, default in named.items():
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, required=True)
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    return parser.parse_args()


def run(
    measure: Callable[[argparse.Namespace], dict[str, Any]], about: str | None, *positional: str, **named: Any
) -> None:
    """Measure with the options of the command line; print the figures, machine and command as one JSON object."""
    options = arguments(about, *positional, **named)
    facts, others = machine_facts(), OtherWork()
    found = measure(options)
    script = Path(sys.argv[0]).resolve()
    place = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path("scripts") / script.name
    command = published(["python", str(place), *sys.argv[1:]])
    print(json.dumps({**found, "machine": {**facts, "others": others.cores()}, "command": command}))


def published(words: Sequence[str]) -> str:
    """A command as the docs show it: files without the folders of this machine, many traces as a pattern."""
    many = sum(word.endswith(".jsonl") for word in words) > MANY
    shown = []
    for word in words:
        option, equals, path = word.rpartition("=")
        name = Path(path).name if Path(path).is_absolute() else path
        if not (many and word.endswith(".jsonl")):
            shown.append(shlex.quote(option + equals + name))
        elif TRACES not in shown:
            shown.append(TRACES)
    return " ".join(shown)


def tokenizer_of(file: str, native: Sequence[str], default: str) -> str:
    """The tokenizer of a recorded file: that of the first ``PATTERN=TOKENIZER`` which its name fits, or the default."""
    pairs = (entry.split("=", 1) for entry in native if entry)
    return next((own for pattern, own in pairs if fnmatch.fnmatch(file, pattern)), default)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """All the names, each time beginning with another one, so that none is always first."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]
