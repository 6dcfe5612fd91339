"""Modes of all families in, the table of docs/conformance.md out.

python tests/conformance/family_table.py            # write the table
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
_PART = re.compile(r"<!-- table -->\n.*?<!-- /table -->", re.DOTALL)


def render(model_of: Callable[[Any, str], Any]) -> str:
    """Probe every family under each attention implementation and write what was found as a Markdown table."""
    from families import FAMILIES

    import retrieve_spec as rs

    lines = ["| family | class | sdpa | eager | why not trees |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        modes, reasons = {}, []
        for attention in family.attention:
            model = model_of(family, attention)
            rs.accelerate(model, draft="off", recorded_pass="off")
            modes[attention] = model.speculation.mode
            reasons.append(re.sub(r" \(off by .*?\)", "", model.speculation.reason))
            rs.restore(model)
        cells = [modes.get(attention, "–") for attention in ("sdpa", "eager")]
        lines.append(
            f"| {family.name} | `{type(model).__name__}` | {cells[0]} | {cells[1]} | {max(reasons, key=len)} |"
        )
    return "\n".join(lines)


def current(page: str, table: str) -> str:
    """The page with the table in its place."""
    return _PART.sub(lambda _: f"<!-- table -->\n{table}\n<!-- /table -->", page)


if __name__ == "__main__":
    import warnings

    from families import build

    warnings.simplefilter("ignore")
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8"), render(build)), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
