import json
import secrets

import fsspec
import pytest
from byte_tokenizers import byte_tokenizer
from fake_hub import hub as hub
from folders import write
from tokenizers import Tokenizer

from retrieve_spec.cli import run
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.sources import Source


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def texts(tmp_path):
    """A folder of four small documents with much in common."""
    return write(
        tmp_path / "texts",
        {
            "a.txt": "the cat sat on the mat. " * 3,
            "b.txt": "the cat ran to the mat and the cat ate.",
            "c.py": "def cat(mat):\n    return mat\n",
            "sub/d.txt": "the dog sat on the cat.",
        },
    )


@pytest.fixture
def store(tokenizer, texts, tmp_path):
    """A store of these documents."""
    build_datastore(tmp_path / "s", Source(str(texts), "MIT"), tokenizer)
    return tmp_path / "s"


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [{"output": f"answer number {i} is {i * i}", "meta": {"text": f"nested {i}"}} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def home(tmp_path_factory, monkeypatch):
    """A user of its own, whose global ignore file names `*.mine`."""
    folder = write(tmp_path_factory.mktemp("home"), {".config/git/ignore": "*.mine\n"})
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)


@pytest.fixture
def command(capfd):
    """Runs a command; its exit code, and what it printed."""

    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of an object store on this machine, where moto and s3fs are installed."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"stores-{secrets.token_hex(4)}"  # what the server holds outlives it
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()
    running.stop()


@pytest.fixture(params=["file", "memory", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        yield request.getfixturevalue("bucket") + "/remote"
        return
    if request.param == "file":
        yield f"file://{tmp_path}/remote"
        return
    memory = fsspec.filesystem("memory")
    yield "memory://remote"
    memory.rm("/", recursive=True)
