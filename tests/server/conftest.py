from __future__ import annotations

import copy
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


@pytest.fixture
def say(codec):
    """`say(text)`: a model that always says it."""
    from scripted import ScriptedBackend

    return lambda text, **options: ScriptedBackend(lambda prompt: [*codec.encode(text), 0], **options)


@pytest.fixture
def templated(tokenizer):
    """A tokenizer whose chat template shows tools."""
    from templates import HERMES

    other = copy.deepcopy(tokenizer)
    other.chat_template = HERMES
    return other


@pytest.fixture
def served(codec, templated):
    """`served(text)`: a server whose model says it, or what a function makes of the prompt, and is shown tools."""
    from live import Live
    from scripted import ScriptedBackend

    started = []

    def start(said, run=2, **options):
        script = said if callable(said) else lambda prompt: said
        backend = ScriptedBackend(lambda ids: [*codec.encode(script(codec.decode(ids))), 0], run=run)
        started.append(Live(backend, templated, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def reference():
    """The bundled model twice: accelerated behind a service that runs, and as it is."""
    from retrieve_spec.config import ServeConfig
    from retrieve_spec.reference_model import load_model
    from retrieve_spec.server.run import assemble

    model, tokenizer = load_model("reference")
    plain, _ = load_model("reference")
    served = assemble(model, tokenizer, "reference", ServeConfig(infill_deadline_s=1e6))
    return served, plain, tokenizer


@pytest.fixture(scope="session")
def reference_live(reference):
    from live import Live

    served, _, tokenizer = reference
    server = Live(served.backend, tokenizer, service=served)
    yield server
    server.stop()
