"""A few entries of each kind of the census are what docs/data/census.json says, as is the table of the docs."""

import json
from typing import Any

import pytest
from census import DATA, examine, summary
from family_table import PAGE, current, render
from test_families import model_of

KINDS = [
    ("gemma4_text", "causal"),  # layers that share another's cache and differ in widths
    ("zamba2", "causal"),  # mixers beside attention
    ("bloom", "causal"),  # chains
    ("t5", "seq2seq"),  # an encoder, distances in place of positions
    ("qwen2_5_vl", "image"),  # pictures, positions of several axes
]


def entries() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))["entries"]
    return found


def test_nothing_in_the_census_is_wrong() -> None:
    assert [entry["name"] for entry in entries() if entry["wrong"]] == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mapping"), KINDS)
def test_entries_are_as_they_were(name: str, mapping: str) -> None:
    line = summary(examine(name, mapping))
    assert line["wrong"] == []
    known = next(entry for entry in entries() if (entry["name"], entry["mapping"]) == (name, mapping))
    assert (line["text"], line["picture"]) == (known["text"], known["picture"])


@pytest.mark.filterwarnings("ignore")
def test_docs_table_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert current(page, render(model_of)) == page, "run: python tests/conformance/family_table.py"
