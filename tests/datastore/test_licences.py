"""Licence rule: what a file stands under, and which files enter a store with a list of allowed licences."""

import json
import subprocess

import pytest
from folders import write
from identify.vendor.licenses import LICENSES
from test_build import contents

from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.licences import (
    LicenceRule,
    allow_list,
    allows,
    canonical,
    is_licence_file,
    own_licence,
)
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.errors import BuildError

TEXTS = dict(LICENSES)
MIT = TEXTS["MIT"].replace("[year] [fullname]", "2020 Jane Doe\nCopyright (c) 2021 Others")


@pytest.mark.parametrize(
    ("expression", "allowed", "expected"),
    [
        ("mit", "MIT", True),
        ("MIT OR GPL-3.0-only", "MIT", True),
        ("MIT AND GPL-3.0-only", "MIT", False),
        ("(MIT AND ISC) OR GPL-2.0", "MIT,ISC", True),
        ("MIT AND (ISC OR GPL-2.0)", "MIT,ISC", True),
        ("MIT AND (ISC OR GPL-2.0)", "ISC,GPL-2.0", False),
        ("Apache-2.0 WITH LLVM-exception", "Apache-2.0", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", "GPL-2.0-only WITH Classpath-exception-2.0", True),
        ("GPL-2.0-only", "GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("GPL-3.0+", "GPL-3.0-only", True),
        ("GPL-3.0-only", "GPL-3.0-or-later", False),
        ("MIT License", "MIT", True),
        ("my own", "MIT", False),
    ],
)
def test_expressions(expression, allowed, expected):
    assert allows(allow_list([allowed]), canonical(expression)) is expected


def test_a_list_of_licences_has_identifiers():
    assert allow_list(["mit, apache-2.0", "MIT"]) == ("MIT", "Apache-2.0")
    for wrong in ("Expat", "MIT OR ISC"):
        with pytest.raises(BuildError, match="SPDX identifiers"):
            allow_list([wrong])


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        *((TEXTS[name], canonical(name)) for name in ["MIT", "Apache-2.0", "BSD-3-Clause", "GPL-3.0", "MPL-2.0"]),
        (MIT.replace("MIT License", "The MIT License (MIT)") + "\n", "MIT"),
        (TEXTS["BSD-3-Clause"].replace("the copyright holder nor", "Acme Inc. nor"), "BSD-3-Clause"),
        *((text, "") for text in ["", "MIT", MIT + TEXTS["ISC"], MIT + "\nOnly for academic use, not by others." * 4]),
        *(
            (MIT.replace(ours, theirs), "")
            for ours, theirs in [
                ("without restriction", "for noncommercial purposes only"),
                ("without restriction", "for non-commercial purposes"),
                ("and/or sell", "and"),
                ("subject to the following conditions", "except for military use, subject to the following conditions"),
                ("free of charge", "for a fee"),
            ]
        ),
    ],
)
def test_only_known_texts_are_recognised(tmp_path, text, licence):
    write(tmp_path, {"COPYING": text})
    assert LicenceRule(tmp_path, ("MIT",)).licence(tmp_path / "a.py", None) == licence


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *((name, True) for name in ["LICENSE", "licence.md", "LICENSE-commercial.txt", "LICENSE_EE.md", "COPYING3"]),
        *((name, True) for name in ["LICENSE.SSPL", "foo-LICENSE.txt", "EULA.txt", "LICENSE.html", "UNLICENSE"]),
        *((name, False) for name in ["license.py", "licenses.json", "licensing.md"]),
    ],
)
def test_names_of_licence_files(name, is_one):
    assert is_licence_file(name) is is_one


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("# SPDX-License-Identifier: MIT\nx = 1\n", "MIT"),
        ("/* SPDX-License-Identifier: (GPL-2.0 OR MIT) */\n", "GPL-2.0-only OR MIT"),
        ("// SPDX-License-Identifier: MIT\n// SPDX-License-Identifier: ISC\n", "ISC AND MIT"),
        ("<!-- SPDX-License-Identifier: nonsense! -->\n", ""),
        ('line = "SPDX-License-Identifier: MIT"\n', None),
        ('lines = [\n    "SPDX-License-Identifier: GPL-3.0",\n    "# SPDX-License-Identifier: GPL-3.0",\n]\n', None),
        ('HEAD = """\n# SPDX-License-Identifier: GPL-3.0\n"""\n', None),
        ("const head = `\n// SPDX-License-Identifier: GPL-3.0\n`;\n", None),
        ("Put this first:\n```\nSPDX-License-Identifier: GPL-3.0\n```\n", None),
        ('x = """a"""\n# SPDX-License-Identifier: MIT\n', "MIT"),
        ('#!/usr/bin/python\n"""A module.\n\nSPDX-License-Identifier: MIT\n"""\n', "MIT"),
    ],
)
def test_own_lines(text, licence):
    assert own_licence(text) == licence


@pytest.fixture
def checkout(tmp_path):
    """A checkout under MIT with files and folders under other licences."""
    top = tmp_path / "top"
    files = {
        "LICENSE": MIT,
        "plain.py": "plain = 1\n",
        "copyleft.py": "# SPDX-License-Identifier: GPL-3.0-or-later\ncopyleft = 1\n",
        "either.py": "# SPDX-License-Identifier: GPL-3.0-or-later OR MIT\neither = 1\n",
        "sub/deep.py": "deep = 1\n",
        "vendored/COPYING": TEXTS["GPL-3.0"],
        "vendored/lib.py": "vendored = 1\n",
        "odd/LICENSE.txt": "Ask us.",
        "odd/odd.py": "odd = 1\n",
        "rust/LICENSE-MIT": MIT,
        "rust/LICENSE-APACHE": TEXTS["Apache-2.0"],
        "rust/both.rs": "let both = 1;\n",
    }
    write(top, files)
    subprocess.run(["git", "init", "-q", str(top)], check=True)
    subprocess.run(["git", "-C", str(top), "add", "."], check=True)
    return top


ENTER = {"LICENSE", "plain.py", "either.py", "sub/deep.py", "rust/both.rs"}


def code(names):
    """Without the licence files of folders."""
    return {name for name in names if name == "LICENSE" or name.endswith((".py", ".rs"))}


@pytest.mark.parametrize("admit", [(), ("ignored",)])
def test_build_takes_what_is_allowed(checkout, tokenizer, tmp_path, admit):
    source = Source(str(checkout), admit=admit, licences=("mit",))
    report = build_datastore(tmp_path / "s", source, tokenizer)
    assert code(contents(tmp_path / "s")) == ENTER
    left_out = report.skipped_by_reason
    assert left_out["under a licence that is not allowed"] == 3  # copyleft.py, vendored/*
    assert left_out["under no known licence"] == 2  # odd/*
    licences = {d.path: d.licence for d in open_datastore(tmp_path / "s").documents()}
    assert (licences["plain.py"], licences["rust/both.rs"]) == ("MIT", "Apache-2.0 OR MIT")


def test_part_of_a_checkout_and_what_is_stated(checkout, tokenizer, tmp_path):
    build_datastore(tmp_path / "part", Source(str(checkout / "sub"), licences=("MIT",)), tokenizer)
    assert set(contents(tmp_path / "part")) == {"deep.py"}
    records = '{"text": "one"}\n{"text": "# SPDX-License-Identifier: ISC\\ntwo"}\n'
    loose = write(tmp_path / "loose", {"records.jsonl": records})
    with pytest.raises(BuildError, match="under no known licence"):
        build_datastore(tmp_path / "none", Source(str(loose), licences=("MIT",)), tokenizer)
    build_datastore(tmp_path / "stated", Source(str(loose), "MIT", licences=("MIT",)), tokenizer)
    assert set(contents(tmp_path / "stated")) == {"records.jsonl#1"}


def test_sync_follows_licences(checkout, tokenizer, tmp_path):
    store = tmp_path / "s"
    sync_datastore(store, [checkout], tokenizer, licences=["MIT"])
    assert code(contents(store)) == ENTER
    (checkout / "odd" / "LICENSE.txt").unlink()  # now the top's counts
    sync_datastore(store, [checkout], licences=["MIT"])
    assert code(contents(store)) == ENTER | {"odd/odd.py"}
    report = sync_datastore(store, [checkout], licences=["GPL-3.0-or-later", "Apache-2.0"])
    assert code(contents(store)) == {"copyleft.py", "either.py", "rust/both.rs"}
    assert report.skipped_by_reason["under a licence that is not allowed"] > 3
    sync_datastore(store, [checkout])
    assert code(contents(store)) >= {"plain.py", "vendored/lib.py", "copyleft.py", "odd/odd.py"}


def test_a_link_out_of_the_checkout_says_nothing(checkout, tokenizer, tmp_path):
    (tmp_path / "elsewhere").write_text(MIT)
    (checkout / "odd" / "LICENSE.txt").unlink()
    (checkout / "odd" / "LICENSE").symlink_to(tmp_path / "elsewhere")
    (checkout / "vendored" / "COPYING").unlink()
    (checkout / "vendored" / "COPYING").symlink_to("../LICENSE")
    build_datastore(tmp_path / "s", Source(str(checkout), licences=("MIT",)), tokenizer)
    assert code(contents(tmp_path / "s")) == ENTER | {"vendored/lib.py"}


def test_command(checkout, command, tmp_path):
    store = tmp_path / "s"
    built = command("build", store, checkout, "--tokenizer", "reference", "--license", "MIT", "-q", "--json")[1]
    assert json.loads(built)["skipped_by_reason"]["under a licence that is not allowed"] == 3
    assert command("sync", store, checkout, "--licence", "MIT,GPL-3.0-only", "-q")[0] == 0
    assert "vendored/lib.py" in contents(store)
    assert "spdx.org" in command("add", store, checkout, "--licence", "Expat", "-q")[2]
