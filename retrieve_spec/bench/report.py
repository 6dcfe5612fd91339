"""Report of a results folder: `summary.json`, `prompts.csv`, `report.md`, self-contained `report.html`, answers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from retrieve_spec.bench.prompt_table import write_prompt_table
from retrieve_spec.bench.prompts import SPEC_BENCH
from retrieve_spec.bench.report_sections import facts, sections, title
from retrieve_spec.bench.results import read_header, read_records
from retrieve_spec.bench.specbench import write_answers
from retrieve_spec.bench.stats import summarise
from retrieve_spec.errors import ConfigError, TraceError

CAPTIONS = {
    "speedup": "Tokens per second over the baseline's, ratios within one run. Above 1 is faster.",
    "tokens_per_pass": "How much each method gets out of a forward pass, and how much it drafts for it.",
    "accepted_lengths": "Most passes accept few tokens; the long ones make the speed-up.",
    "cost": "The measured cost of a pass and the number of draft nodes that was chosen on it.",
    "time": "Milliseconds per new token. Everything but prefill and verify is overhead of drafting.",
    "calibration": "Drafts are chosen by expectation; points on the dashed line mean that the expectation is right.",
}
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
img { max-width: 100%; height: auto; } figure { margin: 1.2rem 0; } figcaption, .facts { color: #555; }
code { background: #f4f4f4; padding: .1rem .3rem; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="facts">{{ facts }}<br><code>{{ command }}</code></p>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% if section.rows %}
<table><thead><tr>{% for cell in section.head %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in section.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% endif %}
{% endfor %}
<h2>Figures</h2>
{% for figure in figures %}
<figure><img alt="{{ figure.name }}" src="data:image/png;base64,{{ figure.data }}">
<figcaption>{{ figure.caption }}</figcaption></figure>
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
        import matplotlib  # noqa: F401
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
    from retrieve_spec.bench.figures import all_figures

    figures = all_figures(summary, records)
    (folder / "figures").mkdir(exist_ok=True)
    for name, data in figures.items():
        (folder / "figures" / f"{name}.png").write_bytes(data)
    (folder / "report.md").write_text(markdown(summary, list(figures)), encoding="utf-8")
    (folder / "report.html").write_text(html(summary, figures), encoding="utf-8")
    return summary


def markdown(summary: dict[str, Any], figures: list[str]) -> str:
    """The report for a terminal or a repository."""
    lines = [f"# {title(summary)}", "", facts(summary), "", f"`{summary['header']['command']}`", ""]
    for section in sections(summary):
        lines += [f"## {section['title']}", ""]
        if section["text"]:
            lines += [section["text"], ""]
        if section["rows"]:
            lines += ["| " + " | ".join(section["head"]) + " |", "|---" * len(section["head"]) + "|"]
            lines += ["| " + " | ".join(row) + " |" for row in section["rows"]] + [""]
    lines += [f"![{CAPTIONS[name]}](figures/{name}.png)\n" for name in figures]
    return "\n".join(lines)


def html(summary: dict[str, Any], figures: dict[str, bytes]) -> str:
    """The report as one page that needs nothing else."""
    from jinja2 import Environment

    template = Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE)
    return template.render(
        title=title(summary),
        facts=facts(summary),
        command=summary["header"]["command"],
        sections=sections(summary),
        figures=[
            {"name": name, "data": base64.b64encode(data).decode(), "caption": CAPTIONS[name]}
            for name, data in figures.items()
        ],
    )
