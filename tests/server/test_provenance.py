from __future__ import annotations

import pytest

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.jobs import Completion
from retrieve_spec.server.lookups import Provenance
from retrieve_spec.server.workspace import Workspace

LINE = "total = sum(price for price in prices)"
DOCS = '"""Adds up what things cost."""'


@pytest.fixture
def places(tmp_path):
    def of(files, text, left=""):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        workspace = Workspace([tmp_path], ServeConfig())
        workspace.scan()
        entries = Provenance([], workspace).of(Completion(text=text), left)["provenance"]
        return {
            entry["text"]: [
                (place["file"][len(str(tmp_path)) + 1 :], place["line"], place["licence"]) for place in entry["places"]
            ]
            for entry in entries
        }

    return of


@pytest.mark.parametrize(
    ("files", "left", "text", "found"),
    [
        (  # all of a line
            {"a.py": f"x = 1\n    {LINE}\n", "b.py": f"{LINE} or 0\n", "c.py": f"grand_{LINE}\n"},
            "",
            f"{LINE}\nx",
            {LINE: [("a.py", 2, "")]},
        ),
        ({"a.py": f"{LINE} or 0\n"}, "", LINE, {LINE: [("a.py", 1, "")]}),  # but of the last one
        (  # the first with what was typed
            {"a.py": f"{LINE}\n", "b.py": f"x = {LINE.removeprefix('total = ')}\n"},
            "def f(prices):\n    total = su",
            "m(price for price in prices)\n",
            {LINE: [("a.py", 1, "")]},
        ),
        ({"a.py": f"\n{DOCS}\n"}, "", f"    {DOCS}\n", {DOCS: [("a.py", 2, "")]}),
    ],
)
def test_a_line_stands_where_all_of_it_does(places, files, left, text, found):
    assert places(files, text, left) == found


def test_the_nearest_licence_counts_and_the_files_own_first(places):
    files = {
        "LICENSE": "MIT License\n",
        "a.py": f"{LINE}\n",
        "vendored/lib/COPYING": "BSD 3-Clause License\n",
        "vendored/lib/deep/b.py": f"{LINE}\n",
        "vendored/lib/deep/c.py": f"# SPDX-License-Identifier: Apache-2.0\n{LINE}\n",
    }
    assert sorted(places(files, f"{LINE}\n")[LINE]) == [
        ("a.py", 1, "MIT License"),
        ("vendored/lib/deep/b.py", 1, "BSD 3-Clause License"),
        ("vendored/lib/deep/c.py", 2, "Apache-2.0"),
    ]
