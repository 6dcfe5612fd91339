"""A session's file: what is kept of whom, what is refused, how it is bounded and forgotten."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieve_spec.errors import StoreCorruptError, StoreError, TokenizerMismatchError
from retrieve_spec.sources.rollouts import RolloutMemory
from retrieve_spec.sources.session import SessionMemory
from retrieve_spec.sources.session_file import SessionFile

MANY = 1 << 20


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def texts(session: SessionMemory) -> list[list[int]]:
    return [text.tolist() for text in session.texts]


def test_a_later_process_begins_with_what_was_said_to_its_scope(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "day.bin"
    file = SessionFile(path, "tokenizer", 1000)
    alice, nobody = file.open("alice", MANY), file.open("", MANY)
    alice.remember(ids(1, 2))
    nobody.remember(ids(3, 4))
    alice.read(ids(5, 6))
    assert texts(alice) == [[1, 2], [5, 6]]
    file.keep()
    again = SessionFile(path, "tokenizer", 1000)
    assert texts(again.open("alice", MANY)) == [[1, 2]], "what is only read is not kept"
    assert texts(again.open("", MANY)) == [[3, 4]]
    assert texts(again.open("bob", MANY)) == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"alice" not in path.read_bytes()


def test_who_may_read_the_file_is_up_to_its_owner(tmp_path: Path) -> None:
    file = SessionFile(tmp_path / "day.bin", "tokenizer", 1000)
    session = file.open("", MANY)
    for token in (1, 2):
        session.remember(ids(token))
        file.keep()
        assert file.path is not None
        assert stat.S_IMODE(file.path.stat().st_mode) == (0o600 if token == 1 else 0o640)
        file.path.chmod(0o640)


def test_tokens_that_the_model_does_not_embed_are_left_out(tmp_path: Path) -> None:
    file = SessionFile(tmp_path / "day.bin", "tokenizer", 1000)
    session = file.open("", MANY)
    session.remember(ids(1, 500))
    session.remember(ids(1, 499))
    assert texts(file.open("", 500)) == [[1, 499]]


def test_what_is_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "day.bin"
    file = SessionFile(path, "one", 1000)
    file.open("", MANY).remember(ids(1, 2))
    file.save()
    names = [SessionFile(tmp_path / name, name, 1)._tokenizer.hex()[:12] for name in ("one", "other")]
    with pytest.raises(TokenizerMismatchError, match=f"{names[1]}.*{names[0]}"):
        SessionFile(path, "other", 1000)
    whole = path.read_bytes()
    with RolloutMemory(tmp_path / "rollouts.bin") as rollouts:
        rollouts.remember(ids(1), ids(2))
    for content in (whole[:-1], whole[:-4] + b"\1\1\1\1", b"", (tmp_path / "rollouts.bin").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(StoreCorruptError):
            SessionFile(path, "one", 1000)
        assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    with pytest.raises(StoreError, match="could not read"):
        SessionFile(path, "one", 1000)


def test_another_file_that_came_meanwhile_ends_no_generation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "day.bin"
    here, there = SessionFile(path, "one", 1000), SessionFile(path, "other", 1000)
    for file in (there, here):
        file.open("", MANY).remember(ids(1, 2))
        file.keep()
    assert "sessions are not saved: TokenizerMismatchError" in caplog.text
    assert texts(SessionFile(path, "other", 1000).open("", MANY)) == [[1, 2]]


def test_the_oldest_answers_of_a_scope_give_way(tmp_path: Path) -> None:
    file = SessionFile(tmp_path / "day.bin", "tokenizer", 100)
    busy, quiet = file.open("busy", MANY), file.open("quiet", MANY)
    quiet.remember(ids(1, 2))
    for number in range(20):
        busy.remember(ids(*range(10 * number, 10 * number + 10)))
    kept = texts(file.open("busy", MANY))
    assert kept[-1] == list(range(190, 200))
    assert 50 <= sum(map(len, kept)) <= 100
    assert texts(file.open("quiet", MANY)) == [[1, 2]], "one scope pushes out nothing of another"


def test_a_save_is_due_when_it_is_worth_writing_everything(tmp_path: Path) -> None:
    """The first answer at once, later ones together: of n answers, all saves write a multiple of n."""
    file = SessionFile(tmp_path / "day.bin", "tokenizer", 100_000)
    session = file.open("", MANY)
    written = 0
    for number in range(400):
        session.remember(ids(*range(10 * number, 10 * number + 10)))
        if file._is_due():
            file.keep()
            written += file.num_bytes
    assert written < 40 * file.num_bytes
    assert len(SessionFile(file.path, "tokenizer", 100_000).open("", MANY).texts) > 300  # type: ignore[arg-type]
    file.keep(at_once=True)
    assert len(SessionFile(file.path, "tokenizer", 100_000).open("", MANY).texts) == 400  # type: ignore[arg-type]


def test_a_scope_is_forgotten_alone(tmp_path: Path) -> None:
    path = tmp_path / "day.bin"
    file, other = SessionFile(path, "tokenizer", 1000), SessionFile(path, "tokenizer", 1000)
    alice = file.open("alice", MANY)
    alice.remember(ids(1, 2))
    file.open("bob", MANY).remember(ids(3, 4))
    other.open("bob", MANY).remember(ids(5, 6))
    for one in (file, other):
        one.save()
    file.forget_scope("alice")
    alice.remember(ids(7, 8))
    file.keep(at_once=True)
    again = SessionFile(path, "tokenizer", 1000)
    assert texts(again.open("alice", MANY)) == []
    assert texts(again.open("bob", MANY)) == [[3, 4], [5, 6]], "what another process saved meanwhile is kept"


@pytest.mark.parametrize("scope", ["alice", None])
def test_what_cannot_be_forgotten_in_the_file_is_forgotten_with_the_next_save(
    tmp_path: Path, scope: str | None
) -> None:
    path = tmp_path / "day.bin"
    file = SessionFile(path, "tokenizer", 1000)
    file.open("alice", MANY).remember(ids(1, 2))
    file.save()
    in_the_way = path.with_name(path.name + ".tmp")
    in_the_way.mkdir()
    with pytest.raises(StoreError, match="could not write sessions"):
        file.forget(None if scope is None else file._key(scope))
    assert texts(file.open("alice", MANY)) == []
    file.open("bob", MANY).remember(ids(3, 4))
    file.keep(at_once=True)
    assert texts(SessionFile(path, "tokenizer", 1000).open("alice", MANY)) == [[1, 2]], "still in the way"
    in_the_way.rmdir()
    file.keep(at_once=True)
    again = SessionFile(path, "tokenizer", 1000)
    assert texts(again.open("alice", MANY)) == []
    assert texts(again.open("bob", MANY)) == [[3, 4]]


def test_another_file_is_not_read_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreCorruptError, match=f"another file of {1 << 40} bytes"):
        SessionFile(path, "tokenizer", 1000)


_WRITER = """
import sys
import numpy as np
from retrieve_spec.sources.session_file import SessionFile
path, first, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
file = SessionFile(path, "tokenizer", 1 << 16)
session = file.open("", 1 << 20)
for number in range(rounds):
    session.remember(np.arange(first + number, first + number + 20, dtype=np.int32))
    file.keep(at_once=True)
    print(number, flush=True)
"""


def _writer(path: Path, first: int, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, str(path), str(first), str(rounds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def test_two_processes_and_a_kill_lose_nothing_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "day.bin"
    killed, whole = _writer(path, 0, 100_000), _writer(path, 500_000, 20)
    assert killed.stdout is not None and whole.stdout is not None
    said = [int(killed.stdout.readline()) for _ in range(20)][-1]
    whole.stdout.read()
    assert whole.wait(120) == 0
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    for writer in (killed, whole):
        assert writer.stdout is not None
        writer.stdout.close()
    kept = [text[0] for text in texts(SessionFile(path, "tokenizer", 1 << 16).open("", MANY))]
    assert set(range(said + 1)) | {500_000 + number for number in range(20)} <= set(kept)
