"""With the bundled model: answers that a server keeps in a file are drafted by the next one for the same key alone."""

from pathlib import Path
from typing import Any

import pytest
from live import Live

from retrieve_spec.config import DraftSources, ServeConfig
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.server.run import assemble
from retrieve_spec.sources.answers import answers_by_scope

ALICE, BOB = b"alice", b"bob"
CHAT = {"messages": [{"role": "user", "content": "def area(width, height):\n"}], "max_tokens": 40, "temperature": 0}
CHUNK = {"text": "def unheard_of_helper():\n    return 42\n", "filename": "h.py"}


@pytest.fixture
def serve(live: Any, reference_model: Any, tokenizer: Any, tmp_path: Path) -> Any:
    """Start a server on the file, end it as a process does that is told to."""

    def start() -> Live:
        own = assemble(
            reference_model,
            tokenizer,
            "reference",
            ServeConfig(),
            shared=True,
            sources=DraftSources(session=tmp_path / "day.bin"),
        )
        return live(own.backend, service=own, keys=(ALICE, BOB))

    return start


def ask(server: Live, key: bytes, method: str, path: str, body: Any = None) -> Any:
    answer = server.ask(key, method, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def kept(server: Live, key: bytes) -> Any:
    return ask(server, key, "GET", "/v1/workspace")["session_tokens"]


def in_the_file(server: Live, folder: Path) -> int:
    """Of how many keys the file has answers."""
    return len(answers_by_scope(folder / "day.bin", tokenizer_fingerprint(server.service.tokenizer), 1000))


def test_answers_are_kept_by_key_and_forgotten_on_demand(serve: Any, tmp_path: Path) -> None:
    server = serve()
    said = ask(server, ALICE, "POST", "/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    infill = {"input_prefix": "x = 1\n", "input_suffix": "", "prompt": "", "n_predict": 4, "input_extra": [CHUNK]}
    ask(server, ALICE, "POST", "/infill", infill)
    shown = kept(server, ALICE)
    assert kept(server, BOB) == 0
    server.stop()
    server = serve()
    assert 20 <= kept(server, ALICE) < shown, "answers are kept, what editors have shown is not"
    assert kept(server, BOB) == 0
    again = ask(server, ALICE, "POST", "/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    assert again == said
    ask(server, ALICE, "DELETE", "/v1/workspace")
    assert kept(server, ALICE) == 0
    assert in_the_file(server, tmp_path) == 0
    ask(server, ALICE, "POST", "/v1/chat/completions", CHAT)
    server.stop()
    server = serve()
    assert kept(server, ALICE) >= 20, "what is said afterwards is kept again"


def test_who_forgets_is_told_where_the_file_cannot_be_written(serve: Any, tmp_path: Path) -> None:
    server = serve()
    ask(server, ALICE, "POST", "/v1/chat/completions", CHAT)
    server.service.close()
    in_the_way = tmp_path / "day.bin.tmp"
    in_the_way.mkdir()
    answer = server.ask(ALICE, "DELETE", "/v1/workspace")
    assert answer.status_code == 500
    assert "could not be written" in answer.text and str(tmp_path) not in answer.text
    assert kept(server, ALICE) == 0
    in_the_way.rmdir()
    ask(server, ALICE, "DELETE", "/v1/workspace")
    assert in_the_file(server, tmp_path) == 0
