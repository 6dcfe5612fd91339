"""Harness of the benchmark scripts: their arguments, whose turn it is, and the JSON object that they print last.

A script says what it measures and which options it has, with their defaults; the object that it prints carries the
machine, what else that did meanwhile, and the command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from checkout import ROOT

from retrieve_spec.bench.machine import OtherWork, machine_facts


def arguments(about: str | None, *positional: str, **named: Any) -> argparse.Namespace:
    """Options of the command line, as a script declares them.

    Parameters
    ----------
    about
        The script's docstring, which says what the options mean.
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
    """Measure with the options of the command line, and print what was found as one JSON object."""
    options = arguments(about, *positional, **named)
    facts, others = machine_facts(), OtherWork()
    found = measure(options)
    script = Path(sys.argv[0]).resolve()
    place = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path("scripts") / script.name
    command = shown(["python", str(place), *sys.argv[1:]])
    print(json.dumps({**found, "machine": {**facts, "others": others.cores()}, "command": command}))


def shown(words: Sequence[str]) -> str:
    """A command for the docs: files by their names, since where they lie on a machine is no one's business."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """All the names, each time beginning with another one, so that none is always first."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]
