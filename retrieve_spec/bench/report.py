"""Report of a results folder: `summary.json`, `prompts.csv`, `report.md`, self-contained `report.html`, answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retrieve_spec.bench.chart import speedups
from retrieve_spec.bench.prompt_table import write_prompt_table
from retrieve_spec.bench.prompts import SPEC_BENCH
from retrieve_spec.bench.report_sections import facts, sections, title
from retrieve_spec.bench.results import read_header, read_records
from retrieve_spec.bench.specbench import write_answers
from retrieve_spec.bench.stats import summarise
from retrieve_spec.errors import ConfigError, TraceError

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
th, td { padding: .25rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 2px solid #888; }
svg { max-width: 54rem; } .facts { color: #555; }
code { background: #f4f4f4; padding: .1rem .3rem; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="facts">{{ facts }}<br><code>{{ command }}</code></p>
{{ picture }}
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.rows %}
<table><thead><tr>{% for cell in section.head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% endif %}
{% endfor %}
</body>
</html>
"""


def check_extra() -> None:
    """Refuse before anything is measured where reports could not be written.

    Raises
    ------
    ConfigError
        The packages that only reports need are not installed.
    """
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "to write the report", f"{error.name} is not installed", "Run: pip install 'retrieve-spec[bench]'"
        ) from error


def write_report(folder: Path) -> dict[str, Any]:
    """Write all files of the report; return the summary.

    Raises
    ------
    TraceError
        The folder holds no results.
    ConfigError
        See `check_extra`.
    """
    check_extra()
    header, records = read_header(folder), read_records(folder)
    if not records:
        raise TraceError("at least one answered prompt", f"none in {folder}", "Let `bench run` finish a prompt.")
    summary = summarise(header, records)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    write_prompt_table(folder / "prompts.csv", records)
    if SPEC_BENCH in header["prompts"]:
        write_answers(folder / "answers", header, records)
    picture = speedups(summary)
    (folder / "speedup.svg").write_text(picture, encoding="utf-8")
    (folder / "report.md").write_text(markdown(summary), encoding="utf-8")
    (folder / "report.html").write_text(html(summary, picture), encoding="utf-8")
    return summary


def markdown(summary: dict[str, Any]) -> str:
    """The report for a terminal or a repository."""
    lines = [f"# {title(summary)}", "", facts(summary), "", f"`{summary['header']['command']}`", ""]
    lines += [f"![Tokens per second over {summary['baseline']}](speedup.svg)", ""]
    for section in sections(summary):
        lines += [f"## {section['title']}", ""]
        if section["text"]:
            lines += [section["text"], ""]
        if section["rows"]:
            lines += ["| " + " | ".join(section["head"]) + " |", "|---" * len(section["head"]) + "|"]
            lines += ["| " + " | ".join(row) + " |" for row in section["rows"]] + [""]
    return "\n".join(lines)


def html(summary: dict[str, Any], picture: str) -> str:
    """The report as one page that needs nothing else."""
    from jinja2 import Environment
    from markupsafe import Markup

    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(TEMPLATE)
        .render(
            title=title(summary),
            facts=facts(summary),
            command=summary["header"]["command"],
            picture=Markup(picture),
            sections=sections(summary),
        )
    )
