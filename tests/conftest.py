"""Fixtures every room may use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import retrieve_spec

REFERENCE = Path(retrieve_spec.__file__).parent / "reference"


@pytest.fixture(scope="session")
def reference_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(REFERENCE)


@pytest.fixture(scope="session")
def _loaded_reference() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(REFERENCE, dtype=torch.float32).eval()


@pytest.fixture
def reference_model(_loaded_reference: Any) -> Any:
    """The bundled model in float32, not accelerated; left so after the test."""
    yield _loaded_reference
    retrieve_spec.restore(_loaded_reference)
