"""Definitions of imported names: found in the workspace, shown to the model, gone when the files are."""

from __future__ import annotations

from time import process_time

import pytest

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.definitions import Definitions, Import, imports
from retrieve_spec.server.workspace import Workspace

GEOMETRY = """\
import math

SIDES = 4


def area(width: int, height: int) -> int:
    \"\"\"Of a rectangle.\"\"\"
    return width * height


class Shape(Base):
    \"\"\"Has sides.\"\"\"

    sides: int = SIDES

    def scale(
        self,
        by: float,
    ) -> None:
        self.sides *= secret_in_a_body
"""
SCRIPT = """\
export interface Point {
  x: number;
  y: number;
}

export async function load(path: string): Promise<Point> {
  return secret_in_a_body;
}

export const LIMIT = 3;
"""


@pytest.fixture
def workspace(tmp_path):
    root = tmp_path / "project"
    for name, text in {
        "shop/__init__.py": "from .geometry import area as area\nfrom shop.geometry import Shape\n",
        "shop/geometry.py": GEOMETRY,
        "other/geometry.py": "def volume(): ...\n",
        "shop/broken.py": "def area(:\n",
        "web/points.ts": SCRIPT,
        "web/store/index.js": "export function open(name) {\n  return name;\n}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    workspace = Workspace([root], ServeConfig())
    workspace.scan()
    return workspace


def shown(workspace, text, chars=1600):
    return {chunk.filename: chunk.text for chunk in Definitions(workspace, chars).of(text)}


def test_names_that_are_imported():
    text = """\
import os
from a.b import (  # of all kinds
    one,
    two as deux,  # three
)
from .c import four; x = 1
from d import *
def f():
    from e import five
import type { T } from "./t"
import React, { useState as state, type U } from "react";
const { six, seven: sept } = require("../lib/s");
"""
    found = imports(text)
    assert found == [
        *(Import("a.b", name, True) for name in ("one", "two")),
        Import(".c", "four", True),
        Import("e", "five", True),
        Import("./t", "T", False),
        *(Import("react", name, False) for name in ("useState", "U")),
        Import("../lib/s", "six", False),
        Import("../lib/s", "seven", False),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import" + " " * 20_000,
        "from" + " " * 60_000,
        "from a import (" * 2000,
        "import {" + "a," * 10_000,
        "const {" * 3000,
        "from shop import ()\nfrom shop import (  # later\n)\n",
    ],
)
def test_strange_texts_import_nothing_and_take_no_time(text):
    began = process_time()
    assert imports(text) == []
    assert process_time() - began < 5.0


def test_signatures_without_bodies(workspace):
    found = shown(workspace, "from shop.geometry import area, Shape, SIDES, unknown\n")
    assert found == {
        "shop/geometry.py": 'def area(width: int, height: int) -> int:\n    """Of a rectangle."""\n'
        'class Shape(Base):\n    """Has sides."""\n    sides: int = SIDES\n'
        "    def scale(\n        self,\n        by: float,\n    ) -> None:\nSIDES = 4\n"
    }
    assert "area" not in shown(workspace, "from shop.geometry import area, SIDES\n", 20)["shop/geometry.py"]
    assert shown(workspace, "from shop.geometry import area\n", 0) == {}


def test_names_that_packages_pass_on(workspace):
    assert set(shown(workspace, "from shop import area, Shape\n")) == {"shop/geometry.py"}
    assert set(shown(workspace, "from .geometry import volume\nfrom .broken import area\n")) == {"other/geometry.py"}
    assert shown(workspace, "from os.path import join\nfrom shop.missing import area\n") == {}


def test_scripts(workspace):
    found = shown(workspace, 'import { Point, load, LIMIT } from "./points.js";\nimport { open } from "../store";\n')
    assert found == {
        "web/points.ts": "export interface Point {\n  x: number;\n  y: number;\n}\n"
        "export async function load(path: string): Promise<Point> {\nexport const LIMIT = 3;\n",
        "web/store/index.js": "export function open(name) {\n",
    }
    assert shown(workspace, 'import { load } from "points";\n') == {}  # a package


def test_files_that_change_and_go(workspace):
    path = next(path for path in workspace.texts if path.name == "points.ts")
    definitions, text = Definitions(workspace, 1600), 'import { load } from "./points"\n'
    path.write_text("export function load(again) {\n}\n")
    workspace.update([path])
    assert "again" in definitions.of(text)[0].text
    path.unlink()
    workspace.update([path])
    assert definitions.of(text) == []


def test_the_model_is_shown_them_before_what_the_editor_sent(live, say, workspace):
    server = live(say(""), workspace=workspace)
    body = {
        "input_prefix": "from shop import area\n\n\n",
        "prompt": "total = area(",
        "input_suffix": "\n",
        "input_extra": [{"text": "seen = 1\n", "filename": "seen.py"}],
    }
    prompt = server.post("/infill", body).json()["prompt"]
    before, behind = prompt.split("def area(width: int, height: int) -> int:")
    assert "<|file_sep|>shop/geometry.py\n" in before and "seen.py" in behind
    assert "secret_in_a_body" not in prompt
    assert "def area" not in server.post("/infill", {**body, "input_prefix": "\n"}).json()["prompt"]


@pytest.mark.parametrize("text", ["from " + "." * 200_000, "import \n" * 200_000, "function" + " " * 400_000])
def test_lines_that_are_no_imports_are_read_once(workspace, text):
    """Patterns that go back for every character take hours here."""
    (workspace.roots[0] / "shop" / "long.ts").write_text(text[: ServeConfig().workspace_file_bytes])
    workspace.scan()
    assert imports(text) == []
    assert shown(workspace, 'import { area } from "./shop/long"\n') == {}


def test_lines_are_counted_as_python_counts_them(workspace):
    (workspace.roots[0] / "shop" / "pages.py").write_text(
        "DASH = '\u2028\x85'\n\x0c\ndef page(number):\n    return number\n"
    )
    workspace.scan()
    assert shown(workspace, "from shop.pages import page\n") == {"shop/pages.py": "def page(number):\n"}


def test_importing_files_of_one_name_are_not_all_followed(workspace):
    """Of each of them a name leads to all others: a walk through all of them takes hours."""
    for number in range(400):
        folder = workspace.roots[0] / f"part{number}"
        folder.mkdir()
        (folder / "models.py").write_text("from models import unknown\n")
    workspace.scan()
    assert shown(workspace, "from models import unknown\nfrom shop.geometry import area\n").keys() == {
        "shop/geometry.py"
    }
