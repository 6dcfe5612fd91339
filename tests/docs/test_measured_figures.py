"""Measured figures stand in blocks made from docs/data, and nowhere else."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
GENERATED = re.compile(r"<!-- generated:([\w.-]+) -->\n.*?<!-- /generated -->", re.DOTALL)
FIGURE = re.compile(
    r"\d[\d.,]*[ \u00a0]?"
    r"(?:(?:ms|µs|s|seconds|minutes|GB|MB|KB|KiB|MiB|GiB|bytes)\b|%|times (?:as|the|its|faster|slower)|"
    r"(?:[MG] )?tokens?(?:/s| per (?:pass|second|query|place))|nodes per pass|(?:of|and) [\d.,]+ (?:µs|ms))"
)
RULES = {
    "docs/benchmarks.md": {"95 %", "15 %", "1 %", "10 %"},
    "docs/tables_bundled.md": {"3 %"},
    "docs/tables_recorded.md": {"2 %", "60 nodes per pass"},
    "docs/datastores.md": {"1 GiB", "64 MB", "32 MB", "40 bytes", "44 bytes", "25 bytes", "4 MB", "1 MB"},
    "docs/drafting.md": {"0.2 %", "1 %", "64 MiB"},
    "docs/server.md": {"256 KiB", "4 MiB", "375 and 500 ms", "150 ms", "20 seconds", "64 KiB", "64 MiB"},
    "docs/verifier.md": {"8 minutes"},
}
"""Numbers in the text that are settings, definitions or bars, not measurements."""


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield {name: importlib.import_module(name) for name in ("generate_docs", "blocks")}
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def prose(page: str) -> str:
    """A page without what is generated, commands, and code."""
    text = GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_text_around_generated_blocks_has_no_measured_figures(page):
    found = {match.group() for match in FIGURE.finditer(prose(page))}
    new = found - RULES.get(page, set())
    assert not new, (
        f"{page} says {', '.join(sorted(new))}: let a part of scripts/reproduce measure it and a generated block show "
        "it, or link to the table that has it (a setting or a bar goes into RULES here)"
    )


@pytest.mark.parametrize(
    "text",
    ["takes 1.3 ms", "runs at 3,400 tokens/s", "2.27 times as many", "is 14 % slower",
     "5.85 tokens per pass", "2.1 GB of memory", "9.6 µs (median)", "6.13 bytes per token"],
)  # fmt: skip
def test_measured_figures_are_recognised(text):
    assert FIGURE.search(text)


@pytest.mark.parametrize("text", ["up to eight passes", "orders 1 … 5", "40,000 characters", "100 M tokens", "T = 0.7"])
def test_settings_are_not_taken_for_measured_figures(text):
    assert not FIGURE.search(text)


def test_every_table_has_its_place_in_one_page(scripts):
    placed = [name for page in PAGES for name in GENERATED.findall((ROOT / page).read_text(encoding="utf-8"))]
    assert sorted(placed) == sorted(scripts["generate_docs"].PARTS)


def test_a_page_that_differs_from_its_data_is_named(scripts, monkeypatch, tmp_path):
    blocks, generator = scripts["blocks"], scripts["generate_docs"]
    shutil.copytree(blocks.DATA, tmp_path / "data")
    monkeypatch.setattr(blocks, "DATA", tmp_path / "data")
    changed = tmp_path / "data" / "typing.json"
    made = json.loads(changed.read_text(encoding="utf-8"))
    made["drafting"]["latency_ms"]["p50"] += 10
    changed.write_text(json.dumps(made), encoding="utf-8")
    assert ROOT / "docs" / "server.md" in generator.stale()


def test_every_data_file_says_on_what_and_with_which_command_it_was_measured():
    for path in (ROOT / "docs" / "data").glob("*.json"):
        made = json.loads(path.read_text(encoding="utf-8"))
        facts = made.get("header", made)
        assert facts["command"], path.name
        assert {"processor", "cores", "packages", "commit", "date"} <= set(facts["machine"]), path.name
