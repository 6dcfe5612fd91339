"""Report of a results folder: `summary.json`, `prompts.csv`, `report.md` with its chart, answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from retrieve_spec.bench.chart import on_one_line, speedups
from retrieve_spec.bench.prompt_table import write_prompt_table
from retrieve_spec.bench.prompts import SPEC_BENCH
from retrieve_spec.bench.report_sections import facts, sections, title
from retrieve_spec.bench.results import read_header, read_records
from retrieve_spec.bench.specbench import write_answers
from retrieve_spec.bench.stats import summarise
from retrieve_spec.errors import TraceError

_MARKUP = re.compile(r"[\\`*<&\[|~]")


def write_report(folder: Path) -> dict[str, Any]:
    """Write all files of the report; return the summary.

    Raises
    ------
    TraceError
        The folder holds no results.
    """
    header, records = read_header(folder), read_records(folder)
    if not records:
        raise TraceError("at least one answered prompt", f"none in {folder}", "Let `bench run` finish a prompt.")
    summary = summarise(header, records)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    write_prompt_table(folder / "prompts.csv", records)
    if SPEC_BENCH in header["prompts"]:
        write_answers(folder / "answers", header, records)
    (folder / "speedup.svg").write_text(speedups(summary), encoding="utf-8")
    (folder / "report.md").write_text(markdown(summary), encoding="utf-8")
    return summary


def markdown(summary: dict[str, Any]) -> str:
    """The report for a terminal or a repository."""
    fence = "``" if "`" in summary["header"]["command"] else "`"
    lines = [f"# {_said(title(summary))}", "", _said(facts(summary)), ""]
    lines += [f"{fence}{summary['header']['command']}{fence}", ""]
    lines += [f"![Tokens per second over {_said(summary['baseline'])}](speedup.svg)", ""]
    for section in sections(summary):
        lines += [f"## {section['title']}", ""]
        if section["text"]:
            lines += [_said(section["text"]), ""]
        if section["rows"]:
            lines += [_line(section["head"]), "|---" * len(section["head"]) + "|"]
            lines += [*map(_line, section["rows"]), ""]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    """A line of a table."""
    return "| " + " | ".join(map(_said, cells)) + " |"


def _said(text: str) -> str:
    """Text that Markdown shows as it is: prompts, tasks and folders may be called anything."""
    return _MARKUP.sub(r"\\\g<0>", on_one_line(text))
