"""The releases that are installed for tests are those that pyproject.toml declares."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def declared() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins(file: str) -> Iterator[tuple[str, Version]]:
    for line in (ROOT / file).read_text().splitlines():
        if words := line.partition("#")[0].split():
            name, _, version = words[0].partition("==")
            yield canonicalize_name(name), Version(version)


def lower_bound(requirement: Requirement) -> Version:
    (bound,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
    return bound


def test_lowest_constraints_are_the_lower_bounds() -> None:
    assert dict(pins("constraints-lowest.txt")) == {name: lower_bound(r) for name, r in declared().items()}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_pins_satisfy_what_is_declared(file: str) -> None:
    pinned = dict(pins(file))
    assert len(pinned) == len(list(pins(file))), "a package is pinned twice"
    wrong = {name: str(r) for name, r in declared().items() if name not in pinned or pinned[name] not in r.specifier}
    assert not wrong
