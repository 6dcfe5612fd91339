"""Collects the mode of every family for the table in the docs."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def modes() -> dict[Any, str]:
    """Mode by (family, attention), as seen by the conformance tests of this run."""
    return {}
