from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    from retrieve_spec.reference_model import reference_path

    return AutoTokenizer.from_pretrained(str(reference_path()), local_files_only=True)


@pytest.fixture(scope="session")
def codec(tokenizer):
    from retrieve_spec.server.text import TextCodec

    return TextCodec(tokenizer)


@pytest.fixture
def live(codec, tokenizer):
    """Start servers on free ports; `live(backend, ...)` gives one with its base address."""
    from live import Live

    started = []

    def start(backend, **options):
        started.append(Live(backend, tokenizer, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()
