import contextlib
import copy
import signal
import string

import pytest
from live import Live, Process
from scripted import ScriptedBackend
from templates import HERMES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from retrieve_spec.config import ServeConfig
from retrieve_spec.reference_model import load_model
from retrieve_spec.server.run import assemble
from retrieve_spec.server.text import TextCodec


@pytest.fixture(scope="session")
def tokenizer(reference_tokenizer):
    return reference_tokenizer


@pytest.fixture(scope="session")
def codec(tokenizer):
    return TextCodec(tokenizer)


@pytest.fixture(scope="session")
def metaspace():
    """A tokenizer that spells letters, and no bytes, and puts a blank in front of a text."""
    letters = {letter: number for number, letter in enumerate(f"▁é{string.printable}")}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def live(codec, tokenizer):
    """Start servers on free ports; `live(backend, ...)` gives one with its base address."""
    started = []

    def start(backend, tokenizer=tokenizer, **options):
        started.append(Live(backend, tokenizer, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server_cache(tmp_path_factory):
    """Where servers keep what they found out about the model, as a user's second start finds it."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def processes(server_cache):
    """`processes(...)`: a server as users start it, with these arguments."""
    started = []

    def start(*arguments):
        started.append(Process(server_cache, *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.child.poll() is None:
            process.stop(signal.SIGKILL)


@pytest.fixture
def say(codec):
    """`say(text)`: a model that always says it."""
    return lambda text, **options: ScriptedBackend(lambda prompt: [*codec.encode(text), 0], **options)


@pytest.fixture
def templated(tokenizer):
    """A tokenizer whose chat template shows tools."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = HERMES
    return other


@pytest.fixture
def served(live, codec, templated):
    """`served(text)`: a server whose model says it, or what a function makes of the prompt, and is shown tools."""

    def start(said, run=2, n_ctx=4096, **options):
        script = said if callable(said) else lambda prompt: said
        backend = ScriptedBackend(lambda ids: [*codec.encode(script(codec.decode(ids))), 0], run=run, n_ctx=n_ctx)
        return live(backend, templated, **options)

    return start


@pytest.fixture
def official():
    """`official(server)`: the client that OpenAI publishes, asking a server."""
    openai = pytest.importorskip("openai", reason="pip install openai")
    with contextlib.ExitStack() as clients:
        yield lambda server: clients.enter_context(
            openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
        )


@pytest.fixture(scope="session")
def reference():
    """The bundled model twice: accelerated behind a service that runs, and as it is."""
    model, tokenizer = load_model("reference")
    plain, _ = load_model("reference")
    served = assemble(model, tokenizer, "reference", ServeConfig(infill_deadline_s=1e6))
    return served, plain, tokenizer


@pytest.fixture(scope="session")
def reference_live(reference):
    served, _, tokenizer = reference
    server = Live(served.backend, tokenizer, service=served)
    yield server
    server.stop()
