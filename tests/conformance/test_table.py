"""The table in the docs says what the probe finds."""

from __future__ import annotations

import pytest
from family_table import PAGE, current, render
from test_families import model_of


@pytest.mark.filterwarnings("ignore")
def test_docs_table_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert current(page, render(model_of)) == page, "run: python tests/conformance/family_table.py"
